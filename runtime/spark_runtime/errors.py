"""Errors of the runtime.

SparkRuntimeError
├── InstallationError          the installed llama-cpp-python is missing or not the one this version is checked against
├── ModelFileError             the file cannot be read as a model
│   ├── NotGgufError           it is something else
│   └── TruncatedModelError    it ends too early, or a shard is missing
├── UnsupportedModelError      a valid GGUF that llama.cpp or Spark cannot run
│   └── NotMoeError            it has no routed experts
├── ModelMismatchError         a manifest or profile of another model
├── PlanError                  the model does not fit the memory as asked
├── ContextFullError           a prompt or conversation longer than the context
├── ChatTemplateError          the model's chat template fails on these messages
├── SamplingError              sampling parameters that cannot be followed
│   └── GrammarError           a grammar that llama.cpp cannot read, or that leaves no token to choose
├── ClosedError                a model that has been closed
├── GivenUpError               loading was given up by whoever asked for it
├── TierError                  experts cannot be put into slots as asked
├── RoutingReadError           what llama.cpp computed cannot be a router's selection
└── DecodeError                llama.cpp failed while computing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_runtime.memory_fix import Fix

__all__ = [
    "ChatTemplateError",
    "ClosedError",
    "ContextFullError",
    "DecodeError",
    "GivenUpError",
    "GrammarError",
    "InstallationError",
    "ModelFileError",
    "ModelMismatchError",
    "NotGgufError",
    "NotMoeError",
    "PlanError",
    "RoutingReadError",
    "SamplingError",
    "SparkRuntimeError",
    "TierError",
    "TruncatedModelError",
    "UnsupportedModelError",
]


class SparkRuntimeError(Exception):
    """A failure with a message for a person, a hint of what to do, and the exit code a command ends with."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class InstallationError(SparkRuntimeError):
    """llama-cpp-python is missing, or another version than the pinned one."""


class ModelFileError(SparkRuntimeError):
    """A model file that cannot be read."""


class NotGgufError(ModelFileError):
    """The file is not GGUF."""


class TruncatedModelError(ModelFileError):
    """The file or one of its shards is incomplete."""


class UnsupportedModelError(SparkRuntimeError):
    """A readable model that cannot be run."""


class NotMoeError(UnsupportedModelError):
    """A dense model: there are no experts to place."""


class ModelMismatchError(SparkRuntimeError):
    """Refused for safety: placement data of another model."""

    exit_code = 3


class PlanError(SparkRuntimeError):
    """Refused before loading: the plan needs more memory than there is."""

    def __init__(self, message: str, fixes: Sequence[Fix] = ()) -> None:
        super().__init__(message, "; or ".join(fix.text for fix in fixes) or None)
        self.fixes = tuple(fixes)
        """Changes of which each alone makes it fit, the smallest first."""


class ContextFullError(SparkRuntimeError):
    """More tokens than the context holds."""


class ChatTemplateError(SparkRuntimeError):
    """The chat template rejects the messages."""


class SamplingError(SparkRuntimeError):
    """Sampling parameters that cannot be followed."""


class GrammarError(SamplingError):
    """A grammar that cannot be read, or that costs too much to follow, or that nothing satisfies."""


class ClosedError(SparkRuntimeError):
    """A model that has been closed, or what belonged to it."""


class GivenUpError(SparkRuntimeError):
    """Loading was given up by whoever asked for it."""


class TierError(SparkRuntimeError):
    """Experts cannot be put into slots as asked: a start that makes no sense, or no memory."""


class RoutingReadError(SparkRuntimeError):
    """Selections that no router can have made."""


class DecodeError(SparkRuntimeError):
    """llama.cpp returned an error from a decode call."""
