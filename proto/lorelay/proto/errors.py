"""One vocabulary of failures, end to end: on the bus, in events, in logs and in an HTTP answer.

A failure has a code, a public message and, for the log only, a detail.  The public message never holds a secret, a
path, a class name or a provider's words; those go into the detail.  Whether a retry can help, and the HTTP status, are
properties of the code and stand in one table here; nobody decides them at a catch site.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class ErrorCode(enum.StrEnum):
    """Every way a request can fail.  Closed: codes are added, never renamed.  See docs/reference/errors.md."""

    INVALID_REQUEST = "invalid_request"
    INVALID_LORA_MODEL_ID = "invalid_lora_model_id"
    RUNTIME_LORA_BASE_MODEL_REQUIRED = "runtime_lora_base_model_required"
    UNSUPPORTED_LORA_SCHEME = "unsupported_lora_scheme"
    RUNTIME_LORA_UNSUPPORTED = "runtime_lora_unsupported"
    RUNTIME_LORA_IDENTITY_MISMATCH = "runtime_lora_identity_mismatch"
    UNAUTHORIZED = "unauthorized"
    LORA_SOURCE_FORBIDDEN = "lora_source_forbidden"
    MODEL_NOT_FOUND = "model_not_found"
    LORA_NOT_FOUND = "lora_not_found"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    LORA_NAME_CONFLICT = "lora_name_conflict"
    REQUEST_TOO_LARGE = "request_too_large"
    INVALID_LORA_ADAPTER = "invalid_lora_adapter"
    LORA_CAPACITY_EXCEEDED = "lora_capacity_exceeded"
    LORA_PLUGIN_ERROR = "lora_plugin_error"
    LORA_LOAD_FAILED = "lora_load_failed"
    RUNTIME_LORA_IDENTITY_COLLISION = "runtime_lora_identity_collision"
    INTERNAL_ERROR = "internal_error"
    LORA_RESOLVER_UNAVAILABLE = "lora_resolver_unavailable"
    NO_WORKER_AVAILABLE = "no_worker_available"
    WORKER_LOST = "worker_lost"
    BUS_UNAVAILABLE = "bus_unavailable"
    RUNTIME_LORA_RESOLVE_TIMEOUT = "runtime_lora_resolve_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a code, not a password


class ErrorKind(NamedTuple):
    """What follows from a code."""

    status: int
    """HTTP status."""
    type: str
    """OpenAI's `type` of the error envelope."""
    retry_after_s: int | None = None
    """Seconds for `Retry-After` where a retry can help and the failure says nothing itself."""


_BAD = "invalid_request_error"
KINDS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.INVALID_REQUEST: ErrorKind(400, _BAD),
    ErrorCode.INVALID_LORA_MODEL_ID: ErrorKind(400, _BAD),
    ErrorCode.RUNTIME_LORA_BASE_MODEL_REQUIRED: ErrorKind(400, _BAD),
    ErrorCode.UNSUPPORTED_LORA_SCHEME: ErrorKind(400, _BAD),
    ErrorCode.RUNTIME_LORA_UNSUPPORTED: ErrorKind(400, _BAD),
    ErrorCode.RUNTIME_LORA_IDENTITY_MISMATCH: ErrorKind(400, _BAD),
    ErrorCode.UNAUTHORIZED: ErrorKind(401, "authentication_error"),
    ErrorCode.LORA_SOURCE_FORBIDDEN: ErrorKind(403, "permission_error"),
    ErrorCode.MODEL_NOT_FOUND: ErrorKind(404, _BAD),
    ErrorCode.LORA_NOT_FOUND: ErrorKind(404, _BAD),
    ErrorCode.ROUTE_NOT_FOUND: ErrorKind(404, _BAD),
    ErrorCode.METHOD_NOT_ALLOWED: ErrorKind(405, _BAD),
    ErrorCode.LORA_NAME_CONFLICT: ErrorKind(409, _BAD),
    ErrorCode.REQUEST_TOO_LARGE: ErrorKind(413, _BAD),
    ErrorCode.INVALID_LORA_ADAPTER: ErrorKind(422, _BAD),
    ErrorCode.LORA_CAPACITY_EXCEEDED: ErrorKind(429, "rate_limit_error", 1),
    ErrorCode.LORA_PLUGIN_ERROR: ErrorKind(500, "server_error"),
    ErrorCode.LORA_LOAD_FAILED: ErrorKind(500, "server_error"),
    ErrorCode.RUNTIME_LORA_IDENTITY_COLLISION: ErrorKind(500, "server_error"),
    ErrorCode.INTERNAL_ERROR: ErrorKind(500, "server_error"),
    ErrorCode.LORA_RESOLVER_UNAVAILABLE: ErrorKind(503, "server_error", 2),
    ErrorCode.NO_WORKER_AVAILABLE: ErrorKind(503, "server_error", 2),
    ErrorCode.WORKER_LOST: ErrorKind(503, "server_error", 1),
    ErrorCode.BUS_UNAVAILABLE: ErrorKind(503, "server_error", 2),
    ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT: ErrorKind(504, "server_error", 5),
    ErrorCode.FIRST_TOKEN_TIMEOUT: ErrorKind(504, "server_error", 5),
}


class WireError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A failure as it crosses the bus and stands in events: only what a client may see."""

    code: ErrorCode
    message: str
    reasons: tuple[str, ...] = ()
    """Every reason, where there are several (`invalid_lora_adapter`)."""
    param: str | None = None
    """The request field that is wrong, if one is."""
    retry_after_s: int | None = None

    @property
    def status(self) -> int:
        """HTTP status."""
        return KINDS[self.code].status


class LorelayError(Exception):
    """A failure on its way to whoever asked.  `str()` is for logs and holds the detail; `wire` is for the asker."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        detail: str = "",
        reasons: tuple[str, ...] = (),
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}" + (f" ({detail})" if detail else ""))
        if retry_after_s is None:
            retry_after_s = KINDS[code].retry_after_s
        self.wire = WireError(code=code, message=message, reasons=reasons, param=param, retry_after_s=retry_after_s)

    @classmethod
    def from_wire(cls, error: WireError) -> LorelayError:
        """Return the exception for a failure that another process reported."""
        return cls(
            error.code,
            error.message,
            reasons=error.reasons,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )

    @property
    def code(self) -> ErrorCode:
        """The failure's code."""
        return self.wire.code


def envelope(error: WireError) -> bytes:
    """Return OpenAI's JSON body for `error`; `reasons` is added where there are any."""
    inner: dict[str, object] = {
        "message": error.message,
        "type": KINDS[error.code].type,
        "param": error.param,
        "code": error.code.value,
    }
    if error.reasons:
        inner["reasons"] = error.reasons
    return msgspec.json.encode({"error": inner})
