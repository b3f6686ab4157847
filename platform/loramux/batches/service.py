"""Batches: created, looked at, cancelled. What happens in between is the worker's (`worker`, `run`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from loramux.batches.endpoints import Endpoints
from loramux.batches.errors import BatchNotFound, FileNotFound, InvalidBatch, TooManyBatches
from loramux.batches.files import owner_of, viewpoint
from loramux.batches.worker import BatchWorker
from loramux.gateway import canonical_tags, ensure_storage_allowed, service_class_of
from loramux.records import Database, Principal
from loramux.records.batches import CANCELLING, IN_PROGRESS, VALIDATING, Batch, BatchRepository
from loramux.records.files import FileRepository
from loramux.records.identity import new_id
from loramux.settings import BatchSettings
from loramux.units import SECOND

MAX_HOURS = 168
_window = re.compile(r"([1-9]\d{0,2})h")


class Batches:
    """Batches of every tenant; each caller sees those of its project."""

    def __init__(self, database: Database, worker: BatchWorker, endpoints: Endpoints, settings: BatchSettings) -> None:
        self.worker = worker
        self._database = database
        self._endpoints = endpoints
        self._settings = settings

    async def create(
        self,
        principal: Principal,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        """Create a batch; its lines are checked at once, in the background.

        Raises InvalidBatch, FileNotFound, TooManyBatches, NotAllowed, InvalidRequest.
        """
        ensure_storage_allowed(principal, "input_file_id")
        service_class_of(principal, "batch")
        if endpoint not in self._endpoints.parsers:
            raise InvalidBatch(f"'endpoint' is one of {', '.join(self._endpoints.parsers)}.", "endpoint")
        window = _window.fullmatch(completion_window)
        if window is None or int(window[1]) > MAX_HOURS:
            raise InvalidBatch(f"'completion_window' is 24h, or 1h to {MAX_HOURS}h.", "completion_window")
        now = self._database.now()
        batch = Batch(
            id=new_id("batch"),
            tenant_id=principal.tenant,
            project_id=principal.project,
            owner=owner_of(principal),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            tags=canonical_tags(metadata),
            state=VALIDATING,
            server_id=self.worker.server_id,
            attempts=1,
            created_at=now,
            expires_at=now + int(window[1]) * 3600 * SECOND,
        )
        async with self._database.begin() as session:
            batches = BatchRepository(session, principal.tenant)
            unfinished = await batches.count_unfinished()
            if unfinished >= self._settings.unfinished_per_tenant:
                raise TooManyBatches(
                    f"You have {unfinished} unfinished batches, the most that is allowed; wait for one to end.",
                    "input_file_id",
                )
            file = await FileRepository(session, principal.tenant).get(input_file_id, viewpoint(principal))
            if file is None or file.purpose != "batch":
                raise FileNotFound(input_file_id, "input_file_id")
            await batches.add(batch)
        self.worker.look()
        return batch

    async def get(self, principal: Principal, id: str) -> Batch:
        """Return a batch. Raises BatchNotFound."""
        async with self._database.read() as session:
            batch = await BatchRepository(session, principal.tenant).get(id, viewpoint(principal))
        if batch is None:
            raise BatchNotFound(id)
        return batch

    async def before(self, principal: Principal, id: str | None, limit: int) -> list[Batch]:
        """List at most `limit` batches older than that one, newest first."""
        async with self._database.read() as session:
            return await BatchRepository(session, principal.tenant).before(viewpoint(principal), id, limit)

    async def cancel(self, principal: Principal, id: str) -> Batch:
        """Begin no further line; running ones finish. A batch that has ended stays as it is. Raises BatchNotFound."""
        async with self._database.begin() as session:
            batches = BatchRepository(session, principal.tenant)
            batch = await batches.get(id, viewpoint(principal), lock=True)
            if batch is None:
                raise BatchNotFound(id)
            if batch.state in (VALIDATING, IN_PROGRESS):
                at = self._database.now()
                await batches.change(id, state=CANCELLING, cancelling_at=at)
                batch = msgspec.structs.replace(batch, state=CANCELLING, cancelling_at=at)
        return batch
