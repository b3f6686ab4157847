"""One API request under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import cast

import msgspec

from loramux.engine import EngineClient, EngineDied
from loramux.engine.distribution import SECONDS, Histogram
from loramux.engine.messages import TokenEvent
from loramux.gateway.answers import encode_answer
from loramux.gateway.ask import Delta, TokenUsage
from loramux.gateway.choice import Choice, settlement, used
from loramux.gateway.errors import EngineDown, GatewayError, GenerationFailed
from loramux.limits import LimitsError, Standing
from loramux.usage import Answered, IdempotencyMismatch, OpenedRequest, StillRunning, Usage

logger = logging.getLogger(__name__)


LAST_WORD_SECONDS = 30.0
"""How long an engine may take to end what it was told to cancel; one that takes longer hangs."""


class Generation:
    """A request's choices, running in the engine; iterate for their deltas.

    It lives in a task of its own, so that whatever becomes of its reader, the engine is told and the usage is
    recorded: the row is open before the engine sees anything, and it is settled before the reader gets the deltas
    with the finish reasons. A reader that leaves calls abandon(); only a request with an idempotency key runs on then,
    for the reader who comes again. A request that the house fails costs nothing.

    Whoever ends a choice early tells the engine so and listens on to its last event, a step later, so that the bill and
    the engine speak of the same tokens.
    """

    replayed = False

    def __init__(
        self,
        opened: OpenedRequest,
        created: int,
        choices: list[Choice],
        engine: EngineClient,
        usage: Usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = opened.id
        self.model = opened.model
        self.created = created
        """Unix seconds."""
        self.status = "running"
        """Then completed, cancelled or failed."""
        self.prompt_token_ids = list({c.prompt: c.request.prompt_token_ids for c in choices}.values())
        """Every prompt's tokens, in order."""
        self.seconds_to_first_token: float | None = None
        self.token_gaps = Histogram(SECONDS)
        """Seconds between one token of a choice and its next."""
        self.seconds: float | None = None
        """From the beginning to the end."""
        self.standing = Standing()
        self._admission: asyncio.Future[Answered | None] = asyncio.get_running_loop().create_future()
        self._said: list[Delta] = []
        """Kept for an idempotency key."""
        self._clock = clock
        self._began = clock()
        self._opened = opened
        self._choices = choices
        self._engine = engine
        self._usage = usage
        self._items: asyncio.Queue[Delta | GatewayError | None] = asyncio.Queue()
        self._first = asyncio.Event()
        self._failure: GatewayError | None = None
        self._abandoned = False
        self._cut: GatewayError | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._patience: asyncio.TimerHandle | None = None
        self.task = asyncio.create_task(self._run(), name=self.id)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._opened.tenant

    @property
    def waiting(self) -> bool:
        """Whether its first token is still to come."""
        return self.seconds_to_first_token is None and not self.task.done()

    async def admitted(self) -> Answered | None:
        """Wait until the row is open; Answered where the request was answered before.

        Raises what the request was refused with: LimitsError, IdempotencyMismatch, StillRunning or GenerationFailed.
        """
        return await asyncio.shield(self._admission)

    async def started(self) -> None:
        """Wait for the first sign of life; raises what the request failed with before there was one."""
        await self._first.wait()
        if self._failure is not None:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, GatewayError):
                raise item
            yield item

    def abandon(self) -> None:
        """Nobody reads on: free the engine's pages, and settle with what was generated. Does nothing at the end."""
        if self._opened.claim is None:
            self._stop()

    def cut_off(self, why: GatewayError) -> None:
        """The house cannot go on: the reader is told `why`, and pays nothing."""
        self._cut = why
        self._stop()

    def _stop(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            self._cancel_choices()

    def _cancel_choices(self) -> None:
        """Have the engine end what it still runs; one that does not is no longer listened to."""
        if self._pumps:
            for choice in self._choices:
                if choice.count is None:
                    self._engine.cancel(choice.request.id)
            self._patience = asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, self._stop_pumps)

    def _stop_pumps(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    @property
    def usage(self) -> TokenUsage:
        """What has been used so far: prompts that the engine has answered at all, and every token that was read."""
        return used(self._choices)

    async def _run(self) -> None:
        try:
            if not await self._admit():
                return
            self._failure = await self._generate() or (None if self._finished else self._cut)
            self.seconds = self._clock() - self._began
            self.status = self._outcome()
            paid = self.usage if self.status != "failed" else TokenUsage(0, 0, 0)
            end = settlement(self.id, self._choices, self.status, paid=paid)
            await self._usage.settle(msgspec.structs.replace(end, answer=self._kept_answer()))
        except Exception:
            logger.exception("request %s could not be recorded", self.id)
            self.status = "failed"
            self._failure = GenerationFailed("The request could not be recorded.", code="internal_error")
            if not self._admission.done():
                self._refuse(self._failure)
        for choice in self._choices if self._failure is None else ():
            self._put(Delta(index=choice.transcript.index, finish_reason=choice.transcript.finish_reason))
        self._put(self._failure)

    async def _admit(self) -> bool:
        """Whether the request is to run."""
        try:
            outcome = await self._usage.open(self._opened)
        except (LimitsError, IdempotencyMismatch, StillRunning) as refusal:
            self.status = "refused"
            self._refuse(refusal)
            return False
        if isinstance(outcome, Answered):
            self.status = "replayed"
            self._admission.set_result(outcome)
            return False
        self.standing = outcome
        self._admission.set_result(None)
        return True

    def _refuse(self, why: Exception) -> None:
        self._admission.set_exception(why)
        self._admission.exception()  # it may be that nobody waits for it

    async def _generate(self) -> GatewayError | None:
        """Run every choice to its end; one that fails takes the others with it."""
        if self._abandoned:
            return None
        self._pumps = [asyncio.create_task(self._pump(choice)) for choice in self._choices]
        ends = await asyncio.gather(*self._pumps, return_exceptions=True)
        if self._patience is not None:
            self._patience.cancel()
        failures = [end for end in ends if isinstance(end, Exception)]
        return self._explain(failures[0]) if failures else None

    async def _pump(self, choice: Choice) -> None:
        if self._abandoned:
            return
        events = cast(AsyncGenerator[TokenEvent, None], self._engine.stream(choice.request))
        before: float | None = None
        try:
            async with aclosing(events):
                async for event in events:
                    choice.note(event)
                    if not self._abandoned and choice.transcript.finish_reason is None:
                        before = self._push(choice, event, before)
        except Exception:
            self._stop()
            raise

    def _push(self, choice: Choice, event: TokenEvent, before: float | None) -> float:
        """Give the reader what an event adds; the choice's last token came at `before`, this one now."""
        delta = choice.transcript.push(event)
        now = self._note_token(before)
        if delta.token_ids or delta.text:
            self._put(delta)
        if choice.transcript.finish_reason is not None and event.finish_reason is None:
            self._engine.cancel(choice.request.id)
        return now

    def _note_token(self, before: float | None) -> float:
        """A choice has a token, its last one came at `before`; the time."""
        now = self._clock()
        if self.seconds_to_first_token is None:
            self.seconds_to_first_token = now - self._began
        if before is not None:
            self.token_gaps.observe(now - before)
        return now

    def _put(self, item: Delta | GatewayError | None) -> None:
        if self._opened.claim is not None and isinstance(item, Delta):
            self._said.append(item)
        self._items.put_nowait(item)
        self._first.set()

    def _explain(self, failure: Exception) -> GatewayError:
        if isinstance(failure, GatewayError):
            return failure
        if isinstance(failure, EngineDied):
            return EngineDown()
        logger.error("request %s failed", self.id, exc_info=failure)
        return GenerationFailed("The server failed while it generated the answer.", code="internal_error")

    @property
    def _finished(self) -> bool:
        return all(choice.transcript.finish_reason for choice in self._choices)

    def _outcome(self) -> str:
        if self._failure is not None:
            return "failed"
        return "completed" if self._finished else "cancelled"

    def _kept_answer(self) -> bytes | None:
        if self._opened.claim is None or self.status != "completed":
            return None
        ends = [Delta(index=c.transcript.index, finish_reason=c.transcript.finish_reason) for c in self._choices]
        return encode_answer(self, [*self._said, *ends])
