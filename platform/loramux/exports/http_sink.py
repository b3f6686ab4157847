"""What all sinks share: an HTTP client, and what its failures mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from loramux.exports.delivery import NotDelivered, Refusal, Unknown
from loramux.exports.events import MeterEvent

FOREVER = 1 << 62
SENT_AND_LOST = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.WriteError, httpx.WriteTimeout)
"""The request may have arrived."""


class HttpSink:
    """Posts to one address; knows which tenant is which of the sink's customers."""

    window = FOREVER
    max_entries = 100

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, customers: Mapping[str, str]) -> None:
        self.name = name
        self._client = client
        self._url = url.rstrip("/")
        self._customers = customers

    async def _post(self, path: str, **body: Any) -> httpx.Response:
        """Raises NotDelivered or Unknown unless the sink has answered for good."""
        try:
            response = await self._client.post(self._url + path, **body)
        except SENT_AND_LOST as error:
            raise Unknown(f"no answer ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise NotDelivered(f"cannot be reached ({type(error).__name__})") from error
        if response.status_code in (401, 403, 404, 408, 429):
            raise NotDelivered(f"answered {response.status_code}")
        if response.status_code >= 500:
            raise Unknown(f"answered {response.status_code}")
        return response

    def _known(self, events: Sequence[MeterEvent]) -> tuple[list[MeterEvent], list[Refusal]]:
        """The events of tenants that the sink has a name for, and the others."""
        known = [event for event in events if event.tenant_name in self._customers]
        told = "the sink's settings name no customer for this tenant"
        return known, [Refusal(event, told) for event in events if event.tenant_name not in self._customers]
