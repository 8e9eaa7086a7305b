"""What one run of the service is told: options over environment over defaults."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from spark_schemas.local_address import is_loopback
from spark_service import env
from spark_service.errors import DataDirError, RefusedError
from spark_service.rate_limit import Rate, Rates

__all__ = ["DATABASE_NAME", "Settings", "default_data_dir"]

DATABASE_NAME = "service.duckdb"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, checked."""

    host: str
    port: int
    data_dir: Path
    token: str | None
    max_body_bytes: int
    max_inflated_bytes: int
    db_memory: str
    db_threads: int
    open_access: bool
    rates: Rates
    retention_days: int
    segment_after_days: int
    segments_dir: Path
    history_per_key: int
    read_cache_bytes: int
    min_sessions: int
    window_days: int
    half_life_days: int
    ray: str | None
    """Address of a Ray cluster that builds profiles, or ``auto``; ``None`` for threads."""

    @classmethod
    def resolve(
        cls,
        *,
        host: str | None = None,
        port: int | None = None,
        data_dir: Path | None = None,
        open_access: bool = False,
        ray: str | None = None,
    ) -> Self:
        """Read the environment and let the given options win.

        Raises :class:`EnvironmentVariableError` for unusable variables.
        """
        chosen_dir = data_dir if data_dir is not None else env.DATA_DIR.read()
        data_dir = (chosen_dir if chosen_dir is not None else default_data_dir()).absolute()
        return cls(
            host=host if host is not None else env.HOST.read(),
            port=port if port is not None else env.PORT.read(),
            data_dir=data_dir,
            token=env.TOKEN.read(),
            max_body_bytes=env.MAX_BODY_BYTES.read(),
            max_inflated_bytes=env.MAX_INFLATED_BYTES.read(),
            db_memory=env.DB_MEMORY.read(),
            db_threads=env.DB_THREADS.read(),
            open_access=open_access,
            rates=Rates(
                reads=Rate(env.READ_RATE.read(), env.READ_BURST.read()),
                uploads=Rate(env.UPLOAD_RATE.read(), env.UPLOAD_BURST.read()),
                failures=Rate(env.FAILURE_RATE.read(), env.FAILURE_BURST.read()),
            ),
            retention_days=env.RETENTION_DAYS.read(),
            segment_after_days=env.SEGMENT_AFTER_DAYS.read(),
            segments_dir=(env.SEGMENTS_DIR.read() or data_dir / "segments").absolute(),
            history_per_key=env.HISTORY_PER_KEY.read(),
            read_cache_bytes=env.READ_CACHE_BYTES.read(),
            min_sessions=env.MIN_SESSIONS.read(),
            window_days=env.WINDOW_DAYS.read(),
            half_life_days=env.HALF_LIFE_DAYS.read(),
            ray=ray if ray is not None else env.RAY.read(),
        )

    @property
    def database(self) -> Path:
        """The database file."""
        return self.data_dir / DATABASE_NAME

    def require_safe_address(self) -> None:
        """Raise :class:`RefusedError` where anyone could do everything, or nobody anything; before any file is made."""
        if self.open_access and not is_loopback(self.host):
            raise RefusedError(
                f"refusing --open on {self.host}: anyone who reaches it could read, write and delete, "
                "expected a loopback address",
                "listen on 127.0.0.1, or leave out --open and make tokens with spark-service token create",
            )
        if not self.database.exists():
            self.require_tokens(any_stored=False)

    def require_tokens(self, *, any_stored: bool) -> None:
        """Raise :class:`RefusedError` unless somebody can authenticate, or nobody needs to."""
        if not (self.open_access or any_stored or self.token is not None):
            raise RefusedError(
                f"refusing to listen on {self.host} without a token: found no {env.TOKEN.name} "
                f"and none that is valid in {self.database}",
                "make one with spark-service token create --scope admin, or, for this machine alone, give --open",
            )

    def prepare_data_dir(self) -> None:
        """Create the data folder, readable by its owner alone, and prove that it can be written.

        Raises :class:`DataDirError` with the operating system's reason.
        """
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.data_dir):
                pass
        except OSError as error:
            raise DataDirError(
                f"data folder {self.data_dir}: {error.strerror or error}, expected a folder that can be written",
                "choose another with --data-dir PATH, or correct its permissions",
            ) from error


def default_data_dir() -> Path:
    """The user's data folder for this service."""
    import platformdirs

    return Path(platformdirs.user_data_dir("spark")) / "service"
