"""The two clients: the same API, with and without `await`."""

from __future__ import annotations

from types import TracebackType

import httpx

from loramux.client.adapters import Adapters
from loramux.client.exchange import Patience
from loramux.client.running import AsyncRunner, SyncRunner, connection
from loramux.client.uploads import Uploads
from loramux.client.usage import Usage
from loramux.client.webhooks import Webhooks


class Client(SyncRunner):
    """A connection to one server, for one key.

    with Client("http://127.0.0.1:8000", api_key="sk-lm-...") as client:
        client.uploads.push("./my-adapter", "support")
        client.adapters.promote("support", 2)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        patience: Patience = Patience(),  # noqa: B008  frozen
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """What is not given is read from LORAMUX_URL and LORAMUX_API_KEY."""
        super().__init__(httpx.Client(**connection(url, api_key), transport=transport), patience)
        self.adapters: Adapters[SyncRunner] = Adapters(self)
        self.uploads: Uploads[SyncRunner] = Uploads(self)
        self.webhooks: Webhooks[SyncRunner] = Webhooks(self)
        self.usage: Usage[SyncRunner] = Usage(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(AsyncRunner):
    """The same, awaited.

    async with AsyncClient() as client:
        await client.uploads.push("./my-adapter", "support")
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        patience: Patience = Patience(),  # noqa: B008  frozen
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """What is not given is read from LORAMUX_URL and LORAMUX_API_KEY."""
        super().__init__(httpx.AsyncClient(**connection(url, api_key), transport=transport), patience)
        self.adapters: Adapters[AsyncRunner] = Adapters(self)
        self.uploads: Uploads[AsyncRunner] = Uploads(self)
        self.webhooks: Webhooks[AsyncRunner] = Webhooks(self)
        self.usage: Usage[AsyncRunner] = Usage(self)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
