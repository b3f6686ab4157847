"""What a model name means at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loramux.records import Database, Principal
from loramux.records.aliases import DEFAULT_ALIAS
from loramux.records.reach import Reached, ReachRepository
from loramux.registry.choosing import chosen
from loramux.registry.entities import ResolvedModel, Revision
from loramux.registry.errors import ModelNotFound, RevisionUnavailable
from loramux.registry.names import ModelName, parse_model
from loramux.registry.threads import finished
from loramux.storage import BlobStore, StorageError

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription


class Resolving:
    """From names to verified files."""

    def __init__(self, database: Database, blobs: BlobStore, base: BaseDescription, served_model_name: str) -> None:
        self._database = database
        self._blobs = blobs
        self._base = base
        self._served_model_name = served_model_name
        self._used: set[str] = set()

    async def resolve(self, principal: Principal, model: str, caller: str = "") -> ResolvedModel:
        """What `model` means to this tenant now; where an alias has several targets, what it means to `caller`.

        Raises ModelNotFound, RevisionUnavailable.
        """
        if model == self._served_model_name and principal.may_use(model):
            return ResolvedModel(name=model, base_model=model, revision=None)
        name = parse_model(model if "/" in model else f"{principal.tenant_name}/{model}")
        if name is None or not principal.may_use(f"{name.tenant}/{name.adapter}"):
            raise ModelNotFound(model)
        reached = await self._reach(principal, name)
        if not reached:
            raise ModelNotFound(model)
        resolved = await self._resolved(name, chosen(reached, caller))
        assert resolved.revision is not None
        self._used.add(resolved.revision.digest)
        return resolved

    def take_used(self) -> frozenset[str]:
        """The contents that names were resolved to since the last time."""
        used, self._used = frozenset(self._used), set()
        return used

    async def _reach(self, principal: Principal, name: ModelName) -> list[Reached]:
        async with self._database.read() as session:
            reach = ReachRepository(session, principal.tenant, principal.tenant_name)
            if name.number is None:
                return await reach.aliased(name.tenant, name.adapter, name.alias or DEFAULT_ALIAS)
            one = await reach.numbered(name.tenant, name.adapter, name.number)
            return [] if one is None else [one]

    async def _resolved(self, asked: ModelName, found: Reached) -> ResolvedModel:
        name = f"{asked.tenant}/{asked.adapter}@{found.number}"
        if found.base != self._base.fingerprint:
            raise RevisionUnavailable(
                f"`{name}` was made for another base model than {self._served_model_name}; upload one made for this",
                "model",
            )
        try:
            directory = self._blobs.known_directory(found.digest)
            if directory is None:
                directory = await finished(self._blobs.directory, found.digest)
        except StorageError as error:
            raise RevisionUnavailable(f"the files of `{name}` are damaged: {error}", "model") from error
        return ResolvedModel(
            name=name,
            base_model=self._served_model_name,
            revision=Revision(
                adapter_id=found.adapter_id, number=found.number, digest=found.digest, directory=directory
            ),
        )
