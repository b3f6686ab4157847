"""Adapters fetched by the server itself, from places that the settings list; bounded, and never sent elsewhere."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from loramux.outward import NotPublic, PublicTransport
from loramux.registry.threads import finished
from loramux.settings import HubSettings, UploadSettings
from loramux.storage import FILES, StorageUnavailable, open_objects
from loramux.uploads.refusals import UploadRejected
from loramux.uploads.sources import BucketSource, HubSource, Source, bucket_of, hub_of, not_listed_any_more
from loramux.uploads.writing import TooLarge, off_loop, write

SILENCE_SECONDS = 30.0
"""How long a hub may say nothing."""
LONGEST_SECONDS = 3600.0
MOST_REDIRECTS = 3
COMMIT_HEADER = "x-repo-commit"
"""In which hubs say what they have resolved."""


class Importer:
    """Fetches the two files of an adapter."""

    def __init__(self, settings: UploadSettings, most_bytes: Mapping[str, int]) -> None:
        """`most_bytes` by file name."""
        self._settings = settings
        self._most = most_bytes

    async def fetch(self, source: Source, tenant_name: str, folder: Path) -> None:
        """Write the files into `folder`. Raises UploadRejected, whose message is for the tenant."""
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                if isinstance(source, BucketSource):
                    await self._from_bucket(source, tenant_name, folder)
                else:
                    await self._from_hub(source, folder)
        except TimeoutError:
            raise _unavailable("it took too long") from None

    async def _from_bucket(self, source: BucketSource, tenant_name: str, folder: Path) -> None:
        bucket = bucket_of(source, tenant_name, self._settings)
        if bucket is None:
            raise not_listed_any_more()
        for name in FILES:
            try:
                objects = open_objects(source.url.removesuffix("/"), bucket.options)
                await self._write(folder, name, off_loop(objects.read(name)))
            except FileNotFoundError:
                raise _absent(name) from None
            except StorageUnavailable:
                raise _unavailable("the object store does not answer, or refuses") from None

    async def _from_hub(self, source: HubSource, folder: Path) -> None:
        hub = hub_of(source, self._settings)
        if hub is None:
            raise not_listed_any_more()
        networks = [ipaddress.ip_network(network) for network in hub.networks]
        transport = PublicTransport(networks)
        async with httpx.AsyncClient(transport=transport, timeout=SILENCE_SECONDS, trust_env=False) as client:
            for name in FILES:
                try:
                    async with _answer(client, hub, source, await _token(hub), name) as response:
                        await self._write(folder, name, response.aiter_raw())
                except NotPublic as why:
                    raise UploadRejected("source_not_allowed", "source", f"The hub is not called: {why}.") from None
                except httpx.HTTPError:
                    raise _unavailable("the hub does not answer") from None

    async def _write(self, folder: Path, name: str, chunks: AsyncIterator[bytes]) -> None:
        most = self._most[name]
        try:
            await write(folder / name, chunks, most)
        except TooLarge:
            raise UploadRejected(
                "too_large", name, f"'{name}' has more than the {most} bytes that are taken."
            ) from None


@asynccontextmanager
async def _answer(
    client: httpx.AsyncClient, hub: HubSettings, source: HubSource, token: str | None, name: str
) -> AsyncIterator[httpx.Response]:
    """The hub's answer with the file's bytes, redirected at most to hosts that the settings name."""
    url = httpx.URL(f"{hub.url}/{source.repo}/resolve/{source.commit}/{name}")
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    for _ in range(MOST_REDIRECTS + 1):
        async with client.stream("GET", url, headers=headers) as response:
            if response.headers.get(COMMIT_HEADER, source.commit) != source.commit:
                raise UploadRejected("commit_mismatch", "source.commit", "The hub answered with another commit.")
            if not response.is_redirect:
                _demand_file(response, name)
                yield response
                return
            url = url.join(response.headers.get("location", ""))
        if url.scheme != httpx.URL(hub.url).scheme or url.host not in hub.redirects:
            raise UploadRejected(
                "source_not_allowed",
                "source",
                f"The hub redirects to {url.host[:120]}, which the operator has not listed.",
            )
        headers.pop("Authorization", None)
    raise _unavailable("the hub redirects again and again")


def _demand_file(response: httpx.Response, name: str) -> None:
    if response.status_code == 404:
        raise _absent(name)
    if response.status_code != 200 or "content-encoding" in response.headers:
        raise _unavailable(f"the hub answered '{name}' with the status {response.status_code}")


async def _token(hub: HubSettings) -> str | None:
    if hub.token_file is None:
        return None
    return (await finished(Path(hub.token_file).read_text)).strip()


def _absent(name: str) -> UploadRejected:
    return UploadRejected("source_not_found", "source", f"There is no '{name}' there, or it is not public.")


def _unavailable(why: str) -> UploadRejected:
    return UploadRejected("source_unavailable", "source", f"The files could not be fetched: {why}. Try again later.")
