"""The ledger: its rows, its hash chain, the statements that append and verify entries, and the engines' own counts.

The hash of entry n is the SHA-256 of all its other fields, including `prev_hash`. So a changed, deleted or moved entry
is detected. Appending holds the lock of the head row, so sequences have no gaps and are committed in order.
Byte-seconds are bytes times whole seconds.

The tokens that engines count are stored separately from the ledger, so that a reconciliation can compare both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    CheckConstraint,
    Executable,
    ForeignKey,
    Index,
    Row,
    bindparam,
    case,
    select,
    text,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.common.jobs import SERVER, run_blocking
from loramux.common.units import TokenCounts
from loramux.data.records.base import (
    Base,
    Repository,
    among,
    exact_sum,
    exact_value,
    insert_rows,
    insert_sums,
    table_of,
)
from loramux.data.records.database import is_postgresql
from loramux.data.records.errors import ChainBroken

GENESIS = "0" * 64
"""The hash before the first entry."""

PAGE = 1000


class LedgerRow(Base):
    """One ledger entry. Triggers refuse every UPDATE, DELETE and gap; corrections are new rows."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        CheckConstraint("kind IN ('usage', 'interrupted', 'storage', 'residency', 'correction')", name="kind"),
        CheckConstraint("(corrects IS NOT NULL) = (kind = 'correction')", name="correction"),
        CheckConstraint(
            "kind = 'correction' OR (input_tokens >= 0 AND output_tokens >= 0"
            " AND waived_input_tokens >= 0 AND waived_output_tokens >= 0 AND adapter_load >= 0"
            " AND adapter_byte_seconds >= 0 AND adapter_resident_byte_seconds >= 0)",
            name="quantities",
        ),
        CheckConstraint(
            "kind = 'correction' OR (cached_tokens BETWEEN 0 AND input_tokens"
            " AND waived_cached_tokens BETWEEN 0 AND waived_input_tokens)",
            name="cached",
        ),
        CheckConstraint(
            "kind = 'correction' OR (image_tokens BETWEEN 0 AND input_tokens - cached_tokens"
            " AND waived_image_tokens BETWEEN 0 AND waived_input_tokens - waived_cached_tokens)",
            name="images",
        ),
        Index("ix_ledger_entries_tenant_id_created_at", "tenant_id", "created_at"),
    )

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    event_id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str]
    project_id: Mapped[ProjectId | None]
    request_id: Mapped[str]
    model: Mapped[str]
    adapter_digest: Mapped[str | None]
    base_model: Mapped[str] = mapped_column(server_default=text("''"))
    tier: Mapped[str] = mapped_column(server_default=text("''"))
    tags: Mapped[str] = mapped_column(server_default=text("''"))
    user_id: Mapped[str | None]
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    waived_input_tokens: Mapped[int] = mapped_column(server_default="0")
    waived_cached_tokens: Mapped[int] = mapped_column(server_default="0")
    waived_output_tokens: Mapped[int] = mapped_column(server_default="0")
    adapter_load: Mapped[int] = mapped_column(server_default="0")
    adapter_byte_seconds: Mapped[int] = mapped_column(server_default="0")
    adapter_resident_byte_seconds: Mapped[int] = mapped_column(server_default="0")
    finish_reason: Mapped[str | None]
    status: Mapped[str]
    created_at: Mapped[int]
    occurred_at: Mapped[int | None]
    corrects: Mapped[str | None]
    prev_hash: Mapped[str]
    hash: Mapped[str]
    image_tokens: Mapped[int] = mapped_column(server_default="0")
    waived_image_tokens: Mapped[int] = mapped_column(server_default="0")


class LedgerHeadRow(Base):
    """The ledger's last sequence and hash: one row, locked by every transaction that appends."""

    __tablename__ = "ledger_head"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sequence: Mapped[int]
    hash: Mapped[str]


class LedgerHead(NamedTuple):
    """The ledger's last sequence and hash."""

    sequence: int
    hash: str


HEADS = table_of(LedgerHeadRow)
_HEAD = select(HEADS.c.sequence, HEADS.c.hash)
_LOCK_HEAD = _HEAD.with_for_update()
_MOVE_HEAD = update(HEADS).values(sequence=bindparam("last_sequence"), hash=bindparam("last_hash"))


class EntryContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A ledger entry before it has its place in the chain. Quantities are integers of tokens and byte-seconds."""

    kind: str
    """The kind of entry: `usage`, `interrupted`, `storage`, `residency` or `correction`.

    `interrupted`: a request whose server died; the request is recorded and never billed. `storage` and `residency`: a
    revision during a span of time. `correction`: a change of an earlier entry; only its quantities may be negative.
    """
    tenant_id: TenantId
    key_id: str
    request_id: str
    """The request's id. For other kinds it is the subject and its time, so that the entry is written only once."""
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    adapter_digest: str | None
    input_tokens: int
    cached_tokens: int
    """The part of input_tokens that was found in the cache."""
    output_tokens: int
    finish_reason: str | None
    status: str
    created_at: int
    base_model: str = ""
    tier: str = ""
    """The tier that the request is charged at."""
    project_id: str | None = None
    tags: str = ""
    """A JSON object of texts with sorted keys; empty without tags."""
    user_id: str | None = None
    """The caller's name for the end user of the request."""
    waived_input_tokens: int = 0
    """Tokens that the engine computed for this request and that are not charged, including cached ones."""
    waived_cached_tokens: int = 0
    waived_output_tokens: int = 0
    adapter_load: int = 0
    adapter_byte_seconds: int = 0
    adapter_resident_byte_seconds: int = 0
    corrects: str | None = None
    """The event_id of the entry that this entry corrects."""
    occurred_at: int | None = None
    """The time of the billed use, if it differs from created_at. The prices of this time apply."""
    image_tokens: int = 0
    """The part of input_tokens that stands for images, without cached_tokens."""
    waived_image_tokens: int = 0

    @property
    def billed(self) -> TokenCounts:
        """Return the tokens that are charged."""
        return TokenCounts(
            prompt=self.input_tokens,
            cached=self.cached_tokens,
            output=self.output_tokens,
            image=self.image_tokens,
        )

    @property
    def waived(self) -> TokenCounts:
        """Return the tokens that the engine computed and the tenant does not pay for."""
        return TokenCounts(
            prompt=self.waived_input_tokens,
            cached=self.waived_cached_tokens,
            output=self.waived_output_tokens,
            image=self.waived_image_tokens,
        )


class LedgerEntry(EntryContent, frozen=True, kw_only=True, omit_defaults=True):
    """A ledger entry in its place in the chain: `hash` covers every other field."""

    sequence: int
    event_id: str
    """The id of the event, derived from the entry's subject: an event is written once, even after several attempts."""
    prev_hash: str
    hash: str = ""


def event_id(kind: str, request_id: str) -> str:
    """Return the event id of a request, or of another subject, which can have only one entry of this kind."""
    return "evt_" + hashlib.sha256(f"{kind}:{request_id}".encode()).hexdigest()[:32]


def chain_hash(entry: LedgerEntry) -> str:
    """Return the SHA-256 of all fields except `hash` as JSON: keys sorted, no spaces, ASCII.

    Fields that later releases added are left out if they have no value, so that old entries keep their hashes.
    """
    canonical = _encode(msgspec.structs.replace(entry, hash="") if entry.hash else entry)
    if not canonical.isascii():
        canonical = json.dumps(json.loads(canonical), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()


_encode = msgspec.json.Encoder(order="sorted").encode


class LedgerRepository(Repository):
    """The ledger."""

    async def lock(self) -> LedgerHead:
        """Lock and return the head: until this transaction ends, no other transaction appends."""
        return LedgerHead(*(await self._session.execute(_LOCK_HEAD)).one())

    async def head(self) -> LedgerHead:
        """Return the head without locking it."""
        return LedgerHead(*(await self._session.execute(_HEAD)).one())

    async def append(self, head: LedgerHead, drafts: Sequence[EntryContent]) -> list[LedgerEntry]:
        """Append entries after `head`, which the caller has locked."""
        entries: list[LedgerEntry] = []
        sequence, last = head.sequence, head.hash
        for draft in drafts:
            sequence += 1
            entry = _follow(draft, sequence, last)
            entries.append(entry)
            last = entry.hash
        if entries:
            await insert_rows(self._session, LedgerRow, [msgspec.structs.asdict(entry) for entry in entries])
            await self._session.execute(_MOVE_HEAD, {"last_sequence": sequence, "last_hash": last})
        return entries

    async def of_requests(self, kind: str, request_ids: Collection[str]) -> dict[str, LedgerEntry]:
        """Return the entries of one kind that these requests already have, by request id."""
        events = [event_id(kind, id) for id in request_ids]
        statement = select(*COLUMNS).where(among(self._session, LedgerRow.event_id, events))
        return {row.request_id: _entry(row) for row in await self._session.execute(statement)}

    async def entry(self, event_id: str) -> LedgerEntry | None:
        """Return the entry of that event."""
        row = (await self._session.execute(select(*COLUMNS).where(LedgerRow.event_id == event_id))).one_or_none()
        return None if row is None else _entry(row)

    async def corrections_of(self, entry: LedgerEntry) -> list[LedgerEntry]:
        """Return the corrections of an entry, oldest first."""
        statement = select(*COLUMNS).where(LedgerRow.tenant_id == entry.tenant_id, LedgerRow.corrects == entry.event_id)
        return [_entry(row) for row in await self._session.execute(statement.order_by(LedgerRow.sequence))]

    async def after(self, sequence: int, limit: int, until: int | None = None) -> list[LedgerEntry]:
        """Return the entries that follow `sequence`, in order, up to and including `until`."""
        statement = select(*COLUMNS).where(LedgerRow.sequence > sequence)
        if until is not None:
            statement = statement.where(LedgerRow.sequence <= until)
        rows = await self._session.execute(statement.order_by(LedgerRow.sequence).limit(limit))
        return [_entry(row) for row in rows]

    async def verify(self) -> LedgerHead:
        """Check the whole chain in this transaction's snapshot and return its head. Raises ChainBroken."""
        sequence, last = 0, GENESIS
        async for page in self._pages():
            # in a thread, because hashing a page takes tens of milliseconds
            sequence, last = await run_blocking(SERVER, _verify_page, page, sequence, last)
        head = await self.head()
        if head != (sequence, last):
            raise ChainBroken(
                max(sequence, head.sequence), f"the head says {head.sequence}, the entries end at {sequence}"
            )
        return head

    async def _pages(self) -> AsyncIterator[list[LedgerEntry]]:
        after = -1
        while entries := await self.after(after, PAGE):
            yield entries
            after = entries[-1].sequence


def _verify_page(entries: Sequence[LedgerEntry], sequence: int, last: str) -> tuple[int, str]:
    """Check that entries follow the entry with that sequence and hash; return the sequence and hash of the last entry.
    Raises ChainBroken.
    """
    for entry in entries:
        sequence += 1
        if entry.sequence != sequence:
            raise ChainBroken(sequence, f"missing; {entry.sequence} comes next")
        if entry.prev_hash != last:
            raise ChainBroken(sequence, "does not follow from the entry before it")
        if entry.hash != chain_hash(entry):
            raise ChainBroken(sequence, "its content is not what was hashed")
        last = entry.hash
    return sequence, last


def _follow(draft: EntryContent, sequence: int, prev_hash: str) -> LedgerEntry:
    facts = msgspec.structs.asdict(draft)
    event = event_id(draft.kind, draft.request_id)
    entry = LedgerEntry(**facts, sequence=sequence, event_id=event, prev_hash=prev_hash)
    return msgspec.structs.replace(entry, hash=chain_hash(entry))


COLUMNS = tuple(getattr(LedgerRow, name) for name in LedgerEntry.__struct_fields__)


def _entry(row: Row[Any]) -> LedgerEntry:
    return LedgerEntry(**row._mapping)


class EngineCountRow(Base):
    """Tokens that one server's engine has counted for settled requests, by `Weights`.

    Only the server itself writes its rows, in the transactions that settle requests.
    """

    __tablename__ = "engine_counts"

    server_id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    adapter_digest: Mapped[str] = mapped_column(primary_key=True)
    """Digest of the adapter, or the series of a training adapter; empty for the base model."""
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]


Weights = tuple[str, str]
"""A base model, and an adapter's digest; nothing for the base itself.

The versions of a training adapter have the name of their series in place of a digest: a trainer makes thousands, and
each would leave a row for ever. Such a request is billed under that name, which has no `@`.
"""


def weights_of(base_model: str, model: str, adapter_digest: str | None) -> Weights:
    """Return the weights under which the tokens of a request are counted. `model`: its name in the ledger."""
    if adapter_digest is None:
        return base_model, ""
    return base_model, adapter_digest if "@" in model else model


@cache
def _add_counts(on_postgresql: bool) -> Executable:
    return insert_sums(on_postgresql, table_of(EngineCountRow), ("prompt_tokens", "cached_tokens", "output_tokens"))


class EngineCountRepository(Repository):
    """The counts of the engines and of the ledger."""

    async def add(self, server_id: str, counts: Mapping[Weights, TokenCounts]) -> None:
        """Add to the counts of this server's engine."""
        rows = [
            {
                "server_id": server_id,
                "base_model": base,
                "adapter_digest": digest,
                "prompt_tokens": tokens.prompt,
                "cached_tokens": tokens.cached,
                "output_tokens": tokens.output,
            }
            for (base, digest), tokens in sorted(counts.items())
        ]
        await self._session.execute(_add_counts(is_postgresql(self._session)), rows)

    async def engines(self) -> dict[Weights, TokenCounts]:
        """Return the tokens that all engines have ever counted for settled requests."""
        columns = EngineCountRow.prompt_tokens, EngineCountRow.cached_tokens, EngineCountRow.output_tokens
        keys = EngineCountRow.base_model, EngineCountRow.adapter_digest
        statement = select(*keys, *(part for column in columns for part in exact_sum(column))).group_by(*keys)
        return {(row[0], row[1]): _tokens(tuple(row)) for row in await self._session.execute(statement)}

    async def ledger(self) -> dict[Weights, TokenCounts]:
        """Return the counts of the same tokens in the ledger: billed and waived, without corrections."""
        weights = case(  # `weights_of` in SQL
            (LedgerRow.adapter_digest.is_(None), ""),
            (LedgerRow.model.contains("@"), LedgerRow.adapter_digest),
            else_=LedgerRow.model,
        )
        keys = LedgerRow.base_model, weights
        sums = (
            LedgerRow.input_tokens + LedgerRow.waived_input_tokens,
            LedgerRow.cached_tokens + LedgerRow.waived_cached_tokens,
            LedgerRow.output_tokens + LedgerRow.waived_output_tokens,
        )
        statement = (
            select(*keys, *(part for column in sums for part in exact_sum(column)))
            .where(LedgerRow.kind.in_(("usage", "interrupted")))
            .group_by(*keys)
        )
        return {(row[0], row[1]): _tokens(tuple(row)) for row in await self._session.execute(statement)}


def _tokens(row: tuple[Any, ...]) -> TokenCounts:
    values = [exact_value(*row[2 + 2 * i : 4 + 2 * i]) for i in range(3)]
    return TokenCounts(prompt=values[0], cached=values[1], output=values[2])
