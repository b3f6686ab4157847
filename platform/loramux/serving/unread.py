"""The part of an answer that waits for its reader, and the memory that it takes, counted in its tenant's share.

A stream's deltas take memory until they have been sent. Of an answer that is sent whole, the log probabilities and the
vectors take memory until the client has the answer: they are 20 to 100 times larger than the text, which is not
counted. Prompts that an answer repeats in its choices are counted, because no token is computed for them. Memory is
taken as tokens arrive and not by `max_tokens`, so a request that ends early holds little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from loramux.common.errors import LoramuxError
from loramux.common.jobs import HeldUnits
from loramux.serving.errors import InvalidRequest, ServingError, TooManyAnswers
from loramux.serving.messages import Delta, GenerationRequest, PromptTokenLogprob, TokenLogprob

MAX_READ = 128
"""Maximum number of deltas of one read, which are written in a few milliseconds."""
MAX_READ_LOGPROBS = 2048
"""Number of log probabilities after which a read ends: they are written in about 5 ms."""
BYTES_PER_LOGPROB = 32
"""Bytes of vectors that take as long to write as a log probability."""

DELTA_BYTES = 512
"""Bytes of a delta of one token, without log probabilities."""
LOGPROB_BYTES, LOGPROB_BYTES_PER_BYTE = 150, 12
"""Bytes of a log probability, and for each byte of its token's text: as an object, or twice as JSON, which is once in
parts and once in the answer.
"""
NUMBER_BYTES = 13
"""Bytes of JSON, twice, for each byte of a vector: a float32 has up to 24 characters."""
STEP_BYTES = 64 << 10
"""Bytes by which an answer's memory grows. The first step is free, so a stream whose reader keeps up takes none."""


def take_readable(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the leading deltas that are written in one turn of the event loop: at most MAX_READ, and none after
    MAX_READ_LOGPROBS log probabilities. An iterator is left at the next delta.
    """
    taken: list[Delta] = []
    size = 0
    for delta in deltas:
        taken.append(delta)
        size += len(delta.pooled) // BYTES_PER_LOGPROB
        for some in (delta.logprobs, delta.unshown_logprobs, delta.prompt_logprobs):
            size += sum([1 + len(one.top) for one in some])
        if len(taken) == MAX_READ or size > MAX_READ_LOGPROBS:
            break
    return taken


class AnswerMemory:
    """Memory of one answer. `held` is the answer's part of its tenant's share.

    The request itself is not kept: its images may be larger than the answer.
    """

    def __init__(self, held: HeldUnits, asked: GenerationRequest, repeated_bytes: int = 0) -> None:
        """`repeated_bytes`: bytes of the prompts that the answer repeats."""
        self._held = held
        self._is_pooled = asked.pooling is not None
        self._has_logprobs = asked.sampling.logprobs is not None
        self._scores_prompts = asked.sampling.prompt_logprobs is not None
        self._repeats = "echo" if asked.echo else "return_token_ids"
        is_kept = asked.claim is not None
        self._copies = 2 if is_kept else 1
        """An answer with an idempotency key is also kept in the form that is stored at its end."""
        self._is_released = asked.is_streamed and not asked.repeats_logprobs and not is_kept
        """True if what has been sent takes no memory."""
        self._bytes = repeated_bytes
        self._read = 0
        """Bytes of the deltas of the last read."""
        self._granted = STEP_BYTES

    def add(self, delta: Delta) -> bool:
        """Count a delta; return False if the tenant may hold no more."""
        self._bytes += self._copies * self._bytes_of(delta)
        if self._bytes <= self._granted:
            return True
        more = max(STEP_BYTES, self._bytes - self._granted)
        if more > self._held.most or not self._held.try_add(more):
            return False
        self._granted += more
        return True

    def note_taken(self) -> None:
        """Note that the reader comes back: it has sent the deltas of its last read."""
        if not self._read:
            return
        self._bytes -= self._read
        self._read = 0
        if (surplus := self._granted - STEP_BYTES - max(0, self._bytes)) > STEP_BYTES:
            self._held.release(surplus)
            self._granted -= surplus

    def note_read(self, deltas: Iterable[Delta]) -> None:
        """Note the deltas of a read."""
        if self._is_released:
            self._read = sum(map(self._bytes_of, deltas))

    def release(self) -> None:
        """Give all memory back."""
        self._held.release()
        self._granted = STEP_BYTES

    def refusal(self) -> ServingError:
        """Return the error of an answer that may hold no more memory."""
        mib = self._held.most >> 20
        if self._is_released:
            message = f"The answer is not read as fast as it is generated: unread answers of yours hold {mib} MiB."
            return InvalidRequest(message, code="client_too_slow")
        field, what = "logprobs", "log probabilities"
        if self._is_pooled:
            field, what = "prompt", "vectors"
        elif not self._has_logprobs:
            field = "prompt_logprobs"
            if not self._scores_prompts:
                field, what = self._repeats, "repeated prompts"
        wayout = f"Send several requests with fewer {what} each" + ("" if self._is_pooled else ", or a stream")
        if self._held.is_all:
            return InvalidRequest(
                f"The {what} of this answer take more than the {mib} MiB that a tenant's answers may hold at once. "
                f"{wayout}.",
                field=field,
                code=TooManyAnswers.code,
            )
        return TooManyAnswers(
            f"The {what} of your answers take more than the {mib} MiB that a tenant's answers may hold at once, or the "
            f"answers of all tenants hold as much as this server may. Send fewer requests at once. {wayout}.",
            field,
        )

    def _bytes_of(self, delta: Delta) -> int:
        count = DELTA_BYTES if self._is_released else 0
        if delta.logprobs or delta.unshown_logprobs or delta.prompt_logprobs:
            for some in (delta.logprobs, delta.unshown_logprobs, delta.prompt_logprobs):
                count += sum(map(_logprob_bytes, some))
        return count + NUMBER_BYTES * len(delta.pooled)


def _logprob_bytes(one: TokenLogprob | PromptTokenLogprob) -> int:
    """Return the bytes of a token's log probability and of its alternatives."""
    text = len(one.token.bytes) + sum([len(token.bytes) for token, _ in one.top])
    return LOGPROB_BYTES * (1 + len(one.top)) + LOGPROB_BYTES_PER_BYTE * text


class UnreadDeltas:
    """The deltas that the reader of an answer has not taken yet. The reader is woken once, however many have come."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._is_over = False
        self._is_behind = False
        """True if the last read has left deltas."""
        self._error: LoramuxError | None = None
        self._wanted = 1
        self._reading: asyncio.Future[None] | None = None
        """Set while the reader waits for `_wanted` deltas or the end."""

    def __len__(self) -> int:
        return len(self._deltas)

    def put(self, delta: Delta) -> None:
        """Add one."""
        self._deltas.append(delta)
        if self._reading is not None and len(self._deltas) >= self._wanted:
            self._wake()

    def end(self, error: LoramuxError | None) -> None:
        """Let nothing follow but `error`; if there is one already, that one stays."""
        self._error = self._error or error
        self._is_over = True
        self._wake()

    async def read(self, least: int) -> list[Delta]:
        """See `Answer.read`. There is one reader."""
        if len(self._deltas) < least and not self._is_over:
            self._wanted, self._reading = least, asyncio.get_running_loop().create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        if self._is_behind:
            await asyncio.sleep(0)  # other requests get their turn
        deltas = self._deltas if len(self._deltas) == 1 else take_readable(self._deltas)
        self._deltas = self._deltas[len(deltas) :]
        self._is_behind = len(self._deltas) > 0
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)
