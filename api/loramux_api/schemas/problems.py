"""The one shape of every error."""

from __future__ import annotations

import msgspec


class ErrorObject(msgspec.Struct, kw_only=True):
    """All four keys, always."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """What clients raise from."""

    error: ErrorObject
