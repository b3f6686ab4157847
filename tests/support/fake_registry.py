"""A registry whose contents are names: everything about adapters but their files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from loramux.catalog.registry.entities import WeightedRevision
from loramux.catalog.registry.registry import open_registry
from loramux.catalog.registry.resolver import BaseModel, BaseModels
from loramux.catalog.uploads.ingest import Ingest
from loramux.common.identity import Principal
from loramux.common.settings.serving import AdapterLimits
from loramux.data.records.adapters import RevisionContent, Stamp
from loramux.data.records.contents import register_revision
from loramux.data.records.database import Database

BASES = BaseModels([BaseModel("tiny", cast(Any, SimpleNamespace(fingerprint="base")))])
SECOND = 1_000_000


@dataclass
class NamesOnly:
    """A store in which every content is there, until it is removed."""

    removed: list[str] = field(default_factory=list)

    def known_directory(self, digest: str) -> Path:
        return Path("/contents") / digest

    def remove(self, digest: str) -> None:
        self.removed.append(digest)


def digest_of(content: int) -> str:
    return f"sha256:{hashlib.sha256(str(content).encode()).hexdigest()}"


class Shelf:
    """Registers contents by number; its clock stands still until time is let pass."""

    def __init__(self, database: Database, blobs: Any = None, **limits: Any) -> None:
        self.database = database
        self.now = database.now()
        database.now = lambda: self.now
        self.blobs: Any = blobs
        if blobs is None:
            self.blobs = NamesOnly()
        everything: dict[str, Any] = {"undo_seconds": 3600, "pin_idle_seconds": 3600} | limits
        self.limits = AdapterLimits(**everything)
        self.registry = open_registry(database, self.blobs, BASES, self.limits)

    def ingest(self) -> Ingest:
        """The checks before an upload is opened."""
        return Ingest(self.database, self.blobs, self.registry.blob_gc, BASES, self.limits, cast(Any, None))

    def pass_time(self, seconds: int) -> None:
        self.now += seconds * SECOND

    async def push(self, principal: Principal, name: str, *contents: int, promote: bool = True) -> None:
        for number in contents:
            content = RevisionContent(digest=digest_of(number), rank=4, size_bytes=1000 + number, base="base")
            async with self.database.begin() as session:
                stamp = Stamp(self.database.now(), principal.key_id)
                await register_revision(session, principal.tenant, name, content, stamp, promote=promote)

    async def means(self, principal: Principal, model: str, caller: str = "") -> str:
        return (await self.registry.resolver.resolve(principal, model, caller)).name


def weights(**shares: int) -> list[WeightedRevision]:
    """`r3=95` is revision 3 with weight 95."""
    return [WeightedRevision(int(name[1:]), share) for name, share in shares.items()]
