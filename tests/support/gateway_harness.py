"""A completion service over a scripted engine and the real usage, on SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from image_base import image_format, image_tokenizer
from scripted_engine import FACTS, ScriptedEngine
from tiny_base import byte_tokenizer

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.resolver import ResolvedModel
from loramux.common.settings.serving import ImageSettings
from loramux.data.records import schema
from loramux.data.records.database import Database
from loramux.engine.messages import SamplingParams
from loramux.money.usage.service import UsageService
from loramux.serving.bases import ServedBase, ServedBases
from loramux.serving.formats import GrammarTrials
from loramux.serving.images import ImageReader
from loramux.serving.messages import Answer, GenerationRequest
from loramux.serving.service import CompletionService
from loramux.serving.tokenizer import Tokenizer


class Harness(SimpleNamespace):
    """A completion service with its engine, its usage and a caller."""

    engine: ScriptedEngine
    service: CompletionService
    usage: UsageService
    database: Database
    images: ImageReader | None

    async def begin(self, **changes: Any) -> Answer:
        ask: dict[str, Any] = {
            "kind": "cmpl-",
            "model": "tiny",
            "prompts": ("hello",),
            "sampling": SamplingParams(max_tokens=0),
        }
        ask["is_streamed"] = True
        return await self.service.begin(self.principal, GenerationRequest(**(ask | changes)))

    async def entries(self) -> list[tuple[str | None, int, int, int, str | None]]:
        from sqlalchemy import select

        from loramux.data.records.ledger import LedgerRow

        async with self.database.read() as session:
            rows = (await session.scalars(select(LedgerRow).order_by(LedgerRow.sequence))).all()
        return [(r.status, r.input_tokens, r.cached_tokens, r.output_tokens, r.finish_reason) for r in rows]


class AnyName:
    """A registry in which every name with a slash is a revision, and every other the base."""

    async def resolve(self, principal: object, model: str, caller: str) -> ResolvedModel:
        revision = SimpleNamespace(digest="d1", engine_key="d1", directory="/d1") if "/" in model else None
        return ResolvedModel(name=model, base_model="tiny", revision=cast(Any, revision))


@asynccontextmanager
async def harness(
    folder: Path, *, share_base_cache: bool = False, images: ImageSettings | None = None, **engine: Any
) -> AsyncIterator[Harness]:
    """`images` are the settings of a base that reads images."""
    if images is not None:
        engine = {
            "facts": msgspec.structs.replace(FACTS, vocab_size=261, pages_total=1024, max_model_len=8192)
        } | engine
    url = f"sqlite:///{folder}/records.sqlite3"
    schema.migrate(url)
    database = Database(url)
    tenants, usage, scripted = Tenants(database, b"p" * 32), UsageService(database), ScriptedEngine(**engine)
    await tenants.create("acme")
    principal = await tenants.authenticator.authenticate((await tenants.create_key("acme"))[1])
    await usage.start()
    tokenizer, facts = Tokenizer(byte_tokenizer() if images is None else image_tokenizer()), await scripted.start()
    form = None if images is None else image_format()
    reader = None if images is None else ImageReader(images)
    trials = GrammarTrials(tokenizer, facts)
    base = ServedBase("tiny", cast(Any, scripted), facts, tokenizer, trials, share_cache=share_base_cache, images=form)
    service = CompletionService(
        bases=ServedBases({"tiny": base}),
        resolver=cast(Any, AnyName()),
        usage=usage,
        images=reader,
    )
    try:
        yield Harness(
            engine=scripted, service=service, usage=usage, database=database, principal=principal, images=reader
        )
    finally:
        await service.drain(1)
        trials.close()
        if reader is not None:
            await reader.close()
        await usage.stop()
        await database.close()


def in_harness(test: Callable[[Harness], Awaitable[None]], folder: Path, **engine: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(120), harness(folder, **engine) as made:
            await test(made)

    asyncio.run(run())


async def read(generation: Answer) -> str:
    return "".join([delta.text async for delta in generation])
