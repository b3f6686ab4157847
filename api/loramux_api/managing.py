"""What the routes of adapters have in common: how an adapter is named in a path, and what a change may demand."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath

from loramux.gateway import InvalidRequest
from loramux.registry import AdapterInfo, PartNotFound, Terms, etag
from loramux.tenants import Principal
from loramux.usage import ClaimedOnce
from loramux_api.idempotency import claim_of
from loramux_api.schemas.adapters import Adapter, adapter_object
from loramux_api.schemas.headers import IdempotencyKey, IfMatch

MAX_UNDO_SECONDS = 365 * 86_400


def at(rest: str = "") -> list[str]:
    """The paths of a route about one adapter: by its own name, and as `tenant/adapter`."""
    return [f"/{{name:str}}{rest}", f"/{{owner:str}}/{{name:str}}{rest}"]


def adapter_name(name: FromPath[str], owner: FromPath[str | None] = None) -> str:
    """The adapter that a path is about."""
    return name if owner is None else f"{owner}/{name}"


async def terms(
    request: Request[Any, Any, Any],
    principal: NamedDependency[Principal],
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Terms:
    """What the caller demands of the change that it asks for. Raises InvalidRequest."""
    claim = await claim_of(request, idempotency_key)
    return Terms(if_match, None if claim is None else ClaimedOnce(principal, claim))


NAMED = {"adapter": Provide(adapter_name, sync_to_thread=False)}
"""For controllers whose routes are about one adapter."""
CHANGING = {"terms": Provide(terms)}
"""For routes that change something."""


def number_of(adapter: str, text: str) -> int:
    """A revision's number in a path. Raises PartNotFound."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise PartNotFound("revision", adapter, f"has no revision {text[:20]!r}; revisions are numbered from 1.")
    return int(text)


def check_undo(undo_s: int | None) -> int | None:
    """For how long a deletion is to be undoable. Raises InvalidRequest."""
    if undo_s is not None and not 0 <= undo_s <= MAX_UNDO_SECONDS:
        raise InvalidRequest(f"'undo_s' is 0 to {MAX_UNDO_SECONDS} seconds.", param="undo_s", code="invalid_value")
    return undo_s


def tagged(info: AdapterInfo) -> Response[Adapter]:
    """An adapter with its ETag."""
    return Response(adapter_object(info), headers={"ETag": etag(info.version)})
