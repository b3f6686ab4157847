"""The depth of a request: files on the path of a streamed chat request, and files between a step and a kernel.

The bounds are a ratchet: they may go down. A failure lists the files; `pytest -s` prints the figures.

A profile function on every thread of a real server, whose engine is one of them, sees each call of a Python function.
What it counts between a request's arrival and its last event, which follows the settlement in the ledger:

- *Files.* Those of the product with a function that ran. An import is no such function.
- *Queues and tasks.* Constructions of `asyncio.Queue` and calls of `BaseEventLoop.create_task` by product code: the
  caller nearest to the call, asyncio's own functions left out, is a file of the product. A task counts as between the
  engine and the writer of the events if it has not ended when the engine reports the last token.
- *Wake-ups.* Calls of `call_soon_threadsafe` by the engine's code.
- *Stack.* The product's files on the Python stack, from `Engine.step()` down, at each call of a function of the
  kernels' package in a step that decodes. The function that calls a native operator, or torch if there is no compiler,
  is the last of them. A floor is a folder that the stack enters on its way down, each time that it does.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import msgspec
import pytest
from operated_server import PATIENCE, make_keys, make_settings
from peft_uploads import form, make_adapter
from running_server import running

from loramux.common import jobs
from loramux.engine.engine import Engine
from loramux_api.app import create_app
from loramux_kernels.tables import Segments

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("kernels", "adapters", "platform", "api", "client"))
KERNELS = f"{ROOT / 'kernels'}/"
ENGINE_SIDE = ("platform/loramux/engine/", "adapters/", "kernels/")
ASYNCIO = str(Path(asyncio.__file__).parent)

QUEUE = asyncio.Queue.__init__.__code__
TASK = asyncio.BaseEventLoop.create_task.__code__
WAKE = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
STEP = Engine.step.__code__

MAX_FILES = 45
MAX_STEP_FILES = 12
MAX_STEP_FLOORS = 9
NUM_TOKENS = 16
NUM_REQUESTS = 3


def product_file(code: CodeType) -> str | None:
    """Return the path of a function's file in the repository; None: it is not of the product, or it is an import."""
    if code.co_name == "<module>" or not code.co_filename.startswith(PRODUCT):
        return None
    return str(Path(code.co_filename).relative_to(ROOT))


@dataclass(repr=False)
class Record:
    """Calls during one request."""

    codes: set[CodeType] = field(default_factory=set)
    queues: Counter[str] = field(default_factory=Counter)
    """Queues by the file that made them."""
    tasks: list[tuple[str, asyncio.Task[Any]]] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    """Tasks that had not ended at the engine's latest report."""
    wakes: int = 0
    stacks: set[tuple[str, ...]] = field(default_factory=set)
    """Files, outermost first, one for each change of the file."""

    @property
    def files(self) -> set[str]:
        return {file for code in self.codes if (file := product_file(code))}


class Profile:
    """The profile function of every thread; it costs little while no request is recorded."""

    def __init__(self) -> None:
        self.record: Record | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if (record := self.record) is None:
            return
        code = frame.f_code
        if event == "call":
            record.codes.add(code)
            if code is QUEUE and (maker := maker_of(frame)):
                record.queues[maker] += 1
            elif code is WAKE and (maker := maker_of(frame)) and maker.startswith(ENGINE_SIDE):
                record.wakes += 1
                record.running = Counter(maker for maker, task in tuple(record.tasks) if not task.done())
            elif record.wakes and code.co_filename.startswith(KERNELS) and (stack := stack_of(frame)):
                record.stacks.add(stack)
        elif event == "return" and code is TASK and isinstance(argument, asyncio.Task) and (maker := maker_of(frame)):
            record.tasks.append((maker, argument))


def maker_of(frame: FrameType) -> str | None:
    """Return the product's file from which asyncio was called; None: another library called it."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith(ASYNCIO):
        caller = caller.f_back
    return None if caller is None else product_file(caller.f_code)


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the files from Engine.step() to this frame; none outside a step."""
    files: list[str] = []
    while frame is not None:
        if file := product_file(frame.f_code):
            files.append(file)
        if frame.f_code is STEP:
            return tuple(file for file, _ in groupby(reversed(files)))
        frame = frame.f_back
    return ()


@dataclass(frozen=True)
class Site:
    """A server with an adapter, and its customer."""

    http: httpx.Client
    profile: Profile

    def ask(self, choices: int = 1) -> None:
        """Stream an answer to its end."""
        body = {
            "model": "acme/one",
            "messages": [{"role": "user", "content": "How deep is it?"}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "n": choices,
            "stream": True,
        }
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons.count("length") == choices

    def record(self, choices: int = 1) -> Record:
        """Record one answer."""
        self.profile.record = record = Record()
        try:
            self.ask(choices)
        finally:
            self.profile.record = None
        return record


async def run_once(_: float, act: Callable[[], Awaitable[object]]) -> None:
    """Run a periodic job at the server's start only.

    Maintenance, statistics and deliveries are no part of a request, and on a slow machine one that is due each second
    runs during every request. All of them are repeated by `common.jobs._repeat`, in whose place this stands.
    """
    await act()


@pytest.fixture(scope="module")
def site(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server whose threads are profiled, warm: the first requests load the adapter and compile the operators."""
    folder = tmp_path_factory.mktemp("site")
    settings = make_settings(base_dir, folder)
    engine = msgspec.structs.replace(settings.engine, in_process=True)
    bases = tuple(msgspec.structs.replace(base, engine=engine) for base in settings.bases)
    settings = msgspec.structs.replace(settings, engine=engine, bases=bases)
    key, _ = make_keys(settings)
    adapter = make_adapter(base_dir, folder / "adapter")
    profile, before = Profile(), threading.getprofile()
    threading.setprofile(profile)  # for threads that start from now on: the server's
    patch = pytest.MonkeyPatch()
    patch.setattr(jobs, "_repeat", run_once)
    try:
        with running(create_app(settings), "granian") as server:
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE) as http:
                assert http.post("/v1/adapters", **form(adapter, "one")).status_code == 201
                site = Site(http, profile)
                for choices in (1, 3, 1):
                    site.ask(choices)
                yield site
    finally:
        threading.setprofile(before)
        patch.undo()


@pytest.fixture(scope="module")
def records(site: Site) -> list[Record]:
    """Several requests of one kind: what did not run in all of them is not counted.

    A file of the request's path runs in each. Other work of the server, such as writing every ten seconds when keys
    were last used, runs during some of them. Periodic jobs do not run: see `run_once`.
    """
    made = []
    for _ in range(NUM_REQUESTS):
        made.append(site.record())
        threading.Event().wait(0.17)
    return made


def test_streamed_chat_crosses_few_files_outside_the_engine(records: list[Record]) -> None:
    files = sorted(set.intersection(*(record.files for record in records)))
    outside = [file for file in files if not file.startswith(ENGINE_SIDE)]
    print(f"\nfiles of a streamed chat request: {len(outside)} outside the engine, {len(files) - len(outside)} in it")
    for file in ("api/loramux_api/controllers/chat.py", "platform/loramux/data/records/ledger.py"):
        assert file in outside, "the request was not recorded from its controller to its settlement"
    assert len(outside) <= MAX_FILES, bound(outside, MAX_FILES)


@pytest.mark.parametrize("choices", [1, 3])
def test_no_queue_and_one_task_are_between_engine_and_writer(site: Site, choices: int) -> None:
    record = site.record(choices)
    queues, running, made = record.queues, record.running, Counter(maker for maker, _ in record.tasks)
    print(f"\n{choices} choices: queues {dict(queues)}, tasks {dict(running)} of all tasks {dict(made)}")
    assert not queues, f"queues by the file that made them: {dict(queues)}"
    assert running.total() == 1, f"tasks by the file that made them: {dict(running)}"


def test_a_streamed_token_wakes_the_event_loop_once(records: list[Record]) -> None:
    wakes = [record.wakes for record in records]
    print(f"\nwake-ups of the event loop by the engine, for {NUM_TOKENS} tokens: {wakes}")
    assert min(wakes) <= NUM_TOKENS + 1, f"{wakes} wake-ups for {NUM_TOKENS} tokens"  # one may bring statistics


def test_step_reaches_kernel_through_few_files_and_floors(records: list[Record]) -> None:
    stacks = set().union(*(record.stacks for record in records))
    reached = {Path(stack[-1]).stem for stack in stacks}
    assert reached & {"decoder_layer", "lora"}, f"no layer was computed: {reached}"  # in one call, or by its modules
    # Both ask for it before they compute adapters, and for nothing else.
    assert all(Segments.max_rank.__code__ in record.codes for record in records), "no adapter was computed"
    files = max((sorted(set(stack), key=stack.index) for stack in stacks), key=len)
    floors = max((floors_of(stack) for stack in stacks), key=len)
    print(f"\nfrom Engine.step() to a kernel: {len(files)} files, {len(floors)} floors")
    assert len(files) <= MAX_STEP_FILES, bound(files, MAX_STEP_FILES)
    assert len(floors) <= MAX_STEP_FLOORS, bound(floors, MAX_STEP_FLOORS)


def floors_of(stack: tuple[str, ...]) -> list[str]:
    """Return the folders that a stack enters, in order."""
    return [folder for folder, _ in groupby(str(Path(file).parent) for file in stack)]


def bound(found: list[str], limit: int) -> str:
    """Say what is beyond a limit."""
    return f"{len(found)} where {limit} are allowed:\n" + "\n".join(found)
