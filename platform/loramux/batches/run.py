"""One batch on one server. The lines of the batch are checked, answered one by one, and written into its two files.

    lines ── at most `max_in_flight` at a time ──> CompletionService.begin ──> outcomes ── in order ──> chunks ──> files

Each line has its own idempotency key, whose holder is the batch. So the transaction that bills a line also stores its
answer. If the line runs again after a crash, it gets the stored answer and is not billed again. So a run can resume: it
begins with the first line that is in no chunk, and repeats lines that were running.

Chunks are objects. One transaction writes a chunk's row and the counts, and removes the idempotency keys of the chunk's
lines. The transaction also checks that this server still holds the batch. So every line's outcome is in exactly one
chunk, and every `custom_id` is in one of the two files exactly once.

`Window` limits how many lines are in the engine at a time. A line slows other requests in two ways: they wait for its
prefill, and then its row makes every step longer. So the number of lines depends on the other requests:

    one waits for its first token        one line at a time, so that a batch progresses on a busy engine too
    some run, or have just ended         `max_in_flight_beside_others`
    none for QUIET_SECONDS               `max_in_flight`

The pause of QUIET_SECONDS is for sparse traffic. Between two questions of a conversation no request runs. If all lines
began immediately, the next question would wait for dozens of prefills. For the same reason, only a few lines may wait
for *their* first token at a time, even on an idle engine. The next request then waits only for those prefills.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.errors import InvalidKey, TenantSuspended
from loramux.accounts.tenants.tenants import Tenants
from loramux.batches.files import FOLDER, OUTPUT, Files, new_file_id, object_name
from loramux.batches.lines import (
    BadLine,
    BatchEndpoint,
    BatchEndpoints,
    BatchLine,
    Input,
    ParsedBody,
    check_lines,
    model_error,
    open_input,
    parse_body,
    read_line,
    repeated_id,
    repeated_lines,
    size_errors,
)
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import TenantSlots
from loramux.common.settings.server import BatchSettings
from loramux.common.units import DAY, QUIET_SECONDS, SECOND
from loramux.data.entities import Batch, EventDetail, IdempotencyClaim, LineError, StoredFile
from loramux.data.records.batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    BatchJobs,
    BatchRepository,
    FileRepository,
)
from loramux.data.records.database import Database
from loramux.data.records.requests import ClaimRepository
from loramux.data.records.tenants import TenantRepository
from loramux.data.records.webhooks import EventRepository
from loramux.data.storage.blobs import BlobStore
from loramux.serving.messages import Answer, Timing
from loramux.serving.service import CompletionService

CHUNK_LINES, CHUNK_BYTES = 256, 4 << 20
"""Numbers of lines and of bytes at which a chunk is written."""
CHUNK_SECONDS = 2.0
"""The longest time in seconds until an outcome is in a chunk and counted."""
MAX_AHEAD = 2048
"""Maximum number of lines that begin after a line that still runs."""
MAX_BUFFERED = 64 << 20
"""Maximum bytes of a tenant's outcomes, over all its batches, that wait for an earlier line."""
DECODED = 8
"""Bytes in memory for each byte of a line that is read, decoded and tokenized."""
LOOK_SECONDS = 1.0
"""Seconds between two checks whether a run was cancelled, has expired, or has lost its rights."""
WINDOW_LOOK_SECONDS = 0.2
"""Maximum seconds until waiting lines notice that other requests have ended."""
FIRST_PAUSE, MAX_PAUSE = 0.25, 30.0
"""The shortest and the longest pause, in seconds, between two attempts at a line that cannot run now."""
MAX_FAILURES = 3
"""Maximum number of attempts at a line that the server fails to answer."""
NO_MORE_RIGHTS = "authority_ended"
REASONS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    NO_MORE_RIGHTS: "This request was not executed because the key that made the batch was revoked, has expired, or "
    "lost the scope 'inference'.",
}
"""Reasons why lines are not run."""

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class LeaseLost(Exception):
    """Another server has adopted the batch, or it was removed."""


class LineOutcome(NamedTuple):
    """A line of the output or error file."""

    kind: Literal["answered", "failed", "not_run"]
    line: bytes


class OutputLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the output or error file, as OpenAI writes it, and how long the answer took."""

    id: str
    custom_id: str | None
    """The line's `custom_id`; null if the line has none or is not JSON."""
    response: OutputResponse | None
    error: OutputError | None
    timing: Timing | None = None


class OutputResponse(msgspec.Struct, kw_only=True):
    """The endpoint's answer or refusal."""

    status_code: int
    request_id: str
    body: msgspec.Struct


class OutputError(msgspec.Struct):
    """The reason why the line was not run."""

    code: str
    message: str


class Place:
    """A line's place in the engine."""

    def __init__(self, starting: TenantSlots, tenant: str) -> None:
        self._starting: TenantSlots | None = starting
        self._tenant = tenant

    def note_started(self) -> None:
        """Record that the line has its first token, or has ended. Another line may then begin its prefill."""
        if self._starting is not None:
            self._starting.release(self._tenant)
            self._starting = None


class Window:
    """Limits the number of lines in one server's engine."""

    def __init__(
        self, settings: BatchSettings, others_waiting: Callable[[], bool], quiet_seconds: Callable[[], float]
    ) -> None:
        """`others_waiting` returns whether another request waits for its first token. `quiet_seconds` returns the
        seconds since the last request ran.

        Both functions ignore lines of batches.
        """
        self._slots = TenantSlots(settings.max_in_flight, settings.max_in_flight_per_tenant)
        self._settings = settings
        self._starting = TenantSlots(settings.max_in_flight_beside_others, settings.max_in_flight_beside_others)
        self._others_waiting, self._quiet_seconds = others_waiting, quiet_seconds
        self._taken = 0
        self.buffered: Counter[str] = Counter()
        """Bytes of each tenant's outcomes that wait for an earlier line of their batch."""

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[Place]:
        """Wait for a place, and hold it while the block runs."""
        async with self._slots.slot(tenant):
            await self._starting.acquire(tenant)
            place = Place(self._starting, tenant)
            try:
                while self._taken >= self._allowed():  # noqa: ASYNC110  nothing tells of an end
                    await asyncio.sleep(WINDOW_LOOK_SECONDS)
                self._taken += 1
                try:
                    yield place
                finally:
                    self._taken -= 1
            finally:
                place.note_started()

    def _allowed(self) -> int:
        """Return how many lines may be in the engine now."""
        if self._others_waiting():
            return 1
        if self._quiet_seconds() < QUIET_SECONDS:
            return self._settings.max_in_flight_beside_others
        return self._settings.max_in_flight


@dataclass(frozen=True, slots=True)
class BatchServer:
    """The parts of a server that its batches use."""

    server_id: str
    database: Database
    blobs: BlobStore
    files: Files
    tenants: Tenants
    completions: CompletionService
    endpoints: BatchEndpoints
    settings: BatchSettings
    memory: TenantSlots
    """Bytes that wait, by tenant."""
    window: Window


class BatchRun:
    """The run of one batch, from the state of its rows to its end."""

    def __init__(self, batch: Batch, server: BatchServer) -> None:
        self._batch = batch
        self._server = server
        self._database = server.database
        self._stopped: str | None = None
        """The reason why no further line is begun, one of REASONS."""
        self._wake = asyncio.Event()
        """Set together with `_stopped`, so that lines that wait for another attempt end."""
        self._queued: set[asyncio.Task[LineOutcome]] = set()
        """Lines that wait for a place; cancelled when `_stopped` is set."""
        self._next_look = 0.0
        self._principal: Principal | None = None
        self._threads = server.files.threads.of(batch.tenant_id)
        self._repeated: dict[int, int] = {}
        """Lines that repeat a `custom_id`, mapped to the earlier line with the same `custom_id`."""

    async def run(self) -> None:
        """Bring the batch to its end. Raises LeaseLost, or a temporary error, after which the batch is run again."""
        with self._server.blobs.staging() as folder:
            source = await self._fetch(folder)
            if source is None:
                return
            if self._batch.in_progress_at is None:
                await self._validate(source)
            if self._batch.state in (IN_PROGRESS, CANCELLING):
                await self._answer_lines(source)
            if self._batch.state == FINALIZING:
                await self._finish(folder)

    async def fail(self, error: LineError) -> None:
        """End the batch before its first line."""
        await self._end(FAILED, errors=(error,))

    async def _fetch(self, folder: Path) -> Input | None:
        try:
            await self._threads.run(
                self._server.blobs.objects.fetch, object_name(self._batch.input_file_id), folder / "input"
            )
        except FileNotFoundError:
            await self.fail(LineError(code="file_lost", message="The input file is no longer in the store."))
            return None
        return await self._threads.run(open_input, folder / "input", self._server.settings.max_lines)

    async def _validate(self, source: Input) -> None:
        errors = size_errors(source, self._server.settings.max_lines)
        if not errors and not self._endpoint.answers_every_line:
            found = await self._threads.run(check_lines, source, self._batch.endpoint, self._server.endpoints)
            errors = found.errors or await self._check_models(found.models)
        if errors:
            await self._end(FAILED, errors=tuple(errors))
            return
        async with self._database.begin() as session:
            batch = await self._held(BatchJobs(session))
            state = CANCELLING if batch.state == CANCELLING else IN_PROGRESS
            now = self._database.now()
            await self._mine(session).change(batch.id, state=state, lines=len(source), in_progress_at=now)
        self._batch = msgspec.structs.replace(batch, state=state, lines=len(source), in_progress_at=now)

    async def _check_models(self, models: dict[str, int]) -> list[LineError]:
        errors = []
        await self._look()
        if self._stopped == NO_MORE_RIGHTS:
            return [LineError(code=NO_MORE_RIGHTS, message=REASONS[NO_MORE_RIGHTS])]
        if self._principal is None:
            raise TenantSuspended("the tenant is suspended", None)
        for model, line in models.items():
            try:
                await self._server.completions.ensure_model(self._principal, model)
            except LoramuxError as error:
                if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                errors.append(model_error(error, line))
        return errors if len(errors) == len(models) else []

    async def _answer_lines(self, source: Input) -> None:
        """Run the lines that are in no chunk, and write their outcomes in order."""
        first, total = self._batch.flushed, self._batch.lines
        begun, ready = first, dict[int, LineOutcome]()
        running: dict[asyncio.Task[LineOutcome], int] = {}
        self._repeated = await self._threads.run(repeated_lines, source, self._batch.endpoint, self._server.endpoints)
        flush_at = time.monotonic() + CHUNK_SECONDS
        try:
            while first < total:
                await self._look_in_time()
                while begun < total and self._may_begin(len(running), begun - first):
                    running[asyncio.create_task(self._line(source, begun))] = begun
                    begun += 1
                if running:
                    done, _ = await asyncio.wait(running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        number = running.pop(task)
                        ready[number] = task.result()
                        self._buffer(len(ready[number].line))
                front = _front(ready, first)
                if _is_chunk(front) or first + len(front) == total or (front and time.monotonic() >= flush_at):
                    await self._flush(first, front)
                    first += len(front)
                    for number in range(first - len(front), first):
                        self._buffer(-len(ready.pop(number).line))
                    flush_at = time.monotonic() + CHUNK_SECONDS
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._buffer(-sum(len(one.line) for one in ready.values()))
        await self._finalize()

    def _may_begin(self, running: int, ahead: int) -> bool:
        within = self._server.settings.max_in_flight_per_tenant
        has_room = self._server.window.buffered[self._batch.tenant_id] < MAX_BUFFERED
        return running < within and ahead < MAX_AHEAD and (has_room or not ahead)

    def _buffer(self, size: int) -> None:
        """Count bytes of outcomes that wait, or no longer do."""
        buffered, tenant = self._server.window.buffered, self._batch.tenant_id
        buffered[tenant] += size
        if not buffered[tenant]:
            del buffered[tenant]

    async def _line(self, source: Input, number: int) -> LineOutcome:
        """Run a line until it has an answer or a permanent error. The line's text is read for each attempt."""
        pause, failures = FIRST_PAUSE, 0
        while self._stopped is None:
            try:
                async with self._place(min(source.size(number), self._server.endpoints.max_line_bytes)) as place:
                    principal = self._principal  # None: the tenant is suspended
                    if principal is not None and self._stopped is None:
                        return await self._answered(principal, number, source, place)
            except BadLine as bad:
                return self._unsent(source, number, bad)
            except LoramuxError as error:
                failures += error.status == HTTPStatus.INTERNAL_SERVER_ERROR
                if not _may_pass(error) or failures == MAX_FAILURES:
                    return self._refused(number, await self._custom_id(source, number), error)
                pause = min(max(pause, error.retry_after or 0), MAX_PAUSE)
            except asyncio.CancelledError:
                if self._stopped is None:
                    raise
                break
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                pause = min(2 * pause, MAX_PAUSE)
        not_run = OutputError(self._stopped, REASONS[self._stopped])
        return self._written(number, await self._custom_id(source, number), "not_run", error=not_run)

    @asynccontextmanager
    async def _place(self, size: int) -> AsyncIterator[Place]:
        """Hold a place in the engine, and memory for a line of `size` bytes; while the line waits for it, a stop
        cancels the line.
        """
        line = asyncio.current_task()
        assert line is not None, "a line is a task"
        self._queued.add(line)
        tenant, server = self._batch.tenant_id, self._server
        try:
            async with server.window.place(tenant) as place, server.memory.slot(tenant, DECODED * size):
                self._queued.discard(line)
                yield place
        finally:
            self._queued.discard(line)

    async def _custom_id(self, source: Input, number: int) -> str | None:
        try:
            line = await self._threads.run(self._read_line, source, number)
        except BadLine as bad:
            return bad.custom_id
        return line.custom_id

    def _read_line(self, source: Input, number: int) -> BatchLine:
        return read_line(source, number, self._batch.endpoint, self._server.endpoints)

    def _read(self, source: Input, number: int) -> tuple[str, ParsedBody]:
        line = self._read_line(source, number)
        if (first := self._repeated.get(number)) is not None:
            raise repeated_id(source, first, line.custom_id)
        return line.custom_id, parse_body(line, self._server.endpoints)

    def _unsent(self, source: Input, number: int, bad: BadLine) -> LineOutcome:
        """Return the outcome of a line that has no valid endpoint, or whose body the endpoint refuses."""
        if bad.refusal is not None:
            return self._refused(number, bad.custom_id, bad.refusal)
        error = OutputError(bad.code, f"Line {source.place(number)}: {bad}")
        return self._written(number, bad.custom_id, "failed", error=error)

    async def _answered(self, principal: Principal, number: int, source: Input, place: Place) -> LineOutcome:
        custom_id, parsed = await self._threads.run(self._read, source, number)
        claim = IdempotencyClaim(_claim_name(number), "", holder=self._batch.id, expires_at=self._claims_expire_at)
        tags = parsed.request.tags or self._batch.tags
        request = replace(parsed.request, service_tier="batch", claim=claim, tags=tags)
        answer: Answer = await self._server.completions.begin(principal, request)
        try:
            writer = parsed.writer(answer)
            await answer.started()
            place.note_started()
            async for delta in answer:
                writer.collect(delta)
            response = OutputResponse(status_code=HTTPStatus.OK, request_id=answer.id, body=writer.whole(answer.usage))
            return self._written(number, custom_id, "answered", response=response, timing=answer.timing)
        finally:
            answer.abandon()  # a cancelled line's request continues to its end, and its answer is stored

    def _refused(self, number: int, custom_id: str | None, error: LoramuxError) -> LineOutcome:
        body = self._endpoint.error_body(error)
        response = OutputResponse(status_code=error.status, request_id="", body=body)
        return self._written(number, custom_id, "failed", response=response)

    def _written(
        self,
        number: int,
        custom_id: str | None,
        kind: Literal["answered", "failed", "not_run"],
        *,
        response: OutputResponse | None = None,
        error: OutputError | None = None,
        timing: Timing | None = None,
    ) -> LineOutcome:
        id = f"batch_req_{self._batch.id.removeprefix('batch_')}_{number + 1}"
        if response is not None and not response.request_id:
            response.request_id = id
        made = OutputLine(id=id, custom_id=custom_id, response=response, error=error, timing=timing)
        return LineOutcome(kind, _encode(made) + b"\n")

    async def _flush(self, first: int, outcomes: Sequence[LineOutcome]) -> None:
        """Write consecutive outcomes as a chunk."""
        name = f"{chunk_folder(self._batch.id)}/{first:08d}-{secrets.token_hex(4)}"
        data = b"".join((b"+" if one.kind == "answered" else b"-") + one.line for one in outcomes)
        await self._threads.run(self._server.blobs.objects.put, name, data)
        kinds = Counter(one.kind for one in outcomes)
        flushed = first + len(outcomes)
        async with self._database.begin() as session:
            jobs = BatchJobs(session)
            batch = await self._held(jobs)
            if batch.flushed != first:
                raise LeaseLost(batch.id)
            await jobs.add_chunk(batch.id, first, name)
            changed = {
                "flushed": flushed,
                "completed": batch.completed + kinds["answered"],
                "failed": batch.failed + kinds["failed"] + kinds["not_run"],
                "not_run": batch.not_run + kinds["not_run"],
                "attempts": 1,
            }
            await self._mine(session).change(batch.id, **changed)
            await ClaimRepository(session).remove_before(batch.tenant_id, batch.id, _claim_name(flushed))
        self._batch = msgspec.structs.replace(batch, **changed)

    async def _finalize(self) -> None:
        now, errors = self._database.now(), self._batch.errors
        if self._stopped in ("batch_expired", NO_MORE_RIGHTS):
            errors = (LineError(code=self._stopped, message=REASONS[self._stopped]),)
        async with self._database.begin() as session:
            batch = await self._held(BatchJobs(session))
            await self._mine(session).change(batch.id, state=FINALIZING, finalizing_at=now, errors=errors)
        self._batch = msgspec.structs.replace(batch, state=FINALIZING, finalizing_at=now, errors=errors)

    async def _finish(self, folder: Path) -> None:
        """Write the output and error files, and end the batch."""
        async with self._database.read() as session:
            chunks = await BatchJobs(session).chunks(self._batch.id)
            zero_retention = await TenantRepository(session).has_zero_retention(self._batch.tenant_id)
        output, errors = folder / "output", folder / "errors"
        sizes = await self._threads.run(self._join, chunks, output, errors)
        files: list[StoredFile | None] = [None, None]
        if not zero_retention:
            files = [await self._store(output, sizes[0], "output"), await self._store(errors, sizes[1], "error")]
        codes = {error.code for error in self._batch.errors}
        state = COMPLETED
        if self._batch.cancelling_at is not None or NO_MORE_RIGHTS in codes:
            state = CANCELLED
        elif "batch_expired" in codes:
            state = EXPIRED
        await self._end(state, files=files)

    def _join(self, chunks: Sequence[str], output: Path, errors: Path) -> tuple[int, int]:
        """Divide the chunks' lines between the two files; return the files' sizes."""
        with output.open("wb") as answered, errors.open("wb") as failed:
            for name in chunks:
                for line in b"".join(self._server.blobs.objects.read(name)).splitlines(keepends=True):
                    (answered if line.startswith(b"+") else failed).write(line[1:])
            return answered.tell(), failed.tell()

    async def _store(self, path: Path, size: int, kind: str) -> StoredFile | None:
        if not size:
            return None
        now = self._database.now()
        file = StoredFile(
            id=new_file_id(),
            project_id=self._batch.project_id,
            owner=self._batch.owner,
            purpose=OUTPUT,
            filename=f"{self._batch.id}_{kind}.jsonl",
            size=size,
            created_at=now,
            expires_at=now + (self._batch.output_seconds or self._server.files.retention_seconds) * SECOND,
        )
        await self._threads.run(self._server.blobs.objects.put_file, f"{FOLDER}/{file.id}", path)
        return file

    async def _end(
        self, state: str, *, errors: tuple[LineError, ...] = (), files: Sequence[StoredFile | None] = (None, None)
    ) -> None:
        """Write the end, its files and its event, and remove the rows and objects that are no longer needed."""
        now = self._database.now()
        output, error = files
        async with self._database.begin() as session:
            jobs = BatchJobs(session)
            batch = await self._held(jobs)
            for file in files:
                if file is not None:
                    await FileRepository(session, batch.tenant_id).add(file)
            await self._mine(session).change(
                batch.id,
                state=state,
                finished_at=now,
                errors=errors or batch.errors,
                output_file_id=output and output.id,
                error_file_id=error and error.id,
            )
            await jobs.remove_chunks(batch.id)
            await ClaimRepository(session).remove_before(batch.tenant_id, batch.id, None)
            detail = EventDetail(batch=batch.id)
            await EventRepository(session, batch.tenant_id).add(f"batch.{state}", "", detail, now, batch.project_id)
        self._batch = msgspec.structs.replace(batch, state=state)
        await self._threads.run(self._server.blobs.objects.delete_under, chunk_folder(batch.id))

    async def _look_in_time(self) -> None:
        if time.monotonic() >= self._next_look:
            await self._look()
            self._next_look = time.monotonic() + LOOK_SECONDS

    async def _look(self) -> None:
        """Read from the database whether to go on, and with which rights. A suspended tenant's lines wait."""
        async with self._database.read() as session:
            batch = await BatchJobs(session).held(self._batch.id, self._server.server_id, lock=False)
        if batch is None:
            raise LeaseLost(self._batch.id)
        if batch.state == CANCELLING:
            self._stop("batch_cancelled")
        elif self._database.now() >= batch.expires_at:
            self._stop("batch_expired")
        try:
            self._principal = await self._server.tenants.authenticator.principal_behind(
                batch.tenant_id, batch.owner, batch.project_id
            )
        except TenantSuspended:
            self._principal = None
        except InvalidKey:
            self._stop(NO_MORE_RIGHTS)
        else:
            if "inference" not in self._principal.scopes:
                self._stop(NO_MORE_RIGHTS)

    def _stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason
        self._wake.set()
        for line in self._queued:
            line.cancel()

    @property
    def _endpoint(self) -> BatchEndpoint:
        return self._server.endpoints.by_path[self._batch.endpoint]

    @property
    def _claims_expire_at(self) -> int:
        return self._batch.expires_at + 7 * DAY

    async def _held(self, jobs: BatchJobs) -> Batch:
        batch = await jobs.held(self._batch.id, self._server.server_id)
        if batch is None:
            raise LeaseLost(self._batch.id)
        return batch

    def _mine(self, session: AsyncSession) -> BatchRepository:
        return BatchRepository(session, self._batch.tenant_id)


def chunk_folder(batch_id: str) -> str:
    """Return the folder of a batch's chunks in the store."""
    return f"batches/{batch_id}"


def _front(ready: dict[int, LineOutcome], first: int) -> list[LineOutcome]:
    """Return the outcomes that follow one another from line `first` on."""
    front: list[LineOutcome] = []
    number = first
    while number in ready and not _is_chunk(front):
        front.append(ready[number])
        number += 1
    return front


def _is_chunk(outcomes: Sequence[LineOutcome]) -> bool:
    return len(outcomes) >= CHUNK_LINES or sum(len(one.line) for one in outcomes) >= CHUNK_BYTES


def _claim_name(number: int) -> str:
    return f"{number:08d}"


def _may_pass(error: LoramuxError) -> bool:
    """Return whether the same line may succeed later: limits, load, and the server's own failures."""
    return error.status in (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS) or error.status >= 500
