"""Files, and batches of requests that run when there is room: OpenAI's /v1/files and /v1/batches below HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loramux.batches.errors import FileTooLarge
from loramux.batches.files import Files
from loramux.batches.lines import AnswerWriter, Endpoints, ParsedBody, Pauses
from loramux.batches.run import BatchServer, Window
from loramux.batches.service import Batches, BatchWorker
from loramux.common.jobs import JobRunner
from loramux.data.records.batches import Batch, LineError, StoredFile
from loramux.server.platform import Platform, run_periodically

TEND_SECONDS = 10.0
SWEEP_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class BatchServices:
    """Files and batches of an open platform."""

    files: Files
    batches: Batches
    jobs: JobRunner[Batch]


@asynccontextmanager
async def open_batches(platform: Platform, endpoints: Endpoints) -> AsyncIterator[BatchServices]:
    """Run batches while the block runs; afterwards they are another server's."""
    settings = platform.settings.batches
    files = Files(platform.database, platform.blobs, settings, platform.settings.privacy.file_seconds)
    server = BatchServer(
        server_id=platform.usage.server_id,
        database=platform.database,
        blobs=platform.blobs,
        files=files,
        tenants=platform.tenants,
        completions=platform.completions,
        endpoints=endpoints,
        settings=settings,
        window=Window(settings, platform.completions.others_waiting, platform.completions.quiet_seconds),
    )
    worker = BatchWorker(server, platform.usage)
    try:
        async with run_periodically(TEND_SECONDS, worker.tend), run_periodically(SWEEP_SECONDS, worker.sweep):
            yield BatchServices(files, Batches(platform.database, worker, endpoints, settings), worker.jobs)
    finally:
        await worker.jobs.stop()
        files.threads.close()


__all__ = [
    "AnswerWriter",
    "Batch",
    "BatchServices",
    "Batches",
    "Endpoints",
    "FileTooLarge",
    "Files",
    "LineError",
    "ParsedBody",
    "Pauses",
    "StoredFile",
    "open_batches",
]
