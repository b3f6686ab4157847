"""What a model name means at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loramux.records import Database, Principal
from loramux.records.adapters import DEFAULT_ALIAS, AdapterRepository, Listed
from loramux.registry.entities import ResolvedModel, Revision
from loramux.registry.errors import ModelNotFound, RevisionUnavailable
from loramux.registry.names import parse_model
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

    async def resolve(self, principal: Principal, model: str) -> ResolvedModel:
        """What `model` means to this caller now. Raises ModelNotFound, RevisionUnavailable."""
        if model == self._served_model_name and principal.may_use(model):
            return ResolvedModel(name=model, base_model=model, revision=None)
        name = parse_model(model if "/" in model else f"{principal.tenant_name}/{model}")
        if name is None or name.tenant != principal.tenant_name:
            raise ModelNotFound(model)
        if not principal.may_use(f"{name.tenant}/{name.adapter}"):
            raise ModelNotFound(model)
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            if name.number is not None:
                listed = await adapters.numbered(name.adapter, name.number)
            else:
                listed = await adapters.aliased(name.adapter, name.alias or DEFAULT_ALIAS)
        if listed is None:
            raise ModelNotFound(model)
        return await self._resolved(principal, listed)

    async def _resolved(self, principal: Principal, listed: Listed) -> ResolvedModel:
        adapter, revision = listed
        name = f"{principal.tenant_name}/{adapter.name}@{revision.number}"
        if revision.base != self._base.fingerprint:
            raise RevisionUnavailable(
                f"`{name}` was made for another base model than {self._served_model_name}; upload one made for this",
                "model",
            )
        try:
            directory = self._blobs.known_directory(revision.digest)
            if directory is None:
                directory = await finished(self._blobs.directory, revision.digest)
        except StorageError as error:
            raise RevisionUnavailable(f"the files of `{name}` are damaged: {error}", "model") from error
        return ResolvedModel(
            name=name,
            base_model=self._served_model_name,
            revision=Revision(
                adapter_id=adapter.id, number=revision.number, digest=revision.digest, directory=directory
            ),
        )
