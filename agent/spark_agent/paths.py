"""Where the agent keeps its files (XDG folders through platformdirs). Nothing is created by asking."""

from __future__ import annotations

from pathlib import Path

import platformdirs

__all__ = [
    "agents_dir",
    "answers_dir",
    "api_key_path",
    "benchmarks_dir",
    "cache_dir",
    "config_dir",
    "config_path",
    "data_dir",
    "ensure_private_dir",
    "guesses_dir",
    "launch_dir",
    "local_key_path",
    "manifests_dir",
    "own_counts_path",
    "prefetch_trials_dir",
    "service_keys_dir",
    "spool_path",
    "state_dir",
    "workload_rules_path",
]

_APP = "spark"


def config_dir() -> Path:
    """Folder of what a person decided: ``$XDG_CONFIG_HOME/spark``."""
    return platformdirs.user_config_path(_APP, appauthor=False)


def state_dir() -> Path:
    """Folder of what this machine gathered: ``$XDG_STATE_HOME/spark``."""
    return platformdirs.user_state_path(_APP, appauthor=False)


def data_dir() -> Path:
    """Folder of what was fetched or built to be kept: ``$XDG_DATA_HOME/spark``."""
    return platformdirs.user_data_path(_APP, appauthor=False)


def cache_dir() -> Path:
    """Folder of what can be made again: ``$XDG_CACHE_HOME/spark``."""
    return platformdirs.user_cache_path(_APP, appauthor=False)


def config_path() -> Path:
    """The config file."""
    return config_dir() / "config.toml"


def spool_path() -> Path:
    """The database of histograms that wait for upload."""
    return state_dir() / "spool.db"


def agents_dir() -> Path:
    """Folder of the running agents, one file each."""
    return state_dir() / "agents"


def launch_dir() -> Path:
    """Folder of what coding tools are told in files, when they are launched."""
    return state_dir() / "launch"


def workload_rules_path() -> Path:
    """The rules that give requests a workload, unless another file is named."""
    return config_dir() / "workloads.toml"


def local_key_path() -> Path:
    """File of the machine's own session-hash key, used when the team shares none."""
    return state_dir() / "session.key"


def api_key_path() -> Path:
    """File of the key that the agent makes for its own API where it listens beyond loopback."""
    return state_dir() / "api.key"


def manifests_dir() -> Path:
    """Folder of pulled placement manifests."""
    return data_dir() / "manifests"


def answers_dir() -> Path:
    """Folder of services' answers about profiles."""
    return data_dir() / "answers"


def benchmarks_dir() -> Path:
    """Folder of what ``spark-agent bench`` measured on this machine."""
    return state_dir() / "bench"


def guesses_dir() -> Path:
    """Folder of what was learned for fetching experts early, a file a model."""
    return state_dir() / "guesses"


def prefetch_trials_dir() -> Path:
    """Folder of what trials of fetching early found on this machine."""
    return state_dir() / "prefetch"


def own_counts_path() -> Path:
    """The database of what this machine's own sessions selected."""
    return data_dir() / "own-sessions.db"


def service_keys_dir() -> Path:
    """Folder of the pinned signing keys of calibration services."""
    return state_dir() / "service-keys"


def ensure_private_dir(path: Path) -> Path:
    """Create a folder that only its owner can enter, if it is not there yet, and return it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
