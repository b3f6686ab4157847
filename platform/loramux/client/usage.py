"""/v1/organization/usage, as a flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loramux.client.answers import UsageBucket, UsagePage
from loramux.client.flow import Call, Flow
from loramux.client.running import R, Resource, method


def completions(
    start_time: int,
    end_time: int | None = None,
    *,
    bucket_width: str = "1d",
    group_by: Sequence[str] = (),
    models: Sequence[str] = (),
) -> Flow[list[UsageBucket]]:
    """Tokens and requests in buckets of time, all pages of them. Times in Unix seconds.

    `bucket_width` is 1m, 1h or 1d; `group_by` has some of model, api_key_id, project_id.
    """
    asked: dict[str, Any] = {"start_time": start_time, "end_time": end_time, "bucket_width": bucket_width}
    asked |= {"group_by": list(group_by) or None, "models": list(models) or None}
    buckets: list[UsageBucket] = []
    page: str | None = None
    while True:
        params = asked | {"page": page}
        path = "/v1/organization/usage/completions"
        answer = yield from Call(method="GET", path=path, answer=UsagePage, params=params, repeatable=True)
        buckets += answer.data
        page = answer.next_page
        if page is None:
            return buckets


class Usage(Resource[R]):
    """`client.usage`."""

    completions = method(completions)
