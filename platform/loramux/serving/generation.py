"""One admitted API request while it runs.

    CompletionService.begin ── usage.open ──> Generation ── engine.submit, once a choice ──> engine
    SSE writer <── one list of Deltas <── OutputProcessor.push <── on_event, on the event loop <── engine

The events of all choices are processed in the engine client's callback, and their deltas go into one list, from which
the reader takes all that have come. The request's only task waits for the last event, settles the usage, and then gives
out the deltas with the finish reasons.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from http import HTTPStatus

import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.units import TokenCounts
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.requests import BACKGROUND, OpenedRequest, service_tier
from loramux.engine.client import ENGINE_DIED, EngineDied
from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.metrics import SECONDS, Histogram
from loramux.fleet.group import EngineGroup
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import EndedBy, Settlement
from loramux.serving.errors import AdapterNotLoaded, EngineDown, GenerationFailed, InvalidRequest, ServingError
from loramux.serving.kept_answers import encode_answer, encode_delta
from loramux.serving.messages import Classes, Delta, FinishReason, PromptText, Timing
from loramux.serving.output import Choice, OutputProcessor
from loramux.serving.unread import AnswerMemory, UnreadDeltas

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 30.0
"""Seconds that an engine has to end a cancelled request; an engine that takes longer hangs."""

TOKENS_A_TURN = 20_000
"""Number of prompt tokens that are encoded for the engine before other requests get their turn."""
TOKENS_A_CHOICE = 200
"""Number of prompt tokens whose encoding takes as long as all other work of a submission."""
MAX_UNREAD = 65_536
"""Maximum number of deltas that may wait for their reader. A reader that is slower is treated as disconnected.
"""


class Generation:
    """The choices of a request, running in the engine. Iterate over a generation to get the deltas of its choices.

    A generation continues without its reader, so that the usage is always recorded. The usage row is opened before the
    engine sees the request. The row is settled before the reader gets the deltas with the finish reasons. The last
    token comes with one of these deltas: clients that measure would count an empty event as a token. A reader that
    leaves calls abandon(). After that, only a request with an idempotency key continues, because its reader may repeat
    the request.

    The tokens that the caller could read are billed, unless the server itself failed; all other tokens are waived. If
    an answer is sent whole, a reader that leaves before its end could read no token. Some faults concern one choice: a
    prompt too long for the pool, an adapter that cannot be loaded or gives no finite numbers. Before the request's
    first token, such a fault ends the whole request, and nothing is billed. After the first token, the fault ends only
    its choice. A missed deadline is not such a fault, because the engine decides it before the first choice begins
    (`engine.scheduling.deadlines`). As a safety net, a late deadline fault would be handled in the same way.

    When a choice ends early (stop string, disconnect), it is cancelled in the engine, and its final event is awaited,
    so that billed and engine-counted tokens agree.
    """

    replayed = False

    def __init__(
        self,
        opened: OpenedRequest,
        rate_limits: RateLimitStatus,
        choices: list[Choice],
        engines: EngineGroup,
        usage: UsageService,
        memory: AnswerMemory,
        *,
        is_streamed: bool,
        prompt_texts: list[PromptText] | None = None,
    ) -> None:
        self.id = opened.id
        self.model = opened.version or opened.model
        """Name of the model that answers, with the number of its revision or version."""
        self.base_model = opened.base_model
        self.created = int(time.time())
        """Time of the start, in Unix seconds."""
        self.rate_limits = rate_limits
        self.service_tier = service_tier(opened.tier)
        self.status = "running"
        """`running`, then `completed`, `cancelled` or `failed`."""
        self.prompt_token_ids = list({c.prompt: c.request.prompt_token_ids for c in choices}.values())
        """Tokens of every prompt, in order."""
        self.prompt_texts = prompt_texts or []
        self.classes = next((choice.output.classes for choice in choices), Classes())
        self.seconds_to_first_token: float | None = None
        self.token_gaps = Histogram(SECONDS)
        """Seconds between one token of a choice and its next token."""
        self.seconds: float | None = None
        """Seconds from the beginning to the end."""
        self.unsettled: Settlement | None = None
        """The end of the request if the database did not accept it. The request is then free of charge and settled
        later.
        """
        self.opened = opened
        """The request in its admitted form."""
        self._is_streamed = is_streamed
        self._choices = choices
        self._engines = engines
        self._usage = usage
        self.began = time.monotonic()
        """Time just after the admission, by a monotonic clock."""
        self._keeps_answer = False
        self._kept: list[Delta] = []
        """All deltas without log probabilities, if an observer needs the answer."""
        self._stored: list[msgspec.Raw] = []
        """All deltas in the form that is stored, if the request has an idempotency key."""
        self._unread = UnreadDeltas()
        self._memory = memory
        self._started = asyncio.Event()
        self._num_running = len(choices)
        self._submitted = False
        self._ended = asyncio.Event()
        """Set when every choice has had its last event, or when the engine did not send it in time."""
        self._left = False
        """True if the reader has left."""
        self._stopped = False
        """True if events are only counted and no longer read."""
        self._timeout: asyncio.TimerHandle | None = None
        self._failure: LoramuxError | None = None
        self._abort_reason: LoramuxError | None = None
        self.task = asyncio.create_task(self._run(), name=self.id)
        self.task.add_done_callback(lambda _: self._free_memory())

    @property
    def tenant(self) -> str:
        """Id of the owner."""
        return self.opened.tenant_id

    @property
    def is_background(self) -> bool:
        """True if the request is a line of a batch or a shadow."""
        return self.service_tier in BACKGROUND

    @property
    def answer(self) -> Sequence[Delta]:
        """Deltas of an answer that was kept. The deltas with the finish reasons come last, after the settlement."""
        return self._kept

    @property
    def is_waiting(self) -> bool:
        """True if the first token has not come yet."""
        return self.seconds_to_first_token is None and not self.task.done()

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Finish reasons of the choices that have one."""
        return [choice.output.finish_reason for choice in self._choices if choice.output.finish_reason is not None]

    @property
    def seconds_waited(self) -> float:
        """Seconds in the engine's queue, until the first step of the first choice that ran."""
        return min((choice.waited_s for choice in self._choices if choice.is_computed), default=0.0)

    @property
    def load(self) -> tuple[float, float] | None:
        """Beginning and end of the load of the request's adapter, in seconds after `began`; None if the adapter was in
        the pool.
        """
        return next((choice.load for choice in self._choices if choice.load is not None), None)

    @property
    def timing(self) -> Timing | None:
        """Times of the answer, after its end; None without a token."""
        if self.seconds is None or self.seconds_to_first_token is None:
            return None
        waited = min(self.seconds_waited, self.seconds_to_first_token)
        return Timing(
            queue_seconds=round(waited, 6),
            first_token_seconds=round(self.seconds_to_first_token - waited, 6),
            seconds=round(self.seconds - waited, 6),
        )

    @property
    def adapter_loads(self) -> int:
        """Number of adapter loads that the request caused."""
        return sum(choice.count.adapter_loads for choice in self._choices if choice.count is not None)

    @property
    def usage(self) -> TokenCounts:
        """Tokens that the caller could read so far, and the prompts for which the engine has sent any output."""
        return TokenCounts() if self._is_lost else delivered_tokens(self._choices)

    async def started(self) -> None:
        """Wait for the first delta or the end. Raises the error with which the request failed."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure

    async def read(self, least: int = 1) -> Sequence[Delta]:
        """Wait for `least` deltas or the end, and return all that have come since the last call; none after the end.

        Raises the error with which the answer ended, once its deltas have been read. A token is never delayed for the
        next one if `least` is 1: only a reader that is slower than the engine gets several deltas.
        """
        self._memory.note_taken()
        deltas = await self._unread.read(least)
        self._memory.note_read(deltas)
        return deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self.read():
            for delta in deltas:
                yield delta

    def keep_answer(self) -> None:
        """Keep all deltas for `answer`. Call this method before the first delta."""
        self._keeps_answer = True

    def abandon(self) -> None:
        """Free the engine's pages and settle the tokens so far, because the reader has left. After the end the call
        only frees the answer's memory.
        """
        self._left = True
        if self.opened.claim is None:
            self._stop()
        self._free_memory()

    def _free_memory(self) -> None:
        """Give the memory back after the end, once the reader has left."""
        if self._left and self.task.done():
            self._memory.release()

    def abort(self, reason: LoramuxError) -> None:
        """End the request because of a fault of the server. The reader gets `reason`, and the request is free of
        charge.
        """
        self._abort_reason = reason
        self._stop()

    async def _run(self) -> None:
        await self._submit()
        await self._ended.wait()
        if self._timeout is not None:
            self._timeout.cancel()
        if self._failure is None and not self._finished:
            self._failure = self._abort_reason
        self.seconds = time.monotonic() - self.began
        await self._settle()
        if self._failure is None:
            for delta in self._ends():
                self._put(delta)
        self._unread.end(self._failure)
        self._started.set()

    async def _submit(self) -> None:
        """Submit every choice. Long prompts yield to other requests between choices, because each choice encodes its
        prompt again.
        """
        num_tokens = 0
        for number, choice in enumerate(self._choices):
            num_tokens += TOKENS_A_CHOICE + len(choice.request.prompt_token_ids)
            if num_tokens > TOKENS_A_TURN:
                num_tokens = 0
                await asyncio.sleep(0)
            if self._stopped:
                self._leave_out(number)
                break
            try:
                self._engines.submit(choice.request, partial(self._on_event, choice))
            except Exception as error:
                self._leave_out(number)
                self._fail(error)
                break
        self._submitted = True
        if not self._num_running:
            self._ended.set()

    def _leave_out(self, first: int) -> None:
        """Note that the choices from number `first` on are not submitted: they have used nothing."""
        for choice in self._choices[first:]:
            choice.count = EngineCount()
        self._num_running -= len(self._choices) - first

    def _on_event(self, choice: Choice, event: TokenEvent) -> None:
        """Process one event of one choice. The engine client calls this on the event loop."""
        choice.count_event(event)
        if not self._stopped and choice.output.finish_reason is None:
            try:
                self._read(choice, event)
            except Exception as error:
                self._fail(error)
        if event.finish_reason is not None:
            self._num_running -= 1
            if self._num_running == 0 and self._submitted:
                self._ended.set()

    def _read(self, choice: Choice, event: TokenEvent) -> None:
        """Give the reader the new parts of an event. After a choice has ended early the engine continues for a
        moment.
        """
        if event.fault is not None and event.fault.code == ENGINE_DIED:
            raise EngineDown
        if event.prompt_logprobs is not None:
            assert isinstance(choice.output, OutputProcessor), "only answers have them"
            scores = choice.output.push_prompt(event.prompt_logprobs)
            if not self._memory.add(scores):
                self._end_for_memory()
            elif scores.prompt_logprobs:
                self._put(scores)
            return
        try:
            delta = choice.output.push(event)
        except ServingError as error:
            ours = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, AdapterNotLoaded)
            if ours or self.seconds_to_first_token is None or not choice.output.fails_alone:
                raise
            choice.output.abort()
            return
        if event.pooled is None or event.is_pooled:
            self._note_token(choice)
        if not self._memory.add(delta):
            self._end_for_memory()
            return
        is_finished = choice.output.finish_reason is not None and self._finished
        if is_finished:
            choice.last = delta  # it is sent with the finish reason
        elif delta.token_ids or delta.text or delta.thought or delta.calls or delta.pooled:
            self._put(delta)
        if choice.output.finish_reason is not None and event.finish_reason is None:
            self._engines.cancel(choice.request.id)
            if is_finished:
                self._limit_wait()

    def _end_for_memory(self) -> None:
        """End the request, because the tenant's answers may hold no more memory. Like a reader that leaves, the caller
        pays for what it could read.
        """
        self._left = True
        self._stop()
        self._unread.end(self._memory.refusal())

    def _note_token(self, choice: Choice) -> None:
        now = time.monotonic()
        if self.seconds_to_first_token is None:
            self.seconds_to_first_token = now - self.began
        if choice.last_token_at is not None:
            self.token_gaps.observe(now - choice.last_token_at)
        choice.last_token_at = now

    def _fail(self, error: Exception) -> None:
        """End every choice. The first error becomes the request's error."""
        if isinstance(error, EngineDied):
            error = EngineDown()
        if not isinstance(error, LoramuxError):
            logger.error("request %s failed", self.id, exc_info=error)
            error = GenerationFailed("The server failed while it generated the answer.")
        self._failure = self._failure or error
        self._stop()

    def _stop(self) -> None:
        """Tell the engine to end the choices that still run. If a choice does not end, stop waiting for it."""
        if self._stopped or self._ended.is_set():
            return
        self._stopped = True
        for choice in self._choices:
            if choice.count is None:
                self._engines.cancel(choice.request.id)
        self._limit_wait()

    def _limit_wait(self) -> None:
        if self._timeout is None:
            self._timeout = asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        for choice in self._choices:
            if choice.count is None:
                self._engines.forget(choice.request.id)
        self._ended.set()

    async def _settle(self) -> None:
        """Record the end. An answer whose end cannot be recorded is not finished."""
        self.status = self._outcome()
        end = settlement_of(self.id, self._choices, self.status, self.usage)
        try:
            end = msgspec.structs.replace(end, answer=self._encoded_answer())
            await self._usage.settle(end, patient=self.is_background)
        except Exception as error:
            self.status = "failed"
            if isinstance(error, RecordsUnavailable):
                logger.error("request %s is settled when the database answers again: %s", self.id, error)
                self.unsettled = msgspec.structs.replace(end, ended_by="platform", finish_reason="error")
                self._failure = error
            else:
                logger.exception("request %s could not be recorded", self.id)
                self._failure = GenerationFailed("The request could not be recorded.")

    def _outcome(self) -> str:
        if self._failure is not None:
            return "failed"
        return "completed" if self._finished and not self._is_lost else "cancelled"

    def _put(self, delta: Delta) -> None:
        if self._keeps_answer:
            self._kept.append(_without_logprobs(delta))
        if self.opened.claim is not None:
            self._stored.append(encode_delta(delta))
        if not self._left:
            self._unread.put(delta)
            if len(self._unread) > MAX_UNREAD:
                self.abandon()
                message = f"The answer is not read as fast as it is generated: {MAX_UNREAD} parts of it wait."
                self._unread.end(InvalidRequest(message, code="client_too_slow"))
        if not self._started.is_set() and not delta.prompt_logprobs:
            self._started.set()

    @property
    def _is_lost(self) -> bool:
        """Return whether the answer is sent whole and its reader left before it was recorded."""
        is_kept = self._is_streamed or (self.opened.claim is not None and not self._stopped)
        return self._left and not is_kept and self.status != "completed"

    @property
    def _finished(self) -> bool:
        return all(choice.output.finish_reason for choice in self._choices)

    def _ends(self) -> list[Delta]:
        return [
            msgspec.structs.replace(c.last or Delta(index=c.output.index), finish_reason=c.output.finish_reason)
            for c in self._choices
        ]

    def _encoded_answer(self) -> bytes | None:
        if self.opened.claim is None or self.status != "completed":
            return None
        return encode_answer(self, [*self._stored, *map(encode_delta, self._ends())])


def _without_logprobs(delta: Delta) -> Delta:
    if not (delta.logprobs or delta.unshown_logprobs or delta.prompt_logprobs):
        return delta
    return msgspec.structs.replace(delta, logprobs=(), unshown_logprobs=(), prompt_logprobs=())


def delivered_tokens(choices: Sequence[Choice]) -> TokenCounts:
    """Count the tokens of the prompts with output, each prompt once, and the tokens of the outputs."""
    answered = [choice for choice in choices if choice.output.is_answered]
    firsts = {choice.prompt: choice for choice in reversed(answered)}.values()
    return TokenCounts(
        prompt=sum(len(choice.request.prompt_token_ids) for choice in firsts),
        cached=sum(choice.cached_tokens for choice in firsts),
        image=sum(choice.image_tokens(choice.cached_tokens, len(choice.request.prompt_token_ids)) for choice in firsts),
        output=sum(choice.output.num_tokens for choice in answered),
    )


ENDED_BY: dict[str, EndedBy] = {"completed": "completion", "cancelled": "caller", "failed": "platform"}
REASONS = {"failed": "error", "cancelled": "cancelled"}


def settlement_of(request_id: str, choices: Sequence[Choice], status: str, delivered: TokenCounts) -> Settlement:
    """Return the end of a request: the delivered tokens, and the tokens that the engine computed in addition.

    Only the engine knows how far it got with a prompt without a token: there its own count is taken. If an engine did
    not end every choice in time, its count is lost, and nothing is billed.
    """
    counts = [choice.count for choice in choices if choice.count is not None]
    reasons = {choice.output.finish_reason for choice in choices}
    reason = REASONS.get(status) or next(one for one in ("abort", "length", "stop") if one in reasons)
    end = Settlement(request_id=request_id, ended_by=ENDED_BY[status], finish_reason=reason)
    if len(counts) < len(choices):
        return end
    count = sum(counts, EngineCount())
    computed = sum((choice.computed for choice in choices), TokenCounts())
    return msgspec.structs.replace(
        end,
        delivered=delivered,
        undelivered=computed - delivered,
        adapter_loads=count.adapter_loads,
        engine_count=count.tokens,
    )
