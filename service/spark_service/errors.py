"""Every exception of the service.

SparkServiceError                  a message for people, a hint, an exit code
├── EnvironmentVariableError       a SPARKMOE_* variable holds a value that cannot be used
├── UsageError                     an option holds a value that cannot be used (exit code 2)
├── RefusedError                   refused for safety (exit code 3)
├── ServiceCallError               a running service, asked by a command, refused or did not answer
├── DataDirError                   the data folder cannot be created or written
├── AddressError                   the address cannot be listened on
├── ExecutorError                  the cluster that builds profiles cannot be used
├── SigningKeyError                the key file of the data folder cannot be used
├── DatabaseError                  the database cannot be opened
│   ├── DatabaseLockedError        another process owns the file
│   ├── DatabaseFormatError        the file is damaged, or not this service's
│   └── MigrationError             the schema is newer than this program, or was changed
├── BackupError                    a backup cannot be written, or is not whole
├── VerificationError              what is stored contradicts itself
├── StorageError                   the open database refused an operation (HTTP 503)
│   └── StorageFullError           no room left for it (HTTP 507)
└── RequestError                   what a client sent or asked for is wrong (HTTP 4xx, with a stable code)
    ├── FormError                  a form of the dashboard, which browsers alone send, cannot be taken
    └── OverloadedError            nothing is wrong with it, but too much else waits (HTTP 503)

A message says what failed, what was found and what was expected; the hint says what to do.
"""

from __future__ import annotations

__all__ = [
    "AddressError",
    "BackupError",
    "DataDirError",
    "DatabaseError",
    "DatabaseFormatError",
    "DatabaseLockedError",
    "EnvironmentVariableError",
    "ExecutorError",
    "FormError",
    "MigrationError",
    "OverloadedError",
    "RefusedError",
    "RequestError",
    "ServiceCallError",
    "SigningKeyError",
    "SparkServiceError",
    "StorageError",
    "StorageFullError",
    "UsageError",
    "VerificationError",
]


class SparkServiceError(Exception):
    """Base of all: ``message`` for people, ``hint`` with the next step, ``exit_code`` for the command line."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class EnvironmentVariableError(SparkServiceError):
    """A ``SPARKMOE_*`` variable holds a value that cannot be used."""


class UsageError(SparkServiceError):
    """An option holds a value that cannot be used."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = "--help describes every option") -> None:
        super().__init__(message, hint)


class RefusedError(SparkServiceError):
    """Refused for safety."""

    exit_code = 3


class ServiceCallError(SparkServiceError):
    """A running service, asked by a command, refused or did not answer."""


class DataDirError(SparkServiceError):
    """The data folder cannot be created or written."""


class AddressError(SparkServiceError):
    """The address cannot be listened on."""


class ExecutorError(SparkServiceError):
    """The cluster that is to build profiles is not installed, not there, or failed."""


class SigningKeyError(SparkServiceError):
    """The key that signs manifests, or its history, cannot be used; it is never replaced."""


class DatabaseError(SparkServiceError):
    """The database cannot be opened."""


class DatabaseLockedError(DatabaseError):
    """Another process owns the database file."""


class DatabaseFormatError(DatabaseError):
    """The database file is damaged, or is not this service's."""


class MigrationError(DatabaseError):
    """The schema is newer than this program, or its history was changed."""


class BackupError(SparkServiceError):
    """A backup cannot be written, or one that is read is damaged, foreign or newer than this program."""


class VerificationError(SparkServiceError):
    """What is stored contradicts itself."""


class StorageError(SparkServiceError):
    """The open database refused an operation; nothing of it was kept."""


class StorageFullError(StorageError):
    """No room left, on disk or in the memory that the database may use; nothing was kept."""


class RequestError(SparkServiceError):
    """What a client sent or asked for is wrong. ``code`` is stable; ``status`` is the HTTP status.

    ``field``, ``found`` and ``expected`` name the fault where there is a single one; ``headers`` are sent along.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        found: str | None = None,
        expected: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.code = code
        self.field = field
        self.found = found
        self.expected = expected
        self.headers = headers


class FormError(RequestError):
    """A form of the dashboard is damaged, foreign or sent twice; no program of an agent or a team ever sees this."""


class OverloadedError(RequestError):
    """Nothing is wrong with a request, but too much else waits: it was not kept, and may be sent again."""
