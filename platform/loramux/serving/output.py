"""One choice of a request: it converts engine events to deltas, and counts the tokens that are billed.

`OutputProcessor` turns the engine's tokens into text, passes it to an `AnswerReader` (`serving.parts`), and ends the
answer's text at a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from loramux.common.units import TokenCounts
from loramux.engine.messages import EngineCount, PromptLogprobs, Request, TokenEvent
from loramux.serving.calls import join_calls
from loramux.serving.errors import from_fault
from loramux.serving.messages import (
    Classes,
    Delta,
    FinishReason,
    GenerationRequest,
    Prompt,
    PromptToken,
    PromptTokenLogprob,
    TokenLogprob,
)
from loramux.serving.parts import AnswerParts, AnswerReader, join_parts
from loramux.serving.tokenizer import Detokenizer, StopAutomaton, StopMatcher, Tokenizer


class _HeldToken(NamedTuple):
    """A token that waits, with its log probability, until its text is given out."""

    end: int
    """Offset of the end of its text."""
    token_id: int
    logprob: TokenLogprob


class OutputProcessor:
    """Counts the tokens that the engine generates for one choice, splits their text into parts, and ends the text at a
    stop string.

    The answer is split into its parts first. Stop strings are searched for only in its text, never in a thought, a call
    or a marker. The tokens of a part are counted by their offsets in the model's output.

    A token's logprob is given out with the last part of its text, so that joined tokens and joined text are the same.
    The logprobs of the end token, and of tokens that overlap a stop string, are given out separately. If tokens have
    logprobs, their ids come with them.
    """

    classes = Classes()
    fails_alone = True
    """After the request's first token, a fault of one choice ends only that choice."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        stop: StopAutomaton,
        min_tokens: int,
        reader: AnswerReader | None = None,
    ) -> None:
        """`reader` splits the answer into its parts; None: the whole answer is text."""
        self.index = index
        self.num_tokens = 0
        """Number of tokens generated, including the one that ended the answer, whether shown or not."""
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.decode, prompt_token_ids)
        self._prompt_token_ids = prompt_token_ids
        self._num_scored = 1
        """Number of leading tokens of the prompt whose log probabilities were given out. The first token has none."""
        self._matcher = StopMatcher(stop)
        self._reader = reader
        self._is_plain = reader is None and not stop.next
        """True if the answer has no parts, and no stop string can end it."""
        self._min_tokens = min_tokens
        self._num_read = 0
        """Number of characters that have been read, shown or held back."""
        self._num_shown = 0
        """Number of characters of the text that have been given out."""
        self._unread: list[tuple[int, TokenEvent]] = []
        """Tokens of an incomplete character, each with the offset of its text."""
        self._held: deque[_HeldToken] = deque()
        self._undecided: list[int] = []
        """Offsets of tokens that may or may not belong to a thought."""
        self._thought_tokens = 0
        """Number of the thought's tokens that have been counted."""

    def push(self, event: TokenEvent) -> Delta:
        """Return the new parts of `event`; sets finish_reason at the end. Raises the engine's fault as a
        ServingError.
        """
        if event.finish_reason in ("error", "cancelled"):
            raise from_fault(event.fault)
        token_id = event.token_id
        if self._is_plain and token_id is not None and event.finish_reason is None and event.logprob is None:
            return self._push_plain(token_id)
        self.num_tokens += event.token_id is not None
        parts = self._split(self._read(event), event.finish_reason)
        text = self._match(parts.text, is_over=event.finish_reason is not None or self._is_calling)
        is_cut = self._matcher.matched is not None
        self._num_shown += len(text)
        self.finish_reason = self._ending(event)
        token_ids, logprobs, unshown = self._release(event)
        return Delta(
            index=self.index,
            text=text,
            thought=parts.thought,
            calls=() if is_cut or not parts.calls else join_calls(parts.calls),
            thought_tokens=self._count_thought(is_unended=parts.is_unended_thought),
            token_ids=token_ids,
            logprobs=logprobs,
            unshown_logprobs=unshown,
            stop_string=self._matcher.matched,
            is_unended_thought=parts.is_unended_thought,
        )

    def _push_plain(self, token_id: int) -> Delta:
        """Do the work of `push` for a token of which nothing can be held back, as for most tokens of most answers."""
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        self._num_read += len(text)
        self._num_shown += len(text)
        return Delta(index=self.index, text=text, token_ids=(token_id,))

    def push_prompt(self, found: PromptLogprobs) -> Delta:
        """Return a delta with the new log probabilities of the prompt. An engine that starts the prompt again, after a
        preemption or in place of an engine that died, sends the earlier ones again.
        """
        token, begin = self._tokenizer.token, self._num_scored
        assert found.start <= begin, "an engine sends log probabilities in order"
        news = found.tokens[begin - found.start :]
        self._num_scored += len(news)
        scores = [
            PromptTokenLogprob(
                token=token(self._prompt_token_ids[place]),
                logprob=one.logprob,
                rank=one.rank,
                top=tuple([(token(top.token_id), top.logprob) for top in one.top]),
            )
            for place, one in enumerate(news, start=begin)
        ]
        return Delta(index=self.index, prompt_logprobs=tuple(scores))

    @property
    def is_answered(self) -> bool:
        """True if the prompt is billed."""
        return self.num_tokens > 0

    def abort(self) -> None:
        """End the choice at its current state."""
        self.finish_reason = "abort"

    @property
    def _is_calling(self) -> bool:
        return self._reader is not None and self._reader.is_calling

    def _read(self, event: TokenEvent) -> str:
        """Return the text that became certain. The token at which the engine stopped is counted but never read."""
        text = ""
        if event.token_id is not None and event.finish_reason != "stop":
            self._unread.append((self._num_read, event))
            if self._reader is not None:
                self._undecided.append(self._num_read)
            text = self._detokenizer.push(event.token_id)
            if self._reader is not None and event.token_id in self._reader.special:
                text += self._detokenizer.flush() + self._reader.special[event.token_id]
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        self._num_read += len(text)
        if text or event.finish_reason is not None:
            self._hold()
        return text

    def _split(self, text: str, ending: str | None) -> AnswerParts:
        """Split text into thought, text and calls."""
        if self._reader is None:
            return AnswerParts(text=text)
        parts = self._reader.push(text)
        return parts if ending is None else join_parts([parts, self._reader.flush(is_stopped=ending == "stop")])

    def _match(self, text: str, *, is_over: bool) -> str:
        """Return the part of the text that may be shown. Stop strings count only after min_tokens tokens."""
        if self.num_tokens <= self._min_tokens:
            return text
        shown = self._matcher.push(text)
        return shown + self._matcher.flush() if is_over and self._matcher.matched is None else shown

    def _ending(self, event: TokenEvent) -> FinishReason | None:
        if event.finish_reason == "stop" or self._matcher.matched is not None:
            return "stop"
        return "length" if event.finish_reason is not None else None

    def _count_thought(self, *, is_unended: bool) -> int:
        """Return the number of tokens by which the thought has grown; negative if the text was not a thought."""
        if self._reader is None:
            return 0
        if is_unended:
            return -self._thought_tokens
        if self._reader.is_thinking:
            end = self._reader.position
        elif self._reader.is_undecided:
            return 0
        else:
            end = self._reader.thought_end or 0
        found = sum(offset < end for offset in self._undecided)
        self._undecided = [offset for offset in self._undecided if offset >= end] if self._reader.is_thinking else []
        self._thought_tokens += found
        return found

    def _hold(self) -> None:
        self._held.extend(
            _HeldToken(self._num_read, event.token_id, self._logprob(event, event.logprob, offset))
            for offset, event in self._unread
            if event.token_id is not None and event.logprob is not None
        )
        self._unread.clear()

    def _logprob(self, event: TokenEvent, logprob: float, offset: int) -> TokenLogprob:
        assert event.token_id is not None, "a token has a log probability"
        token = self._tokenizer.token
        top = tuple([(token(one.token_id), one.logprob) for one in event.top_logprobs or ()])
        return TokenLogprob(token=token(event.token_id), logprob=logprob, top=top, offset=offset)

    def _release(self, event: TokenEvent) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """Return token ids, their logprobs, and at the end the logprobs of the tokens that have no text."""
        if event.token_id is not None and event.logprob is None:
            return (event.token_id,), (), ()
        until = self._certain_until()
        released: list[_HeldToken] = []
        while self._held and self._held[0].end <= until:
            released.append(self._held.popleft())
        token_ids = [one.token_id for one in released]
        logprobs = tuple(self._of_part(one) for one in released)
        if self.finish_reason is None:
            return tuple(token_ids), logprobs, ()
        unshown = [one.logprob for one in self._held]
        token_ids += [one.token_id for one in self._held]
        if event.finish_reason == "stop" and event.token_id is not None and event.logprob is not None:
            token_ids.append(event.token_id)
            unshown.append(self._logprob(event, event.logprob, self._num_read))
        self._held.clear()
        return tuple(token_ids), logprobs, tuple(unshown)

    def _certain_until(self) -> int:
        """Return the offset up to which the written text cannot become part of a stop string or a marker."""
        reader = self._reader
        if self._matcher.matched is not None:
            return (0 if reader is None else reader.text_begin or 0) + self._num_shown
        return (self._num_read if reader is None else reader.position) - self._matcher.num_held

    def _of_part(self, held: _HeldToken) -> TokenLogprob:
        """Return a token's logprob, marked if its text does not belong to the answer's text."""
        reader, offset = self._reader, held.logprob.offset
        if reader is None:
            return held.logprob
        is_text = (
            reader.text_begin is not None
            and held.end > max(offset, reader.text_begin)
            and (reader.text_end is None or offset < reader.text_end)
        )
        return held.logprob if is_text else msgspec.structs.replace(held.logprob, is_text=False)


class RepeatedPrompt(OutputProcessor):
    """Output of a choice that only repeats its prompt. The token that the engine generates is neither shown nor
    billed.
    """

    def push(self, event: TokenEvent) -> Delta:
        """Return the log probabilities of the prompt, at the end. Raises the engine's fault as a ServingError."""
        delta = super().push(msgspec.structs.replace(event, token_id=None, logprob=None, top_logprobs=None))
        if self.finish_reason is not None:
            self.finish_reason = "length"
        return delta

    @property
    def is_answered(self) -> bool:
        """True if the prompt is billed."""
        return self.finish_reason == "length"


class PooledOutput:
    """Output of a prompt for which the engine computes a vector, or a row of numbers for each token."""

    num_tokens = 0
    fails_alone = False
    """False: a fault of one prompt ends the whole request, because an answer must have all vectors."""

    def __init__(self, index: int, classes: Classes, tokens: Sequence[PromptToken] = ()) -> None:
        self.index = index
        self.classes = classes
        """Classes of a classifier."""
        self._tokens = tokens
        """Tokens of the prompt if each token has a row."""
        self._num_rows = 0
        """Number of leading tokens whose rows were given out."""
        self.finish_reason: FinishReason | None = None

    @property
    def is_answered(self) -> bool:
        """True if the prompt is billed."""
        return self.finish_reason == "stop"

    def push(self, event: TokenEvent) -> Delta:
        """Return the vector or the new rows; sets finish_reason. Raises the engine's fault as a ServingError."""
        if event.pooled is None:
            raise from_fault(event.fault)
        if event.finish_reason is not None:
            self.finish_reason = "stop"
        if event.pooled_tokens is None:
            return Delta(index=self.index, pooled=event.pooled)
        # After a preemption, or the death of an engine, rows of tokens that are computed again come again.
        first, end = event.pooled_tokens
        assert first <= self._num_rows, "an engine sends all rows in order"
        row_bytes, begin = len(event.pooled) // (end - first), min(self._num_rows, end)
        self._num_rows = max(self._num_rows, end)
        return Delta(
            index=self.index,
            pooled=event.pooled[(begin - first) * row_bytes :],
            tokens=tuple(self._tokens[begin:end]),
        )

    def abort(self) -> None:
        """End the choice at its current state."""
        self.finish_reason = "abort"


async def prompt_tokens(
    tokenizer: Tokenizer, asked: GenerationRequest, prompt: Prompt, token_ids: list[int], tenant: str
) -> tuple[PromptToken, ...]:
    """Return the tokens of a prompt, which may have been shortened, with their places in its text."""
    tokens = map(tokenizer.token, token_ids)
    if not isinstance(prompt, str):
        return tuple(map(PromptToken, tokens))
    places = await tokenizer.places(prompt, tenant, add_special_tokens=asked.add_special_tokens)
    keeps_end = asked.truncation is not None and asked.truncation.keeps_end
    kept = places[len(places) - len(token_ids) :] if keeps_end else places[: len(token_ids)]
    return tuple(PromptToken(token, *(place or ())) for token, place in zip(tokens, kept, strict=True))


class Choice:
    """One answer to one prompt: a request to the engine, its output, and the engine's own count at the end."""

    def __init__(self, prompt: int, request: Request, output: OutputProcessor | PooledOutput) -> None:
        self.prompt = prompt
        """Number of the choice's prompt within the API request."""
        self.request = request
        self.output = output
        self.num_generated = 0
        """Number of tokens that the engine has sent, whether in the output or not."""
        self.is_computed = False
        """True if the engine has sent a token, or the prompt's numbers to their end."""
        self.cached_tokens = 0
        self.waited_s = 0.0
        self.load: tuple[float, float] | None = None
        self.count: EngineCount | None = None
        """The engine's own count, after it has ended the request."""
        self.last_token_at: float | None = None
        self.last: Delta | None = None
        """Delta that is sent with the finish reason: the request's last delta."""

    @property
    def computed(self) -> TokenCounts:
        """Tokens that the engine computed, after its last event: by its events, or by its own count if it ended the
        request before the first token."""
        if self.is_computed:
            prompt = len(self.request.prompt_token_ids)
            image = self.image_tokens(self.cached_tokens, prompt)
            return TokenCounts(prompt=prompt, cached=self.cached_tokens, output=self.num_generated, image=image)
        if self.count is None:
            return TokenCounts()
        tokens = self.count.tokens
        return msgspec.structs.replace(tokens, image=self.image_tokens(tokens.cached, tokens.prompt))

    def image_tokens(self, begin: int, end: int) -> int:
        """Count the tokens of images among the tokens [begin, end) of the prompt."""
        spans = ((one.start, one.start + one.num_tokens) for one in self.request.images)
        return sum(max(0, min(last, end) - max(first, begin)) for first, last in spans)

    def count_event(self, event: TokenEvent) -> None:
        """Count an event, even if its text is not read."""
        self.num_generated += event.token_id is not None
        if self.is_computed and event.count is None and not (event.waited_s or event.cached_tokens or event.load):
            return  # most tokens say no more: only an engine's first and last event do
        self.is_computed |= event.token_id is not None or event.is_pooled
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.waited_s = max(self.waited_s, event.waited_s)
        self.load = self.load or event.load
        self.count = event.count or self.count
