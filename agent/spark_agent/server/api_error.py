"""Errors as the OpenAI API spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from spark_agent.server.generation import AbandonedError
from spark_runtime.errors import ContextFullError, SparkRuntimeError

__all__ = ["ApiError"]


class ApiError(Exception):
    """An answer in the OpenAI error shape."""

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
        if isinstance(error, ContextFullError):
            return cls(400, _sentence(error), "context_length_exceeded", param="messages")
        if isinstance(error, AbandonedError):
            return cls(503, "the agent is shutting down", "shutting_down")
        if isinstance(error, SparkRuntimeError):
            return cls(500, _sentence(error), "engine")
        return cls(500, "an error inside the agent; see its log", "internal")

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def _sentence(error: SparkRuntimeError) -> str:
    return f"{error}: {error.hint}" if error.hint else str(error)
