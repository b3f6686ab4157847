"""The two clients, synchronous and asynchronous, with the same API; and the flows of /v1/webhooks and of the usage."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx

from loramux_client.adapters import Adapters
from loramux_client.batches import Batches, Evaluations, Files
from loramux_client.fine_tuning import FineTuning
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
    item_path,
    method,
    read,
    read_list,
)
from loramux_client.objects import Deleted, Delivery, Listing, UsageBucket, UsagePage, Webhook, WebhookTest
from loramux_client.uploads import Uploads


def create_webhook(url: str, events: Sequence[str] | None = None) -> Call[Webhook]:
    """Create a webhook for events of your adapters. Only this answer has its `secret`."""
    return Call(method="POST", path="/v1/webhooks", answer=Webhook, body={"url": url, "events": events})


def list_webhooks() -> Flow[list[Webhook]]:
    """Return your webhooks, oldest first."""
    return read_list("/v1/webhooks", Listing[Webhook])


def enable_webhook(webhook_id: str, enabled: bool = True) -> Call[Webhook]:
    """Resume or stop the deliveries of a webhook."""
    return Call(
        method="PATCH", path=_webhook_path(webhook_id), answer=Webhook, body={"enabled": enabled}, repeatable=True
    )


def delete_webhook(webhook_id: str) -> Call[Deleted]:
    """Delete a webhook."""
    return Call(method="DELETE", path=_webhook_path(webhook_id), answer=Deleted)


def test_webhook(webhook_id: str) -> Call[WebhookTest]:
    """Send a signed `webhook.test` event now."""
    return Call(method="POST", path=f"{_webhook_path(webhook_id)}/test", answer=WebhookTest, repeatable=True)


def list_deliveries(webhook_id: str, *, limit: int = 100) -> Flow[list[Delivery]]:
    """Return the latest deliveries of a webhook, newest first."""
    return read_list(f"{_webhook_path(webhook_id)}/deliveries", Listing[Delivery], limit=limit)


class Webhooks(Resource[R]):
    """Calls of webhooks: `client.webhooks`."""

    create = method(create_webhook)
    list = method(list_webhooks)
    enable = method(enable_webhook)
    delete = method(delete_webhook)
    test = method(test_webhook)
    deliveries = method(list_deliveries)


def _webhook_path(webhook_id: str) -> str:
    return item_path("/v1/webhooks", webhook_id)


def completions(
    start_time: int,
    end_time: int | None = None,
    *,
    bucket_width: str = "1d",
    group_by: Sequence[str] = (),
    models: Sequence[str] = (),
) -> Flow[list[UsageBucket]]:
    """Return tokens and requests in time buckets, from all pages. Times are Unix seconds.

    `bucket_width` is 1m, 1h or 1d. `group_by` is a list from model, api_key_id, project_id.
    """
    query: dict[str, Any] = {"start_time": start_time, "end_time": end_time, "bucket_width": bucket_width}
    query |= {"group_by": list(group_by) or None, "models": list(models) or None}
    buckets: list[UsageBucket] = []
    page: str | None = None
    while True:
        answer = yield from read("/v1/organization/usage/completions", UsagePage, **query, page=page)
        buckets += answer.data
        page = answer.next_page
        if page is None:
            return buckets


class Usage(Resource[R]):
    """Calls of usage: `client.usage`."""

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
        """Connect to `url` with `api_key`. The defaults are LORAMUX_URL and LORAMUX_API_KEY."""
        super().__init__(httpx.Client(**connection_options(url, api_key), transport=transport), retry)
        self.adapters: Adapters[SyncRunner] = Adapters(self)
        self.uploads: Uploads[SyncRunner] = Uploads(self)
        self.files: Files[SyncRunner] = Files(self)
        self.batches: Batches[SyncRunner] = Batches(self)
        self.evaluations: Evaluations[SyncRunner] = Evaluations(self)
        self.fine_tuning: FineTuning[SyncRunner] = FineTuning(self)
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
    """The same client with awaitable calls.

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
        """Connect to `url` with `api_key`. The defaults are LORAMUX_URL and LORAMUX_API_KEY."""
        super().__init__(httpx.AsyncClient(**connection_options(url, api_key), transport=transport), retry)
        self.adapters: Adapters[AsyncRunner] = Adapters(self)
        self.uploads: Uploads[AsyncRunner] = Uploads(self)
        self.files: Files[AsyncRunner] = Files(self)
        self.batches: Batches[AsyncRunner] = Batches(self)
        self.evaluations: Evaluations[AsyncRunner] = Evaluations(self)
        self.fine_tuning: FineTuning[AsyncRunner] = FineTuning(self)
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
