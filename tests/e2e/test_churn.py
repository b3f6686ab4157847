"""Requests decode while adapters are uploaded, released, rolled back, pinned and deleted under them.

pytest tests/e2e/test_churn.py -m slow -s      # 64 clients and 200 changes; the quick test has fewer
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from peft_uploads import make_adapter
from site_fixture import make_settings
from upload_harness import upload_folder

from loramux.catalog.registry.entities import WeightedRevision
from loramux.catalog.registry.errors import ChangeConflict, PartNotFound, TooManyAdapters
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import AdapterLimits, EngineSettings
from loramux.engine.messages import EngineStats, SamplingParams
from loramux.server.platform import Platform, open_platform
from loramux.serving.messages import GenerationRequest

PROMPTS = ("hello", "a longer prompt, so that pages fill", "x" * 40, "why?")
TOKENS = 16
SECOND = 1_000_000
SECONDS_A_CHANGE = 2
"""Seconds that every change adds to the database's clock, so contents are removed while requests run."""
EXPECTED = (ChangeConflict, PartNotFound, TooManyAdapters)
"""Valid answers to a change at the wrong moment."""


@dataclass
class Answered:
    """An answer that a client got."""

    id: str
    prompt: str
    tokens: tuple[int, ...]


@dataclass
class Churn:
    """A platform whose adapter `bot` changes all the time."""

    platform: Platform
    acme: Principal
    folders: list[Path]
    incoming: Path
    random: random.Random = field(default_factory=lambda: random.Random(7))
    answered: list[Answered] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    over: bool = False

    async def ask(self, model: str, prompt: str, user: str | None = None) -> Answered:
        sampling = SamplingParams(max_tokens=0, temperature=0, ignore_eos=True)
        ask = GenerationRequest(
            kind="cmpl-",
            model=model,
            is_streamed=True,
            prompts=(prompt,),
            sampling=sampling,
            max_tokens=TOKENS,
            user=user,
        )
        generation = await self.platform.completions.begin(self.acme, ask)
        tokens = [token async for delta in generation for token in delta.token_ids]
        return Answered(generation.id, prompt, tuple(tokens))

    async def client(self, number: int) -> None:
        """Sends requests to the default and the canary, with and without a `user`, until the test is over."""
        chance = random.Random(number)
        while not self.over:
            model = chance.choice(("acme/bot", "acme/bot:canary"))
            user = f"user {number}" if chance.random() < 0.5 else None
            self.answered.append(await self.ask(model, chance.choice(PROMPTS), user))

    async def upload(self, name: str, folder: Path) -> None:
        fresh = Path(shutil.copytree(folder, self.incoming / f"{self.random.getrandbits(64):x}"))
        await upload_folder(self.platform.uploads, self.acme, name, fresh)
        shutil.rmtree(fresh)

    async def change(self) -> None:
        """One change, whichever it may be."""
        adapters, acme = self.platform.adapters, self.acme
        there = [one for one in await adapters.queries.revisions(acme, "bot") if one.state == "ready"]
        gone = [one for one in await adapters.queries.revisions(acme, "bot") if one.state == "deleted"]
        some, undo = self.random.choice(there).number, self.random.choice((0, 99))
        pair = [WeightedRevision(one.number, self.random.randint(1, 99)) for one in self.random.sample(there, 2)]
        changes: list[tuple[int, str, Callable[[], Awaitable[Any]]]] = [
            (1, "upload", lambda: self.upload("bot", self.random.choice(self.folders))),
            (3, "promote", lambda: adapters.aliases.promote(acme, "bot", some)),
            (3, "canary", lambda: adapters.aliases.point(acme, "bot", "canary", pair)),
            (2, "rollback", lambda: adapters.aliases.roll_back(acme, "bot", "default", None)),
            (2, "pin", lambda: adapters.pins.pin(acme, "bot", some)),
            (2, "unpin", lambda: adapters.pins.unpin(acme, "bot", some)),
            (
                4,
                "delete",
                lambda: adapters.delete_revision(acme, "bot", some, undo_seconds=undo),
            ),
        ]
        if gone:
            changes.append((1, "undelete", lambda: adapters.deletion.undelete_revision(acme, "bot", gone[0].number)))
        if len(there) < 3:
            changes = changes[:1]
        _, name, make = self.random.choices(changes, [share for share, _, _ in changes])[0]
        try:
            await make()
        except EXPECTED:
            name = "refused"
        self.changes[name] += 1
        self.pass_time(SECONDS_A_CHANGE)
        await adapters.run_maintenance()

    def pass_time(self, seconds: int) -> None:
        database = self.platform.tenants._database
        before = database.now
        database.now = lambda: before() + seconds * SECOND

    async def digests(self) -> dict[str, str]:
        """Which content answered each request, by the records."""
        async with self.platform.tenants._database.read() as session:
            rows = await session.execute(sa.text("SELECT id, adapter_digest, status FROM requests"))
            found = {id: (digest, status) for id, digest, status in rows}
        assert {status for _, status in found.values()} == {"settled"}
        return {id: digest for id, (digest, _) in found.items()}

    async def pages(self) -> EngineStats:
        """The engine's gauges, after a step of the base model's."""
        await self.ask("tiny", PROMPTS[0])
        (stats,) = self.platform.bases["tiny"].engines.stats().values()
        return stats


def churn(settings: Settings, folders: list[Path], incoming: Path, clients: int, changes: int) -> Churn:
    async def run() -> Churn:
        async with open_platform(settings) as platform:
            await platform.tenants.create("acme")
            acme = await platform.tenants.authenticator.authenticate((await platform.tenants.create_key("acme"))[1])
            made = Churn(platform, acme, folders, incoming)
            start = await made.pages()
            quiet = await learn(made)
            for folder in folders[:3]:
                await made.upload("bot", folder)
            await platform.adapters.aliases.promote(made.acme, "bot", 3, "canary")
            async with asyncio.TaskGroup() as tasks:
                for number in range(clients):
                    tasks.create_task(made.client(number))
                for _ in range(changes):
                    await made.change()
                made.over = True
            digests = await made.digests()
            wrong = [one for one in made.answered if quiet[digests[one.id], one.prompt] != one.tokens]
            assert wrong == [], f"{len(wrong)} of {len(made.answered)} answers are another revision's"
            assert len({digests[one.id] for one in made.answered}) > 1
            for name in ("bot", "quiet"):
                await platform.adapters.delete(made.acme, name, undo_seconds=0)
            made.pass_time(100)
            await platform.adapters.run_maintenance()
            end = await made.pages()
            assert (end.pages_adapters, end.pages_adapters_idle, end.adapters_pinned) == (0, 0, 0)
            assert (end.pages_free, end.pages_kv_cached) == (start.pages_free, start.pages_kv_cached)
            assert platform.completions.counters.requests["failed"] == 0
            return made

    made = asyncio.run(run())
    assert list(Path(settings.records.blobs).rglob("*.safetensors")) == []
    return made


async def learn(made: Churn) -> dict[tuple[str, str], tuple[int, ...]]:
    """Answers of each content to each prompt without other traffic."""
    quiet = {}
    for folder in made.folders:
        await made.upload("quiet", folder)
        info = await made.platform.adapters.queries.get(made.acme, "quiet")
        for prompt in PROMPTS:
            quiet[info.digest, prompt] = (await made.ask("acme/quiet", prompt)).tokens
    digests = {digest for digest, _ in quiet}
    assert len({tuple(quiet[digest, prompt] for prompt in PROMPTS) for digest in digests}) == len(made.folders)
    return quiet


@pytest.fixture
def settings(base_dir: Path, tmp_path: Path) -> Settings:
    return msgspec.structs.replace(
        make_settings(base_dir, tmp_path),
        engine=EngineSettings(in_process=True, num_threads=1, pool_bytes=1 << 20, max_num_batched_tokens=256),
        adapters=AdapterLimits(pinned_pool_share=0.5),
    )


@pytest.fixture(scope="session")
def folders(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base_dir, root / str(seed), rank=2 + seed, seed=seed) for seed in range(6)]


def test_answers_stay_exact_while_adapters_change(settings: Settings, folders: list[Path], tmp_path: Path) -> None:
    made = churn(settings, folders[:3], tmp_path, clients=6, changes=12)
    assert len(made.answered) > 10


@pytest.mark.slow
def test_answers_stay_exact_with_64_clients_and_200_changes(
    settings: Settings, folders: list[Path], tmp_path: Path
) -> None:
    made = churn(settings, folders, tmp_path, clients=64, changes=200)
    print(f"{len(made.answered)} answers, each its revision's; changes: {dict(made.changes)}")
    assert sum(made.changes.values()) == 200
