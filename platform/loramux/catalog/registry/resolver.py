"""Model names and the revisions to which they resolve: `tenant/adapter`, `tenant/adapter:alias`, `tenant/adapter@3`.

A name resolves to a base model of this server (`BaseModels`), or to a revision, which is served on its base.

An alias may point at several revisions by weight (a canary). The choice between them is deterministic. A hash maps the
caller's key to one of 2**64 points. The points are divided among the targets in the order of the revision numbers, by
exact integer shares. So the same caller always gets the same revision. If one share grows and its neighbour shrinks,
only callers between the old and the new border get another revision. The alias's id keys the hash, so the same callers
are distributed differently under another alias.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loramux.catalog.registry.errors import (
    SHOWN,
    AdapterNotFound,
    BaseRetired,
    InvalidName,
    ModelNotFound,
    RegistryError,
    RevisionUnavailable,
)
from loramux.common.identity import GRAMMAR, GRAMMAR_IN_WORDS, Principal, TenantId, is_name
from loramux.common.jobs import ThreadPool, run_blocking
from loramux.data.records.access import AccessibleRevision, AccessRepository, same_content
from loramux.data.records.aliases import DEFAULT_ALIAS
from loramux.data.records.database import Database
from loramux.data.records.training_versions import TrainingVersionRepository
from loramux.data.storage.blobs import BlobCorrupt, BlobMissing, BlobStore

if TYPE_CHECKING:
    from loramux_adapters.base import BaseDescription

POINTS = 2**64
"""The number of points to which callers are hashed."""

FETCHES, FETCHES_PER_TENANT = 16, 4
"""Maximum number of contents that are fetched from the store or digested at a time, in total and for one tenant."""

COMPARED, LIKENESS = 1000, 0.75
"""Maximum number of adapters that an unknown name is compared with, and difflib's minimum ratio for a suggestion."""

_model = re.compile(rf"({GRAMMAR})/({GRAMMAR})(?::({GRAMMAR})|@([1-9][0-9]{{0,8}}))?")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base: its name in requests, and its description for adapters."""

    name: str
    description: BaseDescription
    former_names: tuple[str, ...] = ()
    """Earlier names of the base. Revisions that were made for an earlier name are served on this base."""


@dataclass(frozen=True, slots=True)
class AbsentBase:
    """A base that this server does not serve, because it is retired or not loaded."""

    name: str
    former_names: tuple[str, ...] = ()
    is_retired: bool = False
    successor: str | None = None
    """The base to use instead, if the operator has named a successor."""


class BaseModels:
    """The bases of one server, in the order of its settings. The bases may change at run time (`serving.lifecycle`)."""

    def __init__(self, bases: Iterable[BaseModel] = ()) -> None:
        self._bases = {base.name: base for base in bases}
        self._absent: tuple[AbsentBase, ...] = ()

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._bases.values())

    def add(self, base: BaseModel) -> None:
        """Serve one more base."""
        self._bases[base.name] = base

    def remove(self, name: str) -> None:
        """Stop serving a base."""
        self._bases.pop(name, None)

    def set_absent(self, bases: Iterable[AbsentBase]) -> None:
        """Record the bases that are known but not served."""
        self._absent = tuple(bases)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the bases' names in requests."""
        return tuple(self._bases)

    def named(self, name: str) -> BaseModel | None:
        """Return the base of that name."""
        return self._bases.get(name)

    def absent(self, recorded: str) -> AbsentBase | None:
        """Return the base that has, or had, this name and is not served."""
        return next((base for base in self._absent if recorded in (base.name, *base.former_names)), None)

    def of_revision(self, recorded: str, fingerprint: str) -> BaseModel | None:
        """Return the base that serves a revision made for `recorded`; None if no base does.

        Equal fingerprints mean equal shapes, but not equal weights, so the name decides. Revisions from a release that
        had only one base do not name their base. Such revisions belong to the first base that they fit, and
        `Registry.name_bases` records this base.
        """
        for base in self:
            if recorded in ("", base.name, *base.former_names) and base.description.fingerprint == fingerprint:
                return base
        return None

    def way_out(self, absent: AbsentBase) -> str:
        """Name the base, or the bases, to use instead of a retired one."""
        if absent.successor is not None:
            return f"`{absent.successor}`"
        return " or ".join(f"`{name}`" for name in self.names) or "another base"


class ModelName(msgspec.Struct, frozen=True):
    """The parts of a request's `model`; at most one of `alias` and `number` is set."""

    tenant: str
    adapter: str
    alias: str | None = None
    number: int | None = None


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable weights: their digest, and the local folder with the verified files."""

    id: str
    owner: TenantId
    adapter_id: str
    number: int
    digest: str
    directory: Path

    @property
    def engine_key(self) -> str:
        """The name of the weights in the engine."""
        return engine_key(self.owner, self.digest)


def engine_key(owner: TenantId, digest: str) -> str:
    """Name an owner's weights in the engine.

    All tenants that have uploaded the same bytes share the stored files, but not the loaded weights. Otherwise a tenant
    could learn from the loads in its usage, or from the time to its first token, that another tenant has the same
    adapter.
    """
    return f"{digest}/{owner}"


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model to which a name currently resolves: a revision, such as `tenant/adapter@3`, or the base model (no
    revision).
    """

    name: str
    base_model: str
    """The base model's served name."""
    revision: Revision | None
    series: str | None = None
    """The series of a training adapter, as `tenant/series`; None for other models."""

    @property
    def billed_name(self) -> str:
        """Return the name in the ledger and in metrics. Versions of training adapters are counted by their series,
        because a trainer makes thousands.
        """
        return self.series or self.name


class ModelResolver:
    """Resolves model names to verified files."""

    def __init__(self, database: Database, blobs: BlobStore, bases: BaseModels) -> None:
        self._database = database
        self._blobs = blobs
        self._bases = bases
        self._used: set[str] = set()
        self._threads = ThreadPool("blobs", FETCHES, FETCHES_PER_TENANT)

    async def resolve(self, principal: Principal, model: str, caller: str = "") -> ResolvedModel:
        """Return the present meaning of `model` for this tenant; `caller` decides between an alias's targets.

        Raises ModelNotFound, RevisionUnavailable, BaseRetired.
        """
        if principal.may_use(model):
            if self._bases.named(model):
                return ResolvedModel(name=model, base_model=model, revision=None)
            if (absent := self._bases.absent(model)) is not None and absent.name == model:
                raise self._absence(f"the base model `{model}`", absent, f"use {self._bases.way_out(absent)}")
        name = parse_model(model if "/" in model else f"{principal.tenant_name}/{model}")
        if name is None or not principal.may_use(f"{name.tenant}/{name.adapter}"):
            raise ModelNotFound(model, await self._nearest(principal, model))
        candidates = await self._candidates(principal, name)
        if not candidates:
            raise ModelNotFound(model, await self._nearest(principal, model))
        resolved = await self._with_files(name, choose_target(candidates, caller), principal.tenant)
        assert resolved.revision is not None
        if resolved.series is None:
            self._used.add(resolved.revision.id)
        return resolved

    def take_used(self) -> frozenset[str]:
        """Return the ids of the revisions to which names were resolved since the last call."""
        used, self._used = frozenset(self._used), set()
        return used

    async def _nearest(self, principal: Principal, model: str) -> str | None:
        """Return the most similar name of a base or of the caller's own adapters; None if no name is similar."""
        async with self._database.read() as session:
            access = AccessRepository(session, principal.tenant, principal.tenant_name)
            own = await access.own(principal.own_adapters(), limit=COMPARED)
        names = [row.name for row in own] + [base for base in self._bases.names if principal.may_use(base)]
        near = await run_blocking(principal.tenant, nearest_name, re.split("[:@]", model[:SHOWN], maxsplit=1)[0], names)
        return None if near == model else near

    async def _candidates(self, principal: Principal, name: ModelName) -> list[AccessibleRevision]:
        async with self._database.look_up() as session:
            access = AccessRepository(session, principal.tenant, principal.tenant_name)
            if name.number is None:
                found = await access.aliased(name.tenant, name.adapter, name.alias or DEFAULT_ALIAS)
            else:
                one = await access.numbered(name.tenant, name.adapter, name.number)
                found = [] if one is None else [one]
            if found or name.alias is not None or name.tenant != principal.tenant_name:
                return found
            pushed = await TrainingVersionRepository(session, principal.tenant).callable(name.adapter, name.number)
            return [] if pushed is None else [pushed]

    async def _with_files(self, asked: ModelName, found: AccessibleRevision, tenant: TenantId) -> ResolvedModel:
        name = f"{asked.tenant}/{asked.adapter}@{found.number}"
        base = self._bases.of_revision(found.base_model, found.base)
        if base is None:
            raise await self._unserved(name, f"{asked.tenant}/{asked.adapter}", found)
        try:
            directory = self._blobs.known_directory(found.digest)
            if directory is None:
                directory = await self._threads.run(tenant, self._blobs.directory, found.digest)
        except (BlobMissing, BlobCorrupt) as error:
            raise RevisionUnavailable(f"the files of `{name}` are damaged: {error}", "model") from error
        revision = Revision(
            id=found.revision_id,
            owner=found.tenant_id,
            adapter_id=found.adapter_id,
            number=found.number,
            digest=found.digest,
            directory=directory,
        )
        series = None if found.series is None else f"{asked.tenant}/{found.series}"
        return ResolvedModel(name=name, base_model=base.name, revision=revision, series=series)

    async def _unserved(self, name: str, adapter: str, found: AccessibleRevision) -> RegistryError:
        """Return the error for a revision that no base serves. For a retired base, the error names the base to use
        instead.
        """
        absent = self._bases.absent(found.base_model)
        if absent is None:
            return RevisionUnavailable(
                f"`{name}` was made for another base model than {' and '.join(self._bases.names)}; upload one made for "
                f"{'one of these' if len(self._bases.names) > 1 else 'this'}",
                "model",
            )
        way_out = f"train and upload one for {self._bases.way_out(absent)}"
        if absent.is_retired:
            async with self._database.read() as session:
                copies = await same_content(session, found.adapter_id, found.digest, self._bases.names)
            if copies:
                number, base_model = copies[-1]
                way_out = (
                    f"`{adapter}@{number}` is the same adapter for `{base_model}`: ask for it, or point the alias at it"
                )
        return self._absence(f"`{name}` is for the base model `{absent.name}`, which", absent, way_out)

    @staticmethod
    def _absence(subject: str, absent: AbsentBase, way_out: str) -> RegistryError:
        if absent.is_retired:
            return BaseRetired(f"{subject} is retired; {way_out}", "model")
        return RevisionUnavailable(f"{subject} is being loaded, or cannot be at present; try again later", "model")


def nearest_name(asked: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `asked`. The parts after the slash must be similar, and also the parts before the
    slash if both names have one.
    """
    owner, _, own = asked.rpartition("/")
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition("/")[2], []).append(name)
    for likely in get_close_matches(own, found, 3, LIKENESS):
        for name in found[likely]:
            other = name.rpartition("/")[0]
            if not owner or not other or SequenceMatcher(None, owner, other).ratio() >= LIKENESS:
                return name
    return None


def parse_model(text: str) -> ModelName | None:
    """Split an adapter's model name; return None if the text cannot be such a name."""
    match = _model.fullmatch(text)
    if match is None:
        return None
    tenant, adapter, alias, number = match.groups()
    return ModelName(tenant, adapter, alias, int(number) if number else None)


def adapter_part(tenant_name: str, name: str) -> str | None:
    """Return `adapter` of `adapter` or `tenant/adapter`; None if the name is malformed or names another tenant's
    adapter.
    """
    owner, slash, rest = name.partition("/")
    if slash and owner != tenant_name:
        return None
    adapter = rest if slash else owner
    return adapter if is_name(adapter) else None


def own_adapter(principal: Principal, name: str) -> str:
    """Return the same as `adapter_part`. Raises AdapterNotFound if the caller may use no adapter of that name."""
    adapter = adapter_part(principal.tenant_name, name)
    if adapter is None or not principal.may_use(f"{principal.tenant_name}/{adapter}"):
        raise AdapterNotFound(name)
    return adapter


def check_adapter_name(tenant_name: str, name: str, base_names: Collection[str]) -> str:
    """Return the adapter part of a name to upload under; raises InvalidName with the grammar."""
    adapter = adapter_part(tenant_name, name)
    if adapter is None:
        raise InvalidName(
            f"`{name[:SHOWN]}` is no name for an adapter of yours: write ADAPTER or {tenant_name}/ADAPTER, "
            f"where ADAPTER is {GRAMMAR_IN_WORDS} ({GRAMMAR})",
            "name",
        )
    if (full := f"{tenant_name}/{adapter}") in base_names:
        raise InvalidName(f"`{full}` is a base model's name; choose another", "name")
    return adapter


def choose_target(targets: Sequence[AccessibleRevision], caller: str) -> AccessibleRevision:
    """Choose a target by the caller's hash: the same alias, targets, weights and caller always give the same target."""
    point = hashlib.blake2b(caller.encode(), key=targets[0].key.encode(), digest_size=8)
    return target_at(targets, int.from_bytes(point.digest(), "big"))


def target_at(targets: Sequence[AccessibleRevision], point: int) -> AccessibleRevision:
    """Return the target whose share contains `point`, a number below POINTS."""
    ticket = point * sum(target.weight for target in targets) // POINTS
    for target in targets:
        ticket -= target.weight
        if ticket < 0:
            return target
    raise AssertionError("a ticket is less than the sum of the weights")
