"""Base models of a running server: the bases of its settings file and the bases that operators added, without retired
bases.

The rows of `records.bases` and the settings file together define the wanted bases (`known_bases`). `reconcile` compares
them with the bases that this server has loaded. `reconcile` runs every few seconds, and after each change on this
server. So all servers of one database soon serve the same bases, even after a restart:

    wanted and not loaded ──> loading ──> serving          its engines are started; all other bases stay served
                                 └──────> failed           the reason is listed; it is tried again after a pause
    retired and loaded ─────> draining ──> retired         no new request; running ones end, then its engines stop

If a base of the settings file does not load, the server does not start. A base that was added later does not prevent
the start.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from loramux.accounts.tenants.entities import Changes
from loramux.catalog.registry.resolver import AbsentBase, BaseModel, BaseModels
from loramux.catalog.validation.jobs import RetiredBase
from loramux.catalog.validation.task_files import bundle_of_base
from loramux.catalog.validation.validator import BaseValidators, Validator
from loramux.common.bundle import Bundle, SamplingDefaults
from loramux.common.errors import LoramuxError
from loramux.common.sentence_files import BundleRejected
from loramux.common.settings.file import Settings, SettingsError
from loramux.common.settings.serving import BaseSettings
from loramux.data.records.bases import BaseRecord, BaseRepository, BaseUpgradeRepository
from loramux.data.records.database import Database
from loramux.engine.client import EngineDied
from loramux.fleet.group import EngineGroup
from loramux.fleet.launching import launcher_of
from loramux.fleet.member import LaunchEngine
from loramux.serving.bases import ServedBase, ServedBases
from loramux.serving.engine_questions import EngineQuestions
from loramux.serving.errors import BaseConflict, InvalidBase
from loramux.serving.formats import GrammarTrials
from loramux.serving.images import ImageFormat
from loramux.serving.known_bases import (
    KnownBase,
    check_base,
    complete,
    ensure_unambiguous,
    ensure_unused,
    known_bases,
    named,
    row_of,
)
from loramux.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from loramux_adapters.base import BaseDescription

RECONCILE_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Shortest and longest pause between a failed load and the next one, in seconds."""
BaseState = Literal["loading", "serving", "failed", "draining", "retired"]
Drain = Callable[[ServedBase, float], Awaitable[None]]
"""Waits until no request of the base runs, and ends requests that still run after the given seconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base with its engines."""

    settings: BaseSettings
    served: ServedBase
    model: BaseModel
    validator: Validator
    stack: AsyncExitStack
    """Stops the engines, and closes the other resources of the base."""


@dataclass(slots=True)
class Failure:
    """Consecutive failed loads of a base."""

    message: str
    count: int
    retry_at: float
    """Time of the next try, by the event loop's clock."""


class BaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one base on this server, which operators see."""

    base_model: str
    path: str
    state: BaseState
    problem: str | None
    """Reason why the base did not load."""
    is_added: bool
    engines_ready: int
    engines_min: int
    engines_max: int
    seconds: float
    """Seconds since this state began; 0 if that is not known."""
    retired_at: int | None
    successor: str | None


class BaseHealth(msgspec.Struct, frozen=True, kw_only=True):
    """State of one base on this server, which load balancers and monitors read."""

    base_model: str
    state: BaseState | Literal["engine_down"]
    """State of the base. `serving`: a request would be answered. `engine_down`: its engines are being started again."""
    engines_ready: int


class BaseLifecycle:
    """Loads and unloads the bases of one server. Other parts read `serving` and `engines`; only this class changes
    them.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        questions: EngineQuestions,
        launch: LaunchEngine | None = None,
        prefix_key: bytes | None = None,
    ) -> None:
        """`launch` makes each engine; if it is None, the settings decide. `prefix_key` is that of `EngineGroup`."""
        self.serving = ServedBases()
        self.engines: dict[str, EngineGroup] = {}
        self.models = BaseModels()
        self.validators = BaseValidators(settings, {})
        self._settings = settings
        self._database = database
        self._questions = questions
        self._launch = launch
        self._prefix_key = prefix_key
        self._drain: Drain | None = None
        self._known: dict[str, KnownBase] = {}
        self._loaded: dict[str, LoadedBase] = {}
        self._groups: dict[str, EngineGroup] = {}
        """Engines that are being started or stopped."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Loads and unloads that run now, by base."""
        self._failures: dict[str, Failure] = {}
        self._since: dict[str, float] = {}
        self._lock = asyncio.Lock()
        self._describing = asyncio.Lock()
        """Held while a base is described: the first time imports transformers, which two threads cannot do at the same
        time.
        """

    # the life of the server

    async def start(self) -> None:
        """Load the wanted bases together. Returns when each serves or has failed.

        Raises the error of a base of the settings file, and EngineDied if no base serves.
        """
        await self._read()
        wanted = [known for known in self._known.values() if not known.is_retired]
        loads = [asyncio.create_task(self._load_at_start(known)) for known in wanted]
        try:
            loaded = await asyncio.gather(*loads)
        except BaseException:
            await asyncio.gather(*(group.stop() for group in self._groups.values()))
            for outcome in await asyncio.gather(*loads, return_exceptions=True):
                if isinstance(outcome, LoadedBase):
                    await outcome.stack.aclose()
            raise
        for one in loaded:
            if one is not None:
                self._serve(one)
        self._note_absent()
        if not self.serving:
            problems = [failure.message for failure in self._failures.values()]
            raise EngineDied("no base model serves: " + ("; ".join(problems) or "all of them are retired"))

    def drain_with(self, drain: Drain) -> None:
        """Set the function that ends the requests of a base before its engines stop."""
        self._drain = drain

    async def close(self) -> None:
        """Stop every engine."""
        async with self._lock:
            for name, task in self._tasks.items():
                if name not in self._groups and name not in self.serving:  # a load that has not started engines yet
                    task.cancel()
            await asyncio.gather(*(group.stop() for group in self._groups.values()))
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self.validators.close()
            await asyncio.gather(*(loaded.stack.aclose() for loaded in self._loaded.values()))

    async def reconcile(self) -> None:
        """Begin to load and unload bases until this server has exactly the wanted bases."""
        async with self._lock:
            await self._read()
            for name, loaded in list(self._loaded.items()):
                known = self._known.get(name)
                if known is None or known.is_retired or known.settings != loaded.settings:
                    self._begin_unload(loaded, self._settings.server.drain_seconds)
                elif loaded.served.engines.has_ended and self._is_reloaded(known):
                    self._note_failure(name, await loaded.served.engines.wait_end())
                    self._begin_unload(loaded, 0.0)
            for name, known in self._known.items():
                if not known.is_retired and name not in self._loaded and name not in self._tasks and self._is_due(name):
                    self._begin(name, partial(self._load_and_serve, known))
            self._note_absent()

    # changes by operators

    async def add(self, changes: Changes, table: dict[str, Any]) -> BaseStatus:
        """Add a base, or serve a retired base again. The base's engines are started in the background.

        `table` has the form of a table of `[[bases]]`. Raises InvalidBase, BaseConflict.
        """
        try:
            base = complete(table, self._settings)
        except msgspec.ValidationError as error:
            raise InvalidBase(str(error), "engine") from None
        await check_base(base, self._settings)
        async with changes.begin() as change:
            repository = BaseRepository(change.session)
            known = known_bases(self._settings, await repository.lock())
            before = known.get(base.name)
            if before is None and await repository.has_adapter(base.name):
                raise BaseConflict("base_exists", f"{base.name!r} is an adapter's name; choose another", "name")
            if before is not None and not before.is_retired and before.settings != base:
                raise BaseConflict(
                    "base_exists",
                    f"there is a base model {base.name!r} already, with other settings; retire it first, or choose "
                    "another name",
                    "name",
                )
            ensure_unambiguous(base, known.values())
            if before is None or before.is_retired:
                row = row_of(table, before, change.now)
                await repository.put(row)
                await change.note("base.add", base.name, tenant=None, after=row)
        self._failures.pop(base.name, None)
        await self.reconcile()
        return self.status(base.name)

    async def retire(
        self, changes: Changes, name: str, successor: str | None = None, *, force: bool = False
    ) -> BaseStatus:
        """Refuse new uploads and requests for a base, and stop its engines when no request runs.

        Without `force`, no alias may point at an adapter of the base. Raises UnknownBase, BaseConflict, InvalidBase.
        """
        async with changes.begin() as change:
            repository = BaseRepository(change.session)
            known = known_bases(self._settings, await repository.lock())
            base = named(known, name)
            others = [other.name for other in known.values() if other.name != name and not other.is_retired]
            if not base.is_retired:
                if not others:
                    raise BaseConflict("last_base", f"{name!r} is the only base model; add another one first", "name")
                if not force:
                    await ensure_unused(repository, base)
            if successor is not None and successor not in others:
                raise InvalidBase(f"successor is one of {', '.join(others)}; got {successor[:80]!r}", "successor")
            if successor is None:
                target = await BaseUpgradeRepository(change.session).target_of(name)
                successor = target if target in others else None
            row = next((row for row in await repository.all() if row.name == name), None)
            row = row or BaseRecord(name=name, changed_at=change.now)
            retired = msgspec.structs.replace(
                row,
                successor=successor or row.successor,
                retired_at=row.retired_at or change.now,
                changed_at=change.now,
            )
            await repository.put(retired)
            await change.note("base.retire", name, tenant=None, before=row, after=retired)
        await self.reconcile()
        return self.status(name)

    # descriptions

    def statuses(self) -> list[BaseStatus]:
        """Describe every known base."""
        return [self.status(name) for name in self._known]

    def status(self, name: str) -> BaseStatus:
        """Describe a base. Raises UnknownBase."""
        known = named(self._known, name)
        group = self.engines.get(name) or self._groups.get(name)
        failure = self._failures.get(name)
        began = self._since.get(name)
        return BaseStatus(
            base_model=name,
            path=known.settings.path,
            state=self._state(known),
            problem=None if failure is None or name in self._loaded else failure.message,
            is_added=known.is_added,
            engines_ready=0 if group is None else sum(one.state.value == "ready" for one in group.statuses()),
            engines_min=known.settings.engines.min,
            engines_max=known.settings.engines.most,
            seconds=0.0 if began is None else asyncio.get_running_loop().time() - began,
            retired_at=known.retired_at,
            successor=known.successor,
        )

    @property
    def has_lost_engines(self) -> bool:
        """Return whether the server must end, because bases have no engine and will not get one.

        While another base serves, a base without engines is loaded again, unless `server.ready_when` is `all`. Bases
        that operators have added are always loaded again.
        """
        own = {base.name for base in self._settings.served_bases}
        if self._settings.server.ready_when == "all":
            return any(base.engines.has_ended for name, base in self.serving.items() if name in own)
        return all(base.engines.has_ended for base in self.serving.values())

    def health(self) -> list[BaseHealth]:
        """Describe every base that is not retired."""
        return [
            BaseHealth(
                base_model=one.base_model,
                state="engine_down" if self._is_down(one.base_model) else one.state,
                engines_ready=one.engines_ready,
            )
            for one in self.statuses()
            if one.retired_at is None
        ]

    @property
    def is_ready(self) -> bool:
        """Return whether as many bases serve as `server.ready_when` demands. Added bases that are not loaded do not
        count.
        """
        if self._settings.server.ready_when == "any":
            return any(not self._is_down(name) for name in self._loaded)
        own = {base.name for base in self._settings.served_bases if not self._known[base.name].is_retired}
        return own <= self._loaded.keys() and not any(self._is_down(name) for name in self._loaded)

    def _is_down(self, name: str) -> bool:
        """Return whether the base is loaded and none of its engines serves."""
        loaded = self._loaded.get(name)
        return loaded is not None and not loaded.served.engines.alive

    def knows(self, name: str) -> bool:
        """Return whether a base has that name, served or not."""
        return name in self._known

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names under which adapters of a base may be recorded."""
        return self._known[name].names if self.knows(name) else (name,)

    def _state(self, known: KnownBase) -> BaseState:
        if known.name in self._loaded:
            return "serving"
        if known.name in self._tasks:
            return "draining" if known.is_retired else "loading"
        if known.is_retired:
            return "retired"
        return "failed" if known.name in self._failures else "loading"

    # the wanted set

    async def _read(self) -> None:
        async with self._database.read() as session:
            self._known = known_bases(self._settings, await BaseRepository(session).all())

    def _note_absent(self) -> None:
        absent = [known for known in self._known.values() if known.name not in self._loaded]
        gone_bases = [
            AbsentBase(known.name, known.settings.former_names, known.is_retired, known.successor) for known in absent
        ]
        self.models.set_absent(gone_bases)
        self.validators.set_retired(
            RetiredBase(
                names=(*known.names, Path(known.settings.path).name),
                message=(
                    f"The adapter names the base model `{known.name}`, which is retired and takes no more adapters; "
                    f"train and upload one for {self.models.way_out(gone)}."
                ),
            )
            for known, gone in zip(absent, gone_bases, strict=True)
            if known.is_retired
        )

    # loading and unloading

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            finally:
                del self._tasks[name]
                self._since[name] = asyncio.get_running_loop().time()
                self._note_absent()

        self._since[name] = asyncio.get_running_loop().time()
        self._tasks[name] = asyncio.create_task(run(), name=f"base {name}")

    async def _load_at_start(self, known: KnownBase) -> LoadedBase | None:
        return await self._try_load(known) if known.is_added else await self._load(known.settings)

    async def _load_and_serve(self, known: KnownBase) -> None:
        loaded = await self._try_load(known)
        if loaded is not None:
            logger.info("the base model %s serves", known.name)
            self._failures.pop(known.name, None)
            self._serve(loaded)

    async def _try_load(self, known: KnownBase) -> LoadedBase | None:
        """Load an added base. A failure is noted, and everything else continues."""
        try:
            return await self._load(known.settings)
        except (EngineDied, SettingsError, LoramuxError) as error:
            self._note_failure(known.name, " ".join(str(error).split()))
        except Exception as error:
            logger.exception("the base model %s could not be loaded", known.name)
            self._note_failure(known.name, f"{type(error).__name__}: {error}")
        return None

    async def _load(self, base: BaseSettings) -> LoadedBase:
        """Start the engines of a base, and describe the base at the same time."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            alone = msgspec.structs.replace(settings, model=base.model, bases=(base,))
            bases = [known.settings for known in self._known.values() if not known.is_retired]
            launch = self._launch or launcher_of(alone)
            group = EngineGroup(base, settings.of_base(base), launch, self._prefix_key, bases)
            self._groups[base.name] = group
            stack.push_async_callback(self._stop, base.name, group)
            # transformers replaces its own module at the end of its import: a thread that imports it at the same time
            # as another thread may get a module that is not ready.
            await asyncio.to_thread(importlib.import_module, "transformers")
            (description, tokenizer, bundle), facts = await asyncio.gather(self._describe(base), group.start())
            trials = GrammarTrials(tokenizer, facts, base.json_white_space)
            stack.callback(tokenizer.close)
            stack.callback(trials.close)
            if base.generation_config == "none":
                facts = msgspec.structs.replace(facts, sampling_defaults=SamplingDefaults())
            share = base.engine.share_base_cache_between_projects
            images = ImageFormat.load(Path(base.path), tokenizer) if facts.images else None
            if images is not None:
                stack.callback(images.close)
                images.start()
            parser, former = base.tool_parser, base.former_names
            served = ServedBase(base.name, group, facts, tokenizer, trials, former, share, parser, images, bundle)
            ask = partial(self._questions.ask, group)
            validator = Validator(settings.of_base(base), description, facts.dtype, ask)
            model = BaseModel(base.name, description, base.former_names)
            del self._groups[base.name]
            return LoadedBase(base, served, model, validator, stack.pop_all())

    async def _describe(self, base: BaseSettings) -> tuple[BaseDescription, Tokenizer, Bundle]:
        async with self._describing:
            return await describe(Path(base.path))

    async def _stop(self, name: str, group: EngineGroup) -> None:
        self._groups[name] = group
        await group.stop()
        del self._groups[name]

    def _serve(self, loaded: LoadedBase) -> None:
        name = loaded.settings.name
        self._loaded[name] = loaded
        self.engines[name] = loaded.served.engines
        self.validators.put(name, loaded.validator)
        self.models.add(loaded.model)
        self.serving[name] = loaded.served

    def _begin_unload(self, loaded: LoadedBase, seconds: float) -> None:
        """Send the base no new requests from now on. Running requests of the base have `seconds` to end."""
        name = loaded.settings.name
        del self._loaded[name]
        self.models.remove(name)
        logger.info("the base model %s is drained", name)
        self._begin(name, partial(self._unload, loaded, seconds))

    async def _unload(self, loaded: LoadedBase, seconds: float) -> None:
        """Wait for the base's requests, and stop its engines."""
        name = loaded.settings.name
        if self._drain is not None:
            await self._drain(loaded.served, seconds)
        self.validators.remove(name)
        del self.engines[name], self.serving[name]
        await loaded.stack.aclose()
        logger.info("the base model %s is unloaded", name)

    def _note_failure(self, name: str, message: str) -> None:
        failure = self._failures.get(name)
        count = 1 if failure is None else failure.count + 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (count - 1))
        logger.error("the base model %s cannot be loaded, the next try is in %g s: %s", name, pause, message)
        self._failures[name] = Failure(message, count, asyncio.get_running_loop().time() + pause)

    def _is_reloaded(self, known: KnownBase) -> bool:
        """Return whether a base without engines is loaded again. Otherwise `has_lost_engines` ends the server."""
        if known.is_added or self._settings.server.ready_when == "all":
            return known.is_added
        return any(not loaded.served.engines.has_ended for loaded in self._loaded.values())

    def _is_due(self, name: str) -> bool:
        failure = self._failures.get(name)
        return failure is None or failure.retry_at <= asyncio.get_running_loop().time()


async def describe(model_dir: Path) -> tuple[BaseDescription, Tokenizer, Bundle]:
    """Describe a base, load its tokenizer, and read its task and pooling. Raises SettingsError."""
    return (
        await asyncio.to_thread(_describe_base, model_dir),
        await asyncio.to_thread(Tokenizer.load, model_dir),
        await asyncio.to_thread(_bundle_of_base, model_dir),
    )


def _bundle_of_base(model_dir: Path) -> Bundle:
    try:
        return bundle_of_base(model_dir)
    except BundleRejected as rejected:
        raise SettingsError(f"model.path: {model_dir}: {rejected.rejection.message}") from None


def _describe_base(model_dir: Path) -> BaseDescription:
    from loramux_adapters.base import describe_base
    from loramux_adapters.errors import BaseUnusable

    try:
        return describe_base(model_dir)
    except BaseUnusable as error:
        raise SettingsError(f"model.path: {error}") from None
