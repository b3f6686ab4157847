"""Flows of /v1/organization/usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loramux_client.flow import Call, Flow, R, Resource, method
from loramux_client.objects import UsageBucket, UsagePage


def completions(
    start_time: int,
    end_time: int | None = None,
    *,
    bucket_width: str = "1d",
    group_by: Sequence[str] = (),
    models: Sequence[str] = (),
) -> Flow[list[UsageBucket]]:
    """Return tokens and requests in buckets of time, from all pages. Times are Unix seconds.

    `bucket_width` is 1m, 1h or 1d; `group_by` has some of model, api_key_id, project_id.
    """
    query: dict[str, Any] = {"start_time": start_time, "end_time": end_time, "bucket_width": bucket_width}
    query |= {"group_by": list(group_by) or None, "models": list(models) or None}
    buckets: list[UsageBucket] = []
    page: str | None = None
    while True:
        params = query | {"page": page}
        path = "/v1/organization/usage/completions"
        answer = yield from Call(method="GET", path=path, answer=UsagePage, params=params, repeatable=True)
        buckets += answer.data
        page = answer.next_page
        if page is None:
            return buckets


class Usage(Resource[R]):
    """`client.usage`."""

    completions = method(completions)
