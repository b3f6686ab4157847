"""The two clients: the same API, synchronous and asynchronous."""

from __future__ import annotations

from types import TracebackType

import httpx

from loramux_client.adapters import Adapters
from loramux_client.bases import Bases
from loramux_client.batches import Batches
from loramux_client.engines import Engines
from loramux_client.evaluations import Evaluations
from loramux_client.files import Files
from loramux_client.flow import AsyncRunner, RetryPolicy, SyncRunner, connection_options
from loramux_client.migrations import Migrations
from loramux_client.uploads import Uploads
from loramux_client.usage import Usage
from loramux_client.webhooks import Webhooks


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
