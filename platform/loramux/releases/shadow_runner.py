"""Shadows of one server: repeated requests, which wait in memory and run on a candidate revision when the server has
free capacity.

A shadow must not slow the requests of callers. Therefore

- a shadow begins only after its request has ended, and only while no other request waits for its first token;
- one shadow runs at the same time as other requests, or `IN_FLIGHT` shadows on an idle engine, all in class `batch`;
- the number and the tokens of waiting shadows are limited, for each tenant and in total. Shadows above the limits are
  dropped and counted. Waiting shadows are not stored, so a server that stops drops them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from loramux.batches.files import SHADOW_OUTPUT, Files
from loramux.catalog.registry.errors import ModelNotFound
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.units import DAY, QUIET_SECONDS
from loramux.constraints.formats import AnswerFormat
from loramux.data.records.comparisons import RunningShadow, ShadowRepository
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.requests import SHADOW
from loramux.data.storage.blobs import BlobStore
from loramux.data.storage.errors import StorageError
from loramux.releases.likeness import ChoiceAnswer, compare_answers, join_answer, sums_of
from loramux.serving.errors import Draining
from loramux.serving.generation import Generation
from loramux.serving.messages import Delta, GenerationRequest
from loramux.serving.service import CompletionService

Dropped = Literal["queue_full", "too_old", "day_limit", "stopped"]

IN_FLIGHT, IN_FLIGHT_BESIDE_OTHERS = 4, 1
MAX_WAITING, MAX_WAITING_PER_TENANT = 1000, 50
MAX_TOKENS, MAX_TOKENS_PER_TENANT = 4_000_000, 200_000
"""Tokens that the requests that wait may use, prompt and answer."""
MAX_NUMBER_BYTES, MAX_NUMBER_BYTES_PER_TENANT = 64 << 20, 8 << 20
"""Maximum bytes of the vectors and classes that wait to be compared."""
MAX_WAIT_SECONDS = 600.0
LOOK_SECONDS = 0.2
"""Maximum seconds until waiting shadows notice that other requests have ended."""
MAX_KEPT_BYTES, MAX_KEPT_BYTES_OF_ALL = 4 << 20, 64 << 20
"""Maximum bytes of outputs that wait for their file: of one file, and of all files. Further outputs are dropped."""

DROPPED: tuple[Dropped, ...] = ("queue_full", "too_old", "day_limit", "stopped")
"""Reasons why a shadow did not run: too many shadows wait, it waited too long, the day's tokens are used up, the server
was stopped, or the comparison had ended.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ShadowTask:
    """A request that has been answered, and waits to run again on a candidate."""

    shadow: RunningShadow
    principal: Principal
    request: GenerationRequest
    """The request in the form that runs on the candidate."""
    request_id: str
    model: str
    """The revision that answered."""
    base_model: str
    answer: Sequence[Delta]
    tokens: int
    """Maximum number of tokens that the shadow may use."""
    queued_at: float

    @property
    def number_bytes(self) -> int:
        """Bytes of the answer's vectors and classes."""
        return sum(len(delta.pooled) for delta in self.answer)

    @property
    def format(self) -> AnswerFormat | None:
        """The format that the answer must have."""
        return None if self.request.format is None else self.request.format.format


def shadow_request(asked: GenerationRequest, candidate: str) -> GenerationRequest:
    """Return the request that repeats `asked` on the candidate: the same prompt, choices, format, stops and seed."""
    return replace(
        asked,
        kind="shadow-",
        model=candidate,
        is_streamed=False,
        sampling=msgspec.structs.replace(asked.sampling, logprobs=None, prompt_logprobs=None),
        echo=False,
        claim=None,
        deadline_ms=None,
        user=None,
        service_tier=SHADOW,
    )


class ShadowQueue:
    """Tasks that wait, each tenant's in order; tenants take turns."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[ShadowTask]] = {}
        self._tokens: Counter[str] = Counter()
        self._number_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, task: ShadowTask) -> ShadowTask | None:
        """Queue a task. If the queue is full, return the dropped task: this task, or the newest task of the largest
        tenant, with numbers if these are too many.
        """
        tenant = task.principal.tenant
        mine = self._waiting.get(tenant, ())
        if (
            len(mine) >= MAX_WAITING_PER_TENANT
            or self._tokens[tenant] + task.tokens > MAX_TOKENS_PER_TENANT
            or self._number_bytes[tenant] + task.number_bytes > MAX_NUMBER_BYTES_PER_TENANT
        ):
            return task
        self._waiting.setdefault(tenant, deque()).append(task)
        self._tokens[tenant] += task.tokens
        self._number_bytes[tenant] += task.number_bytes
        if self._number_bytes.total() > MAX_NUMBER_BYTES:
            largest = max(self._waiting, key=lambda one: self._number_bytes[one])
            theirs = self._waiting[largest]
            newest = max(place for place, one in enumerate(theirs) if one.number_bytes)
            dropped = theirs[newest]
            del theirs[newest]
            return self._removed(largest, dropped)
        if len(self) <= MAX_WAITING and self._tokens.total() <= MAX_TOKENS:
            return None
        largest = max(self._waiting, key=lambda one: self._tokens[one])
        return self._removed(largest, self._waiting[largest].pop())

    def take(self) -> ShadowTask | None:
        """Remove and return the next task; the tenant's next task comes after the tasks of all other tenants."""
        if not self._waiting:
            return None
        tenant, waiting = next(iter(self._waiting.items()))
        del self._waiting[tenant]
        self._waiting[tenant] = waiting
        return self._removed(tenant, waiting.popleft())

    def _removed(self, tenant: str, task: ShadowTask) -> ShadowTask:
        self._tokens[tenant] -= task.tokens
        self._number_bytes[tenant] -= task.number_bytes
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._tokens[tenant], self._number_bytes[tenant]
        return task


class ShadowRunner:
    """Runs the shadows of this server, and adds up their results."""

    def __init__(self, database: Database, blobs: BlobStore, completions: CompletionService, files: Files) -> None:
        self._database = database
        self._completions = completions
        self._blobs = blobs
        self._files = files
        self._queue = ShadowQueue()
        self._arrived = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._starting: set[ShadowTask] = set()
        """Tasks that have no first token yet."""
        self._sums: Counter[tuple[str, str]] = Counter()
        self._outputs = KeptOutputs()

    @property
    def is_idle(self) -> bool:
        """Does nothing wait or run?"""
        return not (self._running or self._queue)

    def submit(self, task: ShadowTask) -> None:
        """Queue a task, or drop one."""
        if (dropped := self._queue.put(task)) is not None:
            self._drop(dropped, "queue_full")
        self._arrived.set()

    async def run(self) -> None:
        """Run tasks for ever, each when there is room."""
        while True:
            await self._arrived.wait()
            if not self._queue:
                self._arrived.clear()
            elif self._may_begin() and (task := self._queue.take()) is not None:
                self._starting.add(task)
                running = asyncio.create_task(self._repeat(task), name=f"shadow of {task.request_id}")
                self._running.add(running)
                running.add_done_callback(self._running.discard)
            elif self._running:
                await asyncio.wait(self._running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(LOOK_SECONDS)

    async def stop(self) -> None:
        """End running shadows, drop waiting shadows, and write the last sums."""
        for running in tuple(self._running):
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while (task := self._queue.take()) is not None:
            self._drop(task, "stopped")
        await self.flush()

    async def flush(self) -> None:
        """Write sums and outputs; sums are kept if the database does not accept them."""
        sums, self._sums = self._sums, Counter()
        try:
            if sums:
                async with self._database.begin() as session:
                    await ShadowRepository(session).add_sums(sums)
            for (shadow_id, *_), kept in self._outputs.take().items():
                await self._store(shadow_id, kept)
        except RecordsUnavailable:
            self._sums.update(sums)
            raise

    def _may_begin(self) -> bool:
        if self._completions.draining or self._completions.others_waiting() or self._starting:
            return False
        is_quiet = self._completions.quiet_seconds() >= QUIET_SECONDS
        return len(self._running) < (IN_FLIGHT if is_quiet else IN_FLIGHT_BESIDE_OTHERS)

    async def _repeat(self, task: ShadowTask) -> None:
        """Run one task, and count its result in all cases."""
        try:
            if time.monotonic() - task.queued_at > MAX_WAIT_SECONDS:
                self._drop(task, "too_old")
            else:
                await self._run_within_day(task)
        except asyncio.CancelledError:
            self._drop(task, "stopped")
            raise
        except (Draining, ModelNotFound):
            self._drop(task, "stopped")
        except LoramuxError as error:
            logger.info("the shadow of %s failed: %s", task.request_id, error.code)
            self._add(task, {"failed": 1})
        except Exception:
            logger.exception("the shadow of %s failed", task.request_id)
            self._add(task, {"failed": 1})
        finally:
            self._starting.discard(task)

    async def _run_within_day(self, task: ShadowTask) -> None:
        """Run a task with tokens of the day's limit, and give back unused tokens."""
        id, day = task.shadow.shadow.id, self._database.now() // DAY
        async with self._database.begin() as session:
            refusal = await ShadowRepository(session).reserve(id, task.tokens, day)
        if refusal is not None:
            self._drop(task, refusal)
            return
        used = 0
        try:
            answer = await self._completions.begin(task.principal, task.request)
            assert isinstance(answer, Generation), "a shadow has no idempotency key"
            try:
                await answer.started()
                self._starting.discard(task)
                deltas = [delta async for delta in answer]
            finally:
                answer.abandon()
                used = answer.usage.prompt + answer.usage.output
            await self._compare(task, answer, deltas)
        finally:
            async with self._database.begin() as session:
                await ShadowRepository(session).give_back(id, task.tokens - used, day)

    async def _compare(self, task: ShadowTask, answer: Generation, deltas: Sequence[Delta]) -> None:
        sums, line = await self._files.threads.run(task.principal.tenant, _compared, task, answer, deltas)
        self._add(task, sums)
        if line is not None and not self._outputs.add(task, line):
            self._add(task, {"outputs_dropped": 1})

    async def _store(self, shadow_id: str, kept: OutputsOfCaller) -> None:
        """Write outputs into a file of the caller, with the caller's retention and quota."""
        content = b"".join(kept.lines)
        try:
            with self._blobs.staging() as folder:
                path = folder / "outputs"
                await self._files.threads.run(kept.principal.tenant, path.write_bytes, content)
                name = f"{shadow_id}.jsonl"
                await self._files.store(kept.principal, path, len(content), filename=name, purpose=SHADOW_OUTPUT)
        except RecordsUnavailable:
            raise
        except (LoramuxError, StorageError) as error:
            logger.warning("%d outputs of %s are not kept: %s", len(kept.lines), shadow_id, error)
            self._sums[shadow_id, "outputs_dropped"] += len(kept.lines)

    def _drop(self, task: ShadowTask, reason: Dropped) -> None:
        self._add(task, {f"dropped.{reason}": 1})

    def _add(self, task: ShadowTask, sums: Mapping[str, int]) -> None:
        for name, value in sums.items():
            self._sums[task.shadow.shadow.id, name] += value


@dataclass(slots=True)
class OutputsOfCaller:
    """Lines that go into one file."""

    principal: Principal
    lines: list[bytes]
    size: int = 0


class KeptOutputs:
    """Outputs that wait in memory for their files. There is one file per shadow, project and owner."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, tuple[str, ...]], OutputsOfCaller] = {}
        self._size = 0

    def add(self, task: ShadowTask, line: bytes) -> bool:
        """Keep a line. Return False if there is no memory for it before the next write."""
        caller = task.principal
        key = (task.shadow.shadow.id, caller.project, caller.lineage)
        kept = self._kept.setdefault(key, OutputsOfCaller(caller, []))
        if kept.size + len(line) > MAX_KEPT_BYTES or self._size + len(line) > MAX_KEPT_BYTES_OF_ALL:
            return False
        kept.lines.append(line)
        kept.size += len(line)
        self._size += len(line)
        return True

    def take(self) -> dict[tuple[str, str, tuple[str, ...]], OutputsOfCaller]:
        """Remove and return all waiting outputs."""
        kept, self._kept, self._size = self._kept, {}, 0
        return {key: one for key, one in kept.items() if one.lines}


def _compared(task: ShadowTask, answer: Generation, deltas: Sequence[Delta]) -> tuple[dict[str, int], bytes | None]:
    """Return the additions of a comparison to the sums, and its line in the file that the tenant keeps."""
    current, candidate = join_answer(task.answer), join_answer(deltas)
    billed = num_tokens(current)
    same_tokens = task.base_model == answer.base_model
    are_classes = answer.classes.count > 0
    observations = compare_answers(current, candidate, task.format, same_tokens=same_tokens, are_classes=are_classes)
    sums = {
        "compared": 1,
        "current_tokens": billed,
        "candidate_tokens": num_tokens(candidate),
    }
    if not task.shadow.shadow.keep_outputs or task.principal.zero_retention:
        return sums | sums_of(observations), None
    readable, cut = within_tokens(deltas, billed)
    line = _output_line(task, answer, current, readable, cut, observations)
    return sums | sums_of(observations), line


def within_tokens(deltas: Sequence[Delta], limit: int) -> tuple[list[ChoiceAnswer], frozenset[int]]:
    """Return the answer's choices after `limit` tokens, and the numbers of the choices that are cut.

    A shadow is not billed, so its tenant may read only as many tokens as were billed for the original request. A
    delta's text belongs to its own tokens or to tokens of earlier deltas, so the remaining deltas contain no text of
    removed tokens.
    """
    kept, left = [], limit
    cut: set[int] = set()
    for delta in deltas:
        if len(delta.token_ids) > left:
            cut.add(delta.index)
        if delta.index not in cut:
            kept.append(delta)
            left -= len(delta.token_ids)
    begun = [Delta(index=index) for index in sorted(cut)]  # a choice without a token is there all the same
    return join_answer([*begun, *kept]), frozenset(cut)


def num_tokens(choices: Sequence[ChoiceAnswer]) -> int:
    """Return the number of tokens of all choices together."""
    return sum(len(one.token_ids) for one in choices)


def _output_line(
    task: ShadowTask,
    answer: Generation,
    current: Sequence[ChoiceAnswer],
    candidate: Sequence[ChoiceAnswer],
    cut: Set[int],
    observations: Mapping[str, float],
) -> bytes:
    """Return a line of a file of outputs: both answers, the readable part of the candidate's answer, and the
    similarity.

    `cut` has the numbers of the candidate's choices that were cut.
    """
    shown = [_choice_object(one) for one in candidate]
    for number in cut:
        shown[number]["truncated"] = True
    line = {
        "request_id": task.request_id,
        "model": task.model,
        "candidate": answer.model,
        "current_choices": [_choice_object(one) for one in current],
        "candidate_choices": shown,
        "measures": observations,
    }
    return msgspec.json.encode(line) + b"\n"


def _choice_object(choice: ChoiceAnswer) -> dict[str, object]:
    found: dict[str, object] = {"text": choice.text, "finish_reason": choice.finish_reason}
    if choice.thought:
        found["reasoning"] = choice.thought
    if choice.calls:
        found["tool_calls"] = [{"name": name, "arguments": arguments} for name, arguments in choice.calls]
    if choice.numbers:
        found["numbers"] = np.frombuffer(choice.numbers, dtype="<f4").tolist()
    return found
