"""The error of a request that cannot be answered."""

from __future__ import annotations

from typing import Any

from strop.generation.base import InvalidRequest


class BadRequest(ValueError):
    """A request that cannot be answered: what was found, and why not."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def format_error(error: Exception) -> dict[str, Any]:
    """Return an error as OpenAI's API does. What failed inside the server is not told to the client."""
    if isinstance(error, BadRequest):
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    if isinstance(error, InvalidRequest):
        return {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}}
    return {"error": {"message": "the server failed; its log says why", "type": "server_error", "param": None, "code": None}}
