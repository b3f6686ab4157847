"""Adapters' files on an engine's machine: where the front has them, if both see that folder, else fetched here.

A front names the folder of its own cache. Its last three parts are the place of a content in any cache and in the
store, so an engine on another machine finds it in its own cache or fetches it, verified, from the same store.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from loramux.engine.messages import EngineFault
from loramux.engine.request import AdapterRef
from loramux.fleet.sessions import Then
from loramux.storage import BlobStore, StorageError, digest_at

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 4
IDLE_SECONDS = 600.0
"""Contents that were requested since then are not evicted: a request may be about to read them."""


class FetchedAdapters:
    """Finds adapters in the cache of `blobs`, which this machine's engines share, and fetches what is not there."""

    def __init__(self, blobs: BlobStore, cache_bytes: int) -> None:
        """Beyond `cache_bytes` the longest unused contents leave the cache."""
        self._blobs = blobs
        self._cache_bytes = cache_bytes
        self._threads = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="adapters")

    def find(self, ref: AdapterRef) -> AdapterRef | None:
        """Return the adapter with its folder on this machine; None where it has to be fetched first."""
        digest = _content_of(ref)
        known = self._blobs.known_directory(digest) if digest is not None else None
        if known is not None:
            return msgspec.structs.replace(ref, path=str(known))
        return ref if Path(ref.path).is_dir() else None

    def fetch(self, ref: AdapterRef, then: Then) -> None:
        """Fetch the adapter on another thread, and call `then` there."""
        self._threads.submit(lambda: then(self._fetched(ref)))

    def _fetched(self, ref: AdapterRef) -> AdapterRef | EngineFault:
        digest = _content_of(ref)
        if digest is None:
            return EngineFault("adapter_failed", f"The engine's machine has no folder {ref.path}.")
        try:
            folder = self._blobs.directory(digest)
            self._trim()
        except (StorageError, OSError) as error:
            logger.warning("an adapter cannot be fetched: %s", error)
            return EngineFault(
                "adapter_failed", "The adapter's files could not be fetched to the engine.", retry_after=1
            )
        return msgspec.structs.replace(ref, path=str(folder))

    def _trim(self) -> None:
        cached = self._blobs.cached()
        over = sum(content.size for content in cached) - self._cache_bytes
        for content in cached:
            if over <= 0 or content.idle < IDLE_SECONDS:
                return
            self._blobs.evict(content.digest)
            over -= content.size


def _content_of(ref: AdapterRef) -> str | None:
    return digest_at("/".join(Path(ref.path).parts[-3:]))
