"""The agents that run on this machine: one small file each, readable by their owner only.

A file names a process and when it started, so that one whose process is gone is known even where its number was given
to another. What cannot be understood is left where it is and said.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spark_agent.addresses import EVERY, reachable
from spark_agent.files import replacing
from spark_agent.paths import agents_dir, ensure_private_dir

if TYPE_CHECKING:
    from spark_agent.tls import ClientTls

__all__ = ["RunningAgent", "RunningAgents", "process_started"]

MAX_FILE_BYTES = 64 * 1024
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class RunningAgent(BaseModel):
    """What an agent's file says."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    process_started: str | None
    """See :func:`process_started`."""
    host: Annotated[str, Field(max_length=64)]
    """The address it listens on."""
    port: Annotated[int, Field(ge=1, le=65535)]
    base_url: Annotated[str, Field(max_length=200)]
    model: Annotated[str, Field(max_length=300)]
    """Its name, not its path."""
    fingerprint: Annotated[str, Field(max_length=64)]
    started_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    """Seconds since the epoch."""
    token: Annotated[str | None, Field(max_length=4096, repr=False)] = None
    """What its API asks for, if anything."""
    certificate_sha256: Annotated[str | None, Field(pattern="^[0-9a-f]{64}$")] = None
    """Of its certificate, where it speaks TLS."""
    trust_file: Annotated[str | None, Field(max_length=4096)] = None
    """Its certificate's file, where nobody else vouches for that: what tools must be told to trust."""

    @property
    def tls(self) -> ClientTls | None:
        """How it is trusted, where it speaks TLS."""
        if self.certificate_sha256 is None:
            return None
        from spark_agent.tls import ClientTls

        return ClientTls(self.certificate_sha256)

    @property
    def address(self) -> str:
        """Where it is reached from this machine."""
        return reachable(self.host)


@dataclass(frozen=True, slots=True)
class RunningAgents:
    """The folder of these files."""

    folder: Path

    @classmethod
    def of_this_machine(cls) -> RunningAgents:
        """Those of this person."""
        return cls(agents_dir())

    def add(self, agent: RunningAgent) -> None:
        """Write an agent's file, whole or not at all; raise :class:`OSError`."""
        ensure_private_dir(self.folder)
        with replacing(self._path(agent.pid)) as file:
            file.write(agent.model_dump_json().encode())

    def remove(self, pid: int) -> None:
        """Remove an agent's file, if it is there; raise :class:`OSError`."""
        self._path(pid).unlink(missing_ok=True)

    def find(self, warn: Callable[[str], None] = lambda _: None) -> list[RunningAgent]:
        """Agents whose process is there, in the order they were started; files of those that ended are removed.

        ``warn`` is told of files that cannot be used.
        """
        try:
            paths = sorted(self.folder.glob("*.json"))
        except OSError as error:
            warn(f"cannot read {self.folder}: {error.strerror}")
            return []
        found = []
        for path in paths:
            try:
                agent = _read(path)
                if path != self._path(agent.pid):
                    raise ValueError(f"found process {agent.pid}, expected the one that the file is named after")
                if _is_running(agent):
                    found.append(agent)
                else:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue  # it has just ended
            except (OSError, ValueError) as error:
                warn(f"{path} is not a running agent's: {_reason(error)}")
        return sorted(found, key=lambda agent: (agent.started_s, agent.pid))

    def listening_on(self, host: str, port: int) -> RunningAgent | None:
        """The agent that has a port of an address."""
        found = (agent for agent in self.find() if agent.port == port)
        return next((agent for agent in found if host in EVERY or agent.host in {host, *EVERY}), None)

    def _path(self, pid: int) -> Path:
        return self.folder / f"{pid}.json"


def process_started(pid: int) -> str | None:
    """When a process started, as text that only its own start gives; ``None`` where there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None
    # The second field is the program's name in brackets, and may hold anything; the 22nd is the start, in ticks.
    after_name = fields[fields.rindex(b")") + 2 :].split()
    return f"{boot} {after_name[19].decode()}"


def _read(path: Path) -> RunningAgent:
    with open(os.open(path, _OPEN_FLAGS), "rb") as file:  # noqa: PTH123 - pathlib can not pass flags
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("found no regular file")
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            raise ValueError(f"found mode {stat.S_IMODE(found.st_mode):04o}, expected 0600 and the same owner")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"found more than {MAX_FILE_BYTES} bytes")
    agent = RunningAgent.model_validate_json(content)
    ipaddress.ip_address(agent.host)
    return agent


def _is_running(agent: RunningAgent) -> bool:
    if agent.process_started is not None:
        return process_started(agent.pid) == agent.process_started
    try:
        os.kill(agent.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another person's process: it is there
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc']) or 'file'}: {first['msg']}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
