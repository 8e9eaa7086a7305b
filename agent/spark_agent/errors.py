"""Everything the agent can say went wrong.

SparkError                        exit 1: it did not work
├── UsageError                    exit 2: the command line is wrong
├── ConfigError                   a variable, the config file or the key file is wrong
├── RefusedError                  exit 3: refused for safety or privacy
├── SpoolError                    the spool cannot be used as it is
│   └── SpoolFullError            the disk, or the spool's own limit, has no room
└── ServiceError                  the calibration service did not help
    ├── ServiceUnreachableError   no answer, or not in time
    ├── ServiceRefusedError       an error status, with the service's own reason
    └── ServiceAnswerError        an answer that breaks the protocol

The message says what failed, what was found and what was expected; the hint says what to do next.
"""

from __future__ import annotations

from spark_schemas.api import Problem

__all__ = [
    "ConfigError",
    "RefusedError",
    "ServiceAnswerError",
    "ServiceError",
    "ServiceRefusedError",
    "ServiceUnreachableError",
    "SparkError",
    "SpoolError",
    "SpoolFullError",
    "UsageError",
]


class SparkError(Exception):
    """Base of the tree: ``str(error)`` is the message, ``hint`` the next step, ``exit_code`` the process's status."""

    exit_code: int = 1

    def __init__(self, message: str, hint: str | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(SparkError):
    """The command line asks for something that does not exist or contradicts itself."""

    exit_code = 2


class ConfigError(SparkError):
    """An environment variable, the config file or the key file cannot be used; it is never overwritten."""


class RefusedError(SparkError):
    """It could be done, but not safely: no consent, a secret over an open line, another model's manifest."""

    exit_code = 3


class SpoolError(SparkError):
    """The spool cannot be read or written as it is; it is never deleted."""


class SpoolFullError(SpoolError):
    """No room for another histogram; what was accepted before is intact."""


class ServiceError(SparkError):
    """The calibration service did not do what was asked."""


class ServiceUnreachableError(ServiceError):
    """No connection, no complete answer, or not within the time allowed."""


class ServiceRefusedError(ServiceError):
    """The service answered with an error status.

    ``problem`` is its explanation, if it gave a readable one; ``retry_after_s`` the seconds it asked to wait.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        status: int,
        problem: Problem | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.problem = problem
        self.retry_after_s = retry_after_s


class ServiceAnswerError(ServiceError):
    """The peer's answer breaks the protocol: wrong type, wrong schema, too large, a redirect."""
