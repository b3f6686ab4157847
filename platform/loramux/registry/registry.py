"""The registry: uploads become revisions, model names become revisions, and what is deleted goes when it is free."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.records import Database, Principal
from loramux.registry.changing import Changing
from loramux.registry.contents import Contents
from loramux.registry.entities import AdapterInfo, ResolvedModel
from loramux.registry.intake import Arrival, Intake
from loramux.registry.pinning import Pinning
from loramux.registry.reading import Reading
from loramux.registry.releasing import Releasing
from loramux.registry.resolving import Resolving
from loramux.registry.retiring import Retiring
from loramux.registry.sharing import Sharing
from loramux.registry.threads import finished
from loramux.settings import AdapterLimits
from loramux.storage import BlobStore
from loramux.validation import Validator

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription


class Registry:
    """One base model's adapters, of every tenant: a room for each thing that is done with them."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        base: BaseDescription,
        served_model_name: str,
        limits: AdapterLimits,
        validator: Validator,
    ) -> None:
        changing = Changing(database)
        self.reading = Reading(database)
        self.releasing = Releasing(changing, limits.max_aliases)
        self.retiring = Retiring(database, changing, limits)
        self.sharing = Sharing(changing, limits.max_grants)
        self.pinning = Pinning(database, changing, limits)
        self.contents = Contents(database, blobs)
        self.intake = Intake(database, blobs, self.contents, base, served_model_name, limits, validator)
        """For files that come in other ways than `upload`."""
        self._blobs = blobs
        self._resolving = Resolving(database, blobs, base, served_model_name)

    def staging(self) -> AbstractContextManager[Path]:
        """A folder to receive an upload in, which `upload` then takes files from without copying; gone afterwards."""
        return self._blobs.staging()

    async def upload(self, principal: Principal, name: str, config_file: Path, weights_file: Path) -> AdapterInfo:
        """Make both files the next revision of `name` and its default; the same content again changes nothing.

        Files inside `staging()` are moved, others copied. Raises what `Intake.demand_place` and `Intake.accept` raise.
        """
        adapter = await self.intake.demand_place(principal, name)
        with self._blobs.staging() as folder:
            await finished(self._blobs.stage, folder, (config_file, weights_file))
            await self.intake.accept(principal, Arrival(adapter, folder))
        return await self.reading.get(principal, adapter)

    async def resolve(self, principal: Principal, model: str, caller: str = "") -> ResolvedModel:
        """What `model` means now: see `Resolving.resolve`."""
        return await self._resolving.resolve(principal, model, caller)

    def take_used(self) -> frozenset[str]:
        """The contents that names were resolved to since the last time."""
        return self._resolving.take_used()
