"""Parameters that routes share: integers of the query, the adapter in a path, and the preconditions of a change.

The server refuses an integer outside its range, and the OpenAPI document shows the range. A route about one adapter has
two paths: by the adapter's own name, and by `tenant/adapter`.
"""

from __future__ import annotations

from typing import Annotated

from litestar import Response
from litestar.di import NamedDependency, Provide
from litestar.openapi.spec import OpenAPIType
from litestar.params import PathParameter, QueryParameter

from loramux.catalog.registry.changes import Preconditions
from loramux.catalog.registry.entities import MAX_REVISION, AdapterInfo, etag
from loramux.catalog.registry.errors import PartNotFound
from loramux.common.identity import Principal
from loramux.money.billing.costs import CostsQuery
from loramux.money.usage.query import LATEST, MAX_FILTER, UsageQuery
from loramux.serving.errors import InvalidRequest
from loramux_api.auth import platform_of
from loramux_api.bodies import AnyRequest
from loramux_api.headers import IdempotencyKey, IfMatch, claim_of
from loramux_api.openapi import ApiController
from loramux_api.schemas.adapters import Adapter, adapter_object
from loramux_api.schemas.bounds import MAX_NAME

MAX_INT64 = 2**63 - 1
MAX_OFFSET = 2**53 - 1
MAX_PAGE = 500
MAX_QUERY = 4096
MAX_SHORT_PAGE = 100
MAX_UNDO_SECONDS = 365 * 86_400
TWO_DIRECTIONS = "'after_id' and 'before_id' are two directions of a list; send one of them."

PathName = Annotated[str, PathParameter(max_length=MAX_NAME)]
"""A name or an id in a path."""
QueryText = Annotated[str, QueryParameter(max_length=MAX_QUERY)]
OptionalText = Annotated[str | None, QueryParameter(max_length=MAX_QUERY)]
"""A name, an id or a cursor in a query."""

PageLimit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE, description="The most items to list.")]
"""Length of a page."""

ShortPageLimit = Annotated[int, QueryParameter(ge=1, le=MAX_SHORT_PAGE)]
"""Length of a page of batches, evaluations or uploads."""

BeforeSequence = Annotated[
    int | None, QueryParameter(ge=0, le=MAX_INT64, description="The last sequence number of the previous page.")
]
"""Entry of the audit log at which the previous page ended."""

AfterPosition = Annotated[
    int | None, QueryParameter(ge=0, le=MAX_OFFSET, description="The position of the previous page's last item.")
]
"""Item of a list at which the previous page ended."""

Offset = Annotated[int, QueryParameter(ge=0, le=MAX_OFFSET, description="The place of the first byte in the file.")]
"""Position in a file."""

RevisionQuery = Annotated[int | None, QueryParameter(ge=1, le=MAX_REVISION, description="A revision's number.")]
"""Number of one revision."""

VersionQuery = Annotated[
    int | None, QueryParameter(ge=1, le=MAX_INT64, description="The number of a change in the alias's history.")
]
"""Number of one change of an alias."""

StartTime = Annotated[int, QueryParameter(ge=0, le=LATEST, description="Unix seconds, inclusive.")]
"""Beginning of a span of time."""

EndTime = Annotated[
    int | None, QueryParameter(ge=1, le=LATEST, description="Unix seconds, exclusive; later than start_time.")
]
"""End of a span of time."""

UsageLimit = Annotated[
    int | None,
    QueryParameter(ge=1, le=UsageQuery.most_buckets(), description="The most buckets; fewer for wider ones."),
]
"""Length of a page of usage."""

TopModels = Annotated[
    int | None,
    QueryParameter(ge=1, le=MAX_FILTER, description="With group_by=model: name only so many models, the largest."),
]
"""Number of models that are named."""

CostsLimit = Annotated[int | None, QueryParameter(ge=1, le=CostsQuery.most_buckets(), description="The most days.")]
"""Length of a page of costs."""


def at(rest: str = "") -> list[str]:
    """Return the two paths of a route about one adapter: with the adapter's own name, and with `tenant/adapter`."""
    return [f"/{{name:str}}{rest}", f"/{{owner:str}}/{{name:str}}{rest}"]


Owner = Annotated[
    str | None, PathParameter(max_length=MAX_NAME, schema_extra={"type": OpenAPIType.STRING, "one_of": None})
]
"""A tenant in a path. The parameter is absent in the shorter of two paths, and never null in the longer path."""


def adapter_name(name: PathName, owner: Owner = None) -> str:
    """The adapter that a path is about."""
    return name if owner is None else f"{owner}/{name}"


async def preconditions(
    request: AnyRequest,
    principal: NamedDependency[Principal],
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Preconditions:
    """Read the preconditions of a change from the headers. Raises InvalidRequest."""
    claim = await claim_of(request, idempotency_key)
    return Preconditions(if_match, None if claim is None else platform_of(request).usage.guard(principal, claim))


NAMED = {"adapter": Provide(adapter_name, sync_to_thread=False)}
"""Dependencies of controllers whose routes are about one adapter."""
CHANGING = {"preconditions": Provide(preconditions)}
"""Dependencies of routes that make a change."""


class OneAdapterController(ApiController):
    """Routes about one adapter, whose paths `at` makes."""

    path = "/v1/adapters"
    tags = ("Adapters",)
    dependencies = NAMED


def number_of(adapter: str, text: str) -> int:
    """Return a revision's number from a path. Raises PartNotFound."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise PartNotFound("revision", adapter, f"has no revision {text[:20]!r}; revisions are numbered from 1.")
    return int(text)


def check_undo(undo_s: int | None) -> int | None:
    """Return the seconds for which a deletion can be undone, checked. Raises InvalidRequest."""
    if undo_s is not None and not 0 <= undo_s <= MAX_UNDO_SECONDS:
        raise InvalidRequest(f"'undo_s' is 0 to {MAX_UNDO_SECONDS} seconds.", field="undo_s", code="invalid_value")
    return undo_s


def tagged(info: AdapterInfo) -> Response[Adapter]:
    """Return an adapter with its ETag."""
    return Response(adapter_object(info), headers={"ETag": etag(info.version)})
