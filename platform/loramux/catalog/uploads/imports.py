"""Imports of adapters. The server fetches their files from places that the settings list.

A source is checked when the upload is opened and again when it is fetched, because the settings may have changed in
between. Fetches have limits in bytes and in time. A hub may redirect only to hosts that the settings name. Every called
address must be public or in a network of the settings (`loramux.common.public_http`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import msgspec

from loramux.catalog.uploads.errors import InvalidUpload, UploadRejected, UploadTooSlow, rejected
from loramux.catalog.uploads.parts import UploadFileTooLarge, paced, read_off_loop, write_file
from loramux.common.bundle import SOURCES, explain_absence
from loramux.common.identity import Principal
from loramux.common.jobs import ThreadPool, Threads
from loramux.common.public_http import (
    MAX_BYTES,
    NotPublic,
    PublicTransport,
    Resolver,
    outside_client,
    parse_outside_url,
)
from loramux.common.settings.serving import BucketSettings, HubSettings, UploadSettings
from loramux.data.storage.blobs import FILES
from loramux.data.storage.errors import StorageUnavailable
from loramux.data.storage.objects import Objects, open_objects

SILENCE_SECONDS = 30.0
"""The time in seconds for which a hub may send nothing."""
LONGEST_SECONDS = 3600.0
MIN_BYTES_PER_SECOND = 16 << 10
"""Minimum rate of a transfer from a hub or an object store, in bytes per second."""
WINDOW_SECONDS = 30.0
"""The time of waiting over which the least rate is measured."""
THREADS, THREADS_PER_TENANT = 16, 4
MAX_REDIRECTS = 3
COMMIT_HEADER = "x-repo-commit"
"""The header in which hubs name the commit that they have resolved."""
CHUNK_BYTES = 8 << 20
NAMES = (*FILES, *SOURCES)
MAX_LISTED = 1000
"""The largest number of files that are listed of a place without an adapter."""
MAX_LISTING_BYTES = 4 << 20

_path = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)*")
_repo = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,95})?")
_commit = re.compile("[0-9a-f]{40}")


class BucketSource(msgspec.Struct, frozen=True, kw_only=True, tag="bucket"):
    """A folder in an object store."""

    url: str
    """The folder's URL: s3://bucket/path/"""


class HubSource(msgspec.Struct, frozen=True, kw_only=True, tag="hub"):
    """A repository of a model hub, at one commit."""

    hub: str
    repo: str
    commit: str
    subfolder: str = ""
    """The folder in the repository, with a slash at its end; empty: its root."""


class FolderSource(msgspec.Struct, frozen=True, kw_only=True, tag="folder"):
    """A folder of the server's own machine, below `adapters.local_root`. Only operators can use such a source."""

    path: str


Source = BucketSource | HubSource | FolderSource


class Importer:
    """Fetches the files of an adapter, and the files of its bundle if they exist."""

    def __init__(self, settings: UploadSettings, max_bytes: Mapping[str, int], local_root: str | None = None) -> None:
        """`max_bytes` is by file name. Folders are read only below `local_root`."""
        self._settings = settings
        self._max_bytes = max_bytes
        self._resolver = Resolver("imports")
        self._threads = ThreadPool("imports", THREADS, THREADS_PER_TENANT)
        self._local_root = Path(local_root).resolve() if local_root else None

    async def fetch(self, source: Source, tenant_name: str, folder: Path) -> None:
        """Write the files into `folder`, on the tenant's threads.

        Raises UploadRejected, whose message is for the tenant.
        """
        threads = self._threads.of(tenant_name)
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                match source:
                    case BucketSource():
                        await self._from_bucket(source, threads, tenant_name, folder)
                    case HubSource():
                        await self._from_hub(source, threads, tenant_name, folder)
                    case FolderSource():
                        await self._from_folder(source, threads, folder)
        except TimeoutError:
            raise _unavailable("it took too long") from None

    async def _from_bucket(self, source: BucketSource, threads: Threads, tenant_name: str, folder: Path) -> None:
        bucket = bucket_of(source, tenant_name, self._settings)
        if bucket is None:
            raise _not_listed()
        for name in NAMES:
            try:
                objects = open_objects(source.url.removesuffix("/"), bucket.options)
                await self._write(threads, folder, name, read_off_loop(threads, objects.read(name)))
            except FileNotFoundError:
                if name in FILES:
                    found = await threads.run(_objects_there, objects)
                    raise _absent(name, found, "send its URL as `source.url`") from None
                (folder / name).unlink(missing_ok=True)
            except StorageUnavailable:
                raise _unavailable("the object store does not answer, or refuses") from None

    async def _from_hub(self, source: HubSource, threads: Threads, tenant_name: str, folder: Path) -> None:
        hub = hub_of(source, self._settings)
        if hub is None:
            raise _not_listed()
        networks = [ipaddress.ip_network(network) for network in hub.networks]
        transport = PublicTransport(self._resolver, networks, tenant_name)
        async with outside_client(SILENCE_SECONDS, transport) as client:
            for name in NAMES:
                try:
                    async with _hub_response(client, hub, source, await _token(threads, hub), name) as response:
                        await self._write(threads, folder, name, response.aiter_raw())
                except FileNotFoundError:
                    if name in FILES:
                        found = await _files_of_hub(client, hub, source, await _token(threads, hub))
                        raise _absent(name, found, "send it as `source.subfolder`") from None
                    (folder / name).unlink(missing_ok=True)
                except NotPublic as why:
                    raise rejected("source_not_allowed", "source", f"The hub is not called: {why}.") from None
                except (httpx.HTTPError, httpx.InvalidURL):  # a redirect may lead to an invalid URL
                    raise _unavailable("the hub does not answer") from None

    async def _from_folder(self, source: FolderSource, threads: Threads, folder: Path) -> None:
        for name in NAMES:
            try:
                chunks = _chunks_of(Path(source.path, name), self._local_root)
                await self._write(threads, folder, name, read_off_loop(threads, chunks))
            except FileNotFoundError:
                if name in FILES:
                    raise _absent(name) from None
                (folder / name).unlink(missing_ok=True)

    async def _write(self, threads: Threads, folder: Path, name: str, chunks: AsyncIterator[bytes]) -> None:
        limit = self._max_bytes[name]
        try:
            await write_file(threads, folder / name, paced(chunks, MIN_BYTES_PER_SECOND, WINDOW_SECONDS), limit)
        except UploadTooSlow:
            raise _unavailable("the bytes came too slowly") from None
        except UploadFileTooLarge:
            raise rejected("too_large", name, f"'{name}' has more than the {limit} bytes that are taken.") from None


@asynccontextmanager
async def _hub_response(
    client: httpx.AsyncClient, hub: HubSettings, source: HubSource, token: str | None, name: str
) -> AsyncIterator[httpx.Response]:
    """Request the file. Follow redirects only to hosts that the settings name, and never with the hub's token."""
    url = httpx.URL(f"{hub.url}/{source.repo}/resolve/{source.commit}/{source.subfolder}{name}")
    headers = _authorization(token)
    for _ in range(MAX_REDIRECTS + 1):
        # `write_file` bounds each file by its own limit
        async with client.stream("GET", url, headers=headers, extensions={MAX_BYTES: sys.maxsize}) as response:
            if response.headers.get(COMMIT_HEADER, source.commit) != source.commit:
                raise rejected("commit_mismatch", "source.commit", "The hub answered with another commit.")
            if not response.is_redirect:
                _check_response(response, name)
                yield response
                return
            url = parse_outside_url(str(url.join(response.headers.get("location", ""))))
        if not _is_listed_redirect(url, hub):
            raise rejected(
                "source_not_allowed",
                "source",
                f"The hub redirects to {url.host[:120]}, which the operator has not listed.",
            )
        headers.pop("Authorization", None)
    raise _unavailable("the hub redirects again and again")


def _is_listed_redirect(url: httpx.URL, hub: HubSettings) -> bool:
    """Return whether the settings name the host, and its scheme and port are the hub's or the scheme's own."""
    own = httpx.URL(hub.url)
    return url.scheme == own.scheme and url.host in hub.redirects and url.port in (None, own.port) and not url.userinfo


def _check_response(response: httpx.Response, name: str) -> None:
    if response.status_code == 404:
        raise FileNotFoundError(name)
    if response.status_code != 200:
        raise _unavailable(f"the hub answered '{name}' with the status {response.status_code}")


async def _token(threads: Threads, hub: HubSettings) -> str | None:
    if hub.token_file is None:
        return None
    return (await threads.run(Path(hub.token_file).read_text)).strip()


def _chunks_of(file: Path, root: Path | None) -> Iterator[bytes]:
    """Read a file if its real path is below `root`, because a link may have changed since the upload was opened."""
    real = file.resolve()
    if root is None or not real.is_relative_to(root):
        raise _not_listed()
    with real.open("rb") as opened:
        while data := opened.read(CHUNK_BYTES):
            yield data


def _authorization(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


class _File(msgspec.Struct):
    rfilename: str


class _Repository(msgspec.Struct):
    """A repository, as the Hugging Face hub's API describes it."""

    siblings: list[_File]


async def _files_of_hub(
    client: httpx.AsyncClient, hub: HubSettings, source: HubSource, token: str | None
) -> list[str] | None:
    """Return the names of the files in the source's folder; None if the hub does not list them."""
    url = httpx.URL(f"{hub.url}/api/models/{source.repo}/revision/{source.commit}")
    try:
        listing = await client.get(url, headers=_authorization(token), extensions={MAX_BYTES: MAX_LISTING_BYTES})
        files = msgspec.json.decode(listing.content, type=_Repository).siblings if listing.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, NotPublic, msgspec.DecodeError):
        return None
    if files is None:
        return None
    place = source.subfolder
    there = (file.rfilename[len(place) :] for file in files if file.rfilename.startswith(place))
    return list(islice(there, MAX_LISTED))


def _objects_there(objects: Objects) -> list[str] | None:
    """Return the names of objects in the folder; None if the store does not list them."""
    try:
        return objects.names("", MAX_LISTED)
    except StorageUnavailable:
        return None


def _absent(name: str, found: list[str] | None = None, choose: str = "") -> UploadRejected:
    """Return the refusal of a place without a file that every adapter must have, which has the files `found`."""
    way_out = f" {explain_absence(found, choose)}" if found else ""
    return rejected("source_not_found", "source", f"There is no '{name}' there, or it is not public.{way_out}")


def _unavailable(why: str) -> UploadRejected:
    return rejected("source_unavailable", "source", f"The files could not be fetched: {why}. Try again later.")


def _not_listed() -> UploadRejected:
    """Return the refusal of a source that the settings no longer list."""
    return rejected("source_not_allowed", "source", "Adapters are not fetched from there any more.")


def check_source(source: Source, principal: Principal, settings: UploadSettings) -> Source:
    """Return the source in the form that is fetched. Raises InvalidUpload if the settings do not allow it."""
    if isinstance(source, FolderSource):
        return source  # the importer checks the path when it reads
    if isinstance(source, BucketSource):
        source = BucketSource(url=source.url.removesuffix("/") + "/")
        if bucket_of(source, principal.tenant_name, settings) is None:
            raise InvalidUpload(
                "adapters are not fetched from there; the operator lists the places (uploads.buckets), and a path "
                "is folders of letters, digits, '.', '_', '=' and '-'",
                "source.url",
            )
        return source
    if hub_of(source, settings) is None:
        known = ", ".join(hub.name for hub in settings.hubs) or "none at present"
        raise InvalidUpload(f"no such hub; the operator has listed: {known} (uploads.hubs)", "source.hub")
    if not _repo.fullmatch(source.repo) or ".." in source.repo:
        raise InvalidUpload("a repository is NAME or OWNER/NAME", "source.repo")
    if not _commit.fullmatch(source.commit):
        raise InvalidUpload(
            "a commit is its 40 hexadecimal digits: branches and tags move, and what is served must not",
            "source.commit",
        )
    subfolder = source.subfolder.strip("/") + "/" if source.subfolder.strip("/") else ""
    if not _path.fullmatch(subfolder) or ".." in subfolder:
        raise InvalidUpload(
            "a folder of a repository is folders of letters, digits, '.', '_', '=' and '-'", "source.subfolder"
        )
    return msgspec.structs.replace(source, subfolder=subfolder)


def bucket_of(source: BucketSource, tenant_name: str, settings: UploadSettings) -> BucketSettings | None:
    """Return the listed bucket that contains the folder."""
    for bucket in settings.buckets:
        place = bucket.url.replace("{tenant}", tenant_name)
        path = source.url.removeprefix(place)
        if source.url.startswith(place) and _path.fullmatch(path) and ".." not in path:
            return bucket
    return None


def hub_of(source: HubSource, settings: UploadSettings) -> HubSettings | None:
    """Return the listed hub of that name."""
    return next((hub for hub in settings.hubs if hub.name == source.hub), None)


def encode_source(source: Source) -> str:
    """Encode a source for the records."""
    return msgspec.json.encode(source).decode()


def decode_source(text: str) -> Source:
    """Decode what `encode_source` wrote."""
    return msgspec.json.decode(text, type=Source)
