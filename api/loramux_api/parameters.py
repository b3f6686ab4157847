"""Integers in the query, each with its range: the server refuses others, and the OpenAPI document shows the range."""

from __future__ import annotations

from typing import Annotated

from litestar.params import QueryParameter

from loramux.billing import CostsQuery
from loramux.registry import MAX_REVISION
from loramux.usage import LATEST, UsageQuery
from loramux.usage.buckets import MAX_FILTER

MAX_INT64 = 2**63 - 1
MAX_OFFSET = 2**53 - 1
MAX_PAGE = 500

PageLimit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE, description="The most items to list.")]
"""The length of a page."""

BeforeSequence = Annotated[
    int | None, QueryParameter(ge=0, le=MAX_INT64, description="The last sequence number of the previous page.")
]
"""The entry of the audit log at which the previous page ended."""

AfterPosition = Annotated[
    int | None, QueryParameter(ge=0, le=MAX_OFFSET, description="The position of the previous page's last item.")
]
"""The item of a list at which the previous page ended."""

Offset = Annotated[int, QueryParameter(ge=0, le=MAX_OFFSET, description="The place of the first byte in the file.")]
"""A place in a file."""

RevisionQuery = Annotated[int | None, QueryParameter(ge=1, le=MAX_REVISION, description="A revision's number.")]
"""One revision."""

VersionQuery = Annotated[
    int | None, QueryParameter(ge=1, le=MAX_INT64, description="The number of a change in the alias's history.")
]
"""One change of an alias."""

StartTime = Annotated[int, QueryParameter(ge=0, le=LATEST, description="Unix seconds, inclusive.")]
"""The beginning of a span of time."""

EndTime = Annotated[
    int | None, QueryParameter(ge=1, le=LATEST, description="Unix seconds, exclusive; later than start_time.")
]
"""The end of a span of time."""

UsageLimit = Annotated[
    int | None,
    QueryParameter(ge=1, le=UsageQuery.most_buckets(), description="The most buckets; fewer for wider ones."),
]
"""The length of a page of usage."""

TopModels = Annotated[
    int | None,
    QueryParameter(ge=1, le=MAX_FILTER, description="With group_by=model: name only so many models, the largest."),
]
"""The number of models that are named."""

CostsLimit = Annotated[int | None, QueryParameter(ge=1, le=CostsQuery.most_buckets(), description="The most days.")]
"""The length of a page of costs."""
