"""Errors, as each dialect spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from spark_agent.server.generation import AbandonedError, BusyError, FellBehindError
from spark_runtime.errors import ContextFullError, GrammarError, SamplingError, SparkRuntimeError

__all__ = ["EXPECTED", "ApiError", "ContextExceededError", "Dialect", "dialect_of", "request_id_of"]

Dialect = Literal["openai", "anthropic"]
EXPECTED = (SparkRuntimeError, AbandonedError, BusyError)
"""What may happen without being a bug."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def dialect_of(scope: Scope) -> Dialect:
    """Whose words a request speaks, told from its path, or from the header that only one client sends."""
    names = {name.lower() for name, _ in scope["headers"]}
    anthropic = scope["path"].startswith("/v1/messages") or b"anthropic-version" in names
    return "anthropic" if anthropic else "openai"


def request_id_of(scope: Scope) -> str | None:
    """The id that every answer to this request bears."""
    return scope.get("spark.request_id")


class ApiError(Exception):
    """A failure with its HTTP status; ``param`` is the field at fault, ``code`` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """What a client is told of a failure; nothing of a bug but that it was one."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextFullError):
            return cls(400, _sentence(error), "context_length_exceeded", param="messages")
        if isinstance(error, GrammarError):
            return cls(400, _sentence(error), "grammar", param="response_format")
        if isinstance(error, SamplingError):
            return cls(400, _sentence(error), "sampling")
        if isinstance(error, BusyError):
            message = "too many requests are waiting; try again in a moment"
            return cls(503, message, "busy", headers={"Retry-After": "1"})
        if isinstance(error, FellBehindError):
            return cls(503, "the answer was not read for too long, and ends here", "not_read")
        if isinstance(error, AbandonedError):
            return cls(503, "the agent is shutting down", "shutting_down")
        if isinstance(error, SparkRuntimeError):
            return cls(500, _sentence(error), "engine")
        return cls(500, "an error inside the agent; see its log", "internal")

    def message(self, _dialect: Dialect) -> str:
        """What a person reads."""
        return str(self)

    def body(self, dialect: Dialect = "openai", request_id: str | None = None) -> dict[str, Any]:
        """The JSON object."""
        message = self.message(dialect)
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> Response:
        """The whole answer to a request."""
        body = self.body(dialect_of(scope), request_id_of(scope))
        return JSONResponse(body, status_code=self.status, headers=self.headers)


class ContextExceededError(ApiError):
    """A prompt that does not fit.

    Tools tell this from other failures by the very words of each dialect's own servers, and then shorten the
    conversation by themselves instead of giving up: Claude Code reads both numbers.
    """

    def __init__(self, prompt_tokens: int, n_ctx: int) -> None:
        what = "shorten the conversation or start the agent with a larger --ctx"
        super().__init__(
            400,
            f"This model's maximum context length is {n_ctx} tokens, but the prompt has {prompt_tokens}: {what}",
            "context_length_exceeded",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self._anthropic = f"prompt is too long: {prompt_tokens} tokens > {n_ctx - 1} maximum: {what}"

    def message(self, dialect: Dialect) -> str:
        """What a person reads, and a tool."""
        return self._anthropic if dialect == "anthropic" else str(self)


def _sentence(error: SparkRuntimeError) -> str:
    return f"{error}: {error.hint}" if error.hint else str(error)
