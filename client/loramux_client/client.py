"""The two clients: the same API, synchronous and asynchronous; and the flow of /v1/organization/usage."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx

from loramux_client.adapters import Adapters
from loramux_client.batches import Batches, Evaluations, Files
from loramux_client.fleet import Bases, Engines, Migrations
from loramux_client.flow import (
    AsyncRunner,
    Call,
    Flow,
    R,
    Resource,
    RetryPolicy,
    SyncRunner,
    connection_options,
    method,
)
from loramux_client.objects import UsageBucket, UsagePage
from loramux_client.uploads import Uploads
from loramux_client.webhooks import Webhooks


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


class Client(SyncRunner):
    """A connection to one server with one API key.

    with Client("http://127.0.0.1:8000", api_key="sk-lm-...") as client:
        client.uploads.push("./my-adapter", "support")
        client.adapters.promote("support", 2)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to `url` with `api_key`; the defaults are LORAMUX_URL and LORAMUX_API_KEY."""
        super().__init__(httpx.Client(**connection_options(url, api_key), transport=transport), retry)
        self.adapters: Adapters[SyncRunner] = Adapters(self)
        self.uploads: Uploads[SyncRunner] = Uploads(self)
        self.files: Files[SyncRunner] = Files(self)
        self.batches: Batches[SyncRunner] = Batches(self)
        self.evaluations: Evaluations[SyncRunner] = Evaluations(self)
        self.webhooks: Webhooks[SyncRunner] = Webhooks(self)
        self.usage: Usage[SyncRunner] = Usage(self)
        self.engines: Engines[SyncRunner] = Engines(self)
        self.bases: Bases[SyncRunner] = Bases(self)
        self.migrations: Migrations[SyncRunner] = Migrations(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(AsyncRunner):
    """The same client, awaited.

    async with AsyncClient() as client:
        await client.uploads.push("./my-adapter", "support")
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect to `url` with `api_key`; the defaults are LORAMUX_URL and LORAMUX_API_KEY."""
        super().__init__(httpx.AsyncClient(**connection_options(url, api_key), transport=transport), retry)
        self.adapters: Adapters[AsyncRunner] = Adapters(self)
        self.uploads: Uploads[AsyncRunner] = Uploads(self)
        self.files: Files[AsyncRunner] = Files(self)
        self.batches: Batches[AsyncRunner] = Batches(self)
        self.evaluations: Evaluations[AsyncRunner] = Evaluations(self)
        self.webhooks: Webhooks[AsyncRunner] = Webhooks(self)
        self.usage: Usage[AsyncRunner] = Usage(self)
        self.engines: Engines[AsyncRunner] = Engines(self)
        self.bases: Bases[AsyncRunner] = Bases(self)
        self.migrations: Migrations[AsyncRunner] = Migrations(self)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
