"""What every command starts from: environment, config, output, and the files they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spark_agent.answer_cache import AnswerCache
from spark_agent.config import Config, load_config
from spark_agent.env import Environment
from spark_agent.errors import UsageError
from spark_agent.http import ServiceClient
from spark_agent.identity import session_key
from spark_agent.output import Output
from spark_agent.paths import answers_dir, config_path, local_key_path, spool_path
from spark_agent.service_url import normalise_service_url
from spark_agent.spool import Spool

if TYPE_CHECKING:
    from spark_runtime.engine import Engine

__all__ = ["AgentContext", "warn_about_counting"]


@dataclass(frozen=True, slots=True)
class AgentContext:
    """One command's settings; opens what it is asked for and nothing else."""

    environment: Environment
    config: Config
    output: Output

    @classmethod
    def create(cls, *, json_mode: bool = False) -> AgentContext:
        """Read the environment and the config file; raise :class:`ConfigError` for a bad one."""
        environment = Environment.read()
        return cls(environment, load_config(config_path()), Output(json_mode=json_mode, environment=environment))

    def service_url(self, override: str | None = None) -> str:
        """The calibration service to talk to; raise :class:`UsageError` when ``--service`` is no address."""
        if override is None:
            return self.config.effective_service_url(self.environment)
        try:
            return normalise_service_url(override)
        except ValueError as error:
            raise UsageError(f"--service: found {override!r}, {error}", "e.g. http://127.0.0.1:8710") from error

    def client(self, service_url: str | None = None) -> ServiceClient:
        """A client of the calibration service; close it."""
        token = self.environment.service_token or self.config.token
        return ServiceClient(
            self.service_url(service_url),
            token,
            offline=self.environment.offline,
            cache=AnswerCache(answers_dir()),
        )

    def spool(self) -> Spool:
        """The spool; close it."""
        return Spool.open(spool_path())

    def session_key(self) -> bytes:
        """The key of session hashes: the team's, or this machine's own."""
        return session_key((self.environment.team_key, self.config.team_key), local_key_path())

    def model_path(self, given: Path | None) -> Path:
        """The model to use: the one given, the environment's, or the bundled demo model (said on stderr).

        A path, or a name of ``spark-agent models ls``: what is no file and does not look like one is a name. Raises
        :class:`SparkError` where no model, or several, have it.
        """
        if given is None and self.environment.model is not None:
            given = Path(self.environment.model)
        if given is not None:
            if given.suffix == ".gguf" or given.is_absolute() or given.exists():
                return given
            from spark_agent.models.names import find_model

            found = find_model(str(given))
            self.output.info(f"{given} is {found}")
            return found
        from spark_runtime.models import demo_model_path

        self.output.info("no model named: using the bundled demo model")
        return demo_model_path()


def warn_about_counting(context: AgentContext, engine: Engine) -> None:
    """Say why counting is slower than it could be on this machine."""
    fault = engine.native_fault
    if fault is not None:
        context.output.warning(f"counting goes through Python and slows decoding down: {fault}")
        if fault.hint is not None:
            context.output.hint(fault.hint)
