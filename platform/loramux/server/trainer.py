"""The composition of a trainer: the database, the store, and the bases whose weights are on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from loramux.common.settings.file import Settings, SettingsError
from loramux.data.records.bases import BaseRepository
from loramux.data.records.database import Database
from loramux.server.records import StartWait, open_database, open_store
from loramux.serving.known_bases import KnownBase, known_bases
from loramux.training.examples import ExampleFormat
from loramux.training.share import ComputeShare
from loramux.training.trainer import Trainer, TrainerParts

CARDS = Path("/dev/nvidiactl")
CONTEXT = 1 << 20
"""The context that bounds a line of a training file. The server has checked its lines against its own."""


@asynccontextmanager
async def open_trainer(
    settings: Settings, example_format: Callable[[int], ExampleFormat], notes: int | None = None
) -> AsyncIterator[Trainer]:
    """Run jobs while the block runs. `notes`: the file descriptor of a server's notes (`ComputeShare`).

    Raises RecordsError, SettingsError.
    """
    _ensure_able(settings)
    async with AsyncExitStack() as stack:
        wait = StartWait(settings.records)
        database = await stack.enter_async_context(open_database(settings, wait))
        blobs = open_store(settings.records)
        stack.callback(blobs.close)
        share = ComputeShare(settings.training.share)
        await stack.enter_async_context(share.enforced(notes))
        bases = partial(local_bases, settings, database)
        parts = TrainerParts(database, blobs, bases, example_format(CONTEXT), settings.training, share)
        trainer = Trainer(parts)
        await wait(lambda: stack.enter_async_context(trainer.alive()))
        yield trainer


def _ensure_able(settings: Settings) -> None:
    """Raise SettingsError if this machine lacks what a trainer needs."""
    if find_spec("trl") is None:
        raise SettingsError("a trainer needs the extra: pip install 'loramux[training]'")
    if settings.training.device == "cuda" and not CARDS.exists():
        raise SettingsError(f"training.device is 'cuda', and this machine has no NVIDIA card ({CARDS})")


async def local_bases(settings: Settings, database: Database) -> dict[str, Path]:
    """Return the folders of the bases whose weights are on this machine, by the bases' names."""
    async with database.read() as session:
        known = known_bases(settings, await BaseRepository(session).all())
    return await asyncio.to_thread(_folders, known.values())


def _folders(known: Iterable[KnownBase]) -> dict[str, Path]:
    folders = {base.name: Path(base.settings.path).absolute() for base in known if not base.is_retired}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}
