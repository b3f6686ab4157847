"""Open what `[records]` of the settings names: the database, and the store of adapters' files.

A server or a trainer that starts while the database does not answer waits for it (`StartWait`). Commands of the command
line do not wait: their caller reads the error at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from loramux.common.settings.file import Settings, SettingsError
from loramux.common.settings.server import RecordsSettings
from loramux.data.records import schema
from loramux.data.records.database import Database, address_of, parse_url
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.storage.blobs import BlobStore, open_blobs
from loramux.data.storage.errors import StorageUnavailable
from loramux.data.storage.objects import Objects, open_objects

RETRY_SECONDS = 1.0
PROGRESS_SECONDS = 10.0
"""Seconds between two lines of the log that say what a start waits for."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class StartWait:
    """Repeats each step of a start for as long as the database does not answer, up to `records.start_seconds`.

    A step is repeated as a whole. So a step that fails must leave nothing that prevents its repetition.
    """

    def __init__(self, records: RecordsSettings) -> None:
        self._address = address_of(parse_url(records.url))
        self._limit = records.start_seconds

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `step`. Raises RecordsUnavailable, with the database's address, after the limit."""
        now = asyncio.get_running_loop().time
        ends, told = math.inf, -math.inf
        while True:
            try:
                return await step()
            except RecordsUnavailable as error:
                ends = min(ends, now() + self._limit)
                if now() >= ends:
                    raise RecordsUnavailable(
                        f"the database {self._address} did not answer for {self._limit:g} s (records.start_seconds); "
                        f"the last error: {error}"
                    ) from error
                if now() - told >= PROGRESS_SECONDS:
                    told = now()
                    logger.warning(
                        "the start waits up to %.0f s more for the database %s: %s", ends - told, self._address, error
                    )
            await asyncio.sleep(min(RETRY_SECONDS, ends - now()))


def migrate(settings: Settings) -> str:
    """Migrate the database to the schema of this release, and return its revision."""
    return schema.migrate(settings.records.url)


@asynccontextmanager
async def open_database(settings: Settings, wait: StartWait | None = None) -> AsyncIterator[Database]:
    """Open the database at the schema of this release. An embedded database is migrated; another must have that schema
    already. A server of databases that does not answer is waited for with `wait`.
    """
    url = settings.records.url
    if url.startswith("sqlite:"):  # a file that cannot be opened now cannot be opened in a minute
        await asyncio.to_thread(schema.migrate, url)
    elif wait is None:
        await asyncio.to_thread(schema.check, url)
    else:
        await wait(partial(asyncio.to_thread, schema.check, url))
    database = Database(url)
    try:
        yield database
    finally:
        await database.close()


def open_object_store(settings: RecordsSettings) -> Objects:
    """Open the object storage alone, without the cache on this machine. Raises SettingsError."""
    with _storage_refusals(settings):
        return open_objects(settings.blobs, settings.blob_options)


def open_store(settings: RecordsSettings) -> BlobStore:
    """Open the store of adapters' files, with its cache on this machine. Raises SettingsError."""
    with _storage_refusals(settings):
        return open_blobs(settings.blobs, settings.cache, settings.blob_options)


@contextmanager
def _storage_refusals(settings: RecordsSettings) -> Iterator[None]:
    """Add the names of the settings to errors of the storage. Raises SettingsError."""
    try:
        yield
    except StorageUnavailable as error:
        raise SettingsError(f"records.blobs: {error}") from None
    except OSError as error:
        raise SettingsError(
            f"records.blobs ({settings.blobs}) and records.cache ({settings.cache}) must be folders that this server "
            f"may write to: {error}"
        ) from None
