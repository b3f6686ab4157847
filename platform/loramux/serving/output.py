"""One choice of a request: engine events in, deltas out, and the tokens that its request is billed for.

    answer = [thought] [text] [calls]

A `Dialect` is how a model writes these parts. `AnswerReader` splits a text into them, character by character: a part is
given out as soon as it is certain, and never taken back. A call's grammar has its name before its arguments
(`constraints.tools`), so that reading one needs no second look at anything (`gateway.calls`). `OutputProcessor` turns
the engine's tokens into text, has it read, and ends it at a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

import msgspec

from loramux.common.units import TokenCounts
from loramux.constraints.tools import ToolStyle, ToolUse, choose_style
from loramux.engine.messages import EngineCount, PromptLogprobs, Request, TokenEvent
from loramux.money.usage.settlement import EndedBy, Settlement
from loramux.serving.calls import CallDelta, overlap, scanner_of
from loramux.serving.errors import from_fault
from loramux.serving.messages import Classes, Delta, FinishReason, PromptTokenLogprob, TokenLogprob
from loramux.serving.tokenizer import Detokenizer, StopAutomaton, StopMatcher, Tokenizer

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
"""Texts around a thought: Qwen3, DeepSeek-R1, SmolLM3 and others; Magistral; Granite."""

_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The texts in which a model says more than the answer's own."""

    tools: ToolStyle | None = None
    thought: tuple[str, str] | None = None
    """The texts before and behind a thought; None: the model does not think."""
    variables: frozenset[str] = frozenset()
    """The template's variables that say how much it thinks."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens of the vocabulary."""
        return (*(self.tools.markers if self.tools else ()), *(self.thought or ()))

    def effort_fields(self, effort: str | None) -> dict[str, object]:
        """Return the template's variables for `effort`. Raises ValueError where it knows none."""
        if effort is None:
            return {}
        switches = [name for name in ("enable_thinking", "thinking") if name in self.variables]
        fields: dict[str, object] = {name: effort != "none" for name in switches}
        if "reasoning_effort" in self.variables:
            fields["reasoning_effort"] = effort
        if not fields and effort != "none":
            raise ValueError("the model's chat template knows no effort")
        return fields

    def begins_in_thought(self, prompt_tail: str) -> bool:
        """Does an answer to a prompt with this end begin within a thought?"""
        return self.thought is not None and prompt_tail.rstrip().endswith(self.thought[0])

    def may_think(self, prompt_tail: str) -> bool:
        """May an answer to a prompt with this end begin with a thought?"""
        return self.thought is not None and not prompt_tail.rstrip().endswith(self.thought[1])


@lru_cache(maxsize=1024)
def dialect_of(template: str, tool_parser: str | None = None) -> Dialect:
    """Return the dialect of a model with this chat template.

    `tool_parser` is the revision's choice, or else the base's, of how it writes calls; None: as the template does.
    """
    thought = next((pair for pair in _THOUGHTS if pair[1] in template), None)
    variables = frozenset(name for name in _VARIABLES if name in template)
    return Dialect(choose_style(template, tool_parser), thought, variables)


class AnswerParts(msgspec.Struct, frozen=True):
    """What became certain of an answer."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallDelta, ...] = ()


class _Part(Enum):
    OPEN = "open"
    """Nothing but blanks so far: a thought may follow, a text or a call."""
    THOUGHT = "thought"
    TEXT = "text"
    CALLS = "calls"


class AnswerReader:
    """Splits one answer into its thought, its text and its calls."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        in_thought: bool,
        may_think: bool,
        may_call: bool,
        use: ToolUse | None = None,
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.special = special
        """The dialect's markers that are special tokens, which have no text otherwise."""
        self.part = _Part.THOUGHT if in_thought else _Part.OPEN
        self._dialect = dialect
        self._thought = dialect.thought if in_thought or may_think else None
        style = dialect.tools if may_call else None
        self._calls = scanner_of(style, use) if style else None
        self._begin, self._first = (style.begin, style.first) if style else ("", "")
        """The text before the calls, and the character that begins an answer of calls where there is none."""
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._is_blank = True
        """The part has had no character but blanks."""
        self._blanks = ""
        """Blanks at the beginning of a text that may be calls alone: given out with the first other character."""
        self._is_behind_thought = in_thought
        """A thought came first: its own blanks, and those behind it, are not given out."""

    @property
    def is_thinking(self) -> bool:
        """Is the answer within its thought?"""
        return self.part is _Part.THOUGHT

    def push(self, text: str) -> AnswerParts:
        """Return what `text` makes certain."""
        self._held += text
        found: list[AnswerParts] = []
        while (parts := self._advance()) is not None:
            found.append(parts)
        return _joined(found)

    def flush(self) -> AnswerParts:
        """Return the rest at the end of the answer."""
        held, self._held = self._held, ""
        return AnswerParts() if self.part is _Part.CALLS else self._give(held)

    def _advance(self) -> AnswerParts | None:
        """Give out what is certain up to the next marker; None where more text is needed."""
        if not self._held:
            return None
        match self.part:
            case _Part.OPEN:
                return self._open()
            case _Part.THOUGHT:
                assert self._thought is not None, "a thought has an end"
                return self._until(self._thought[1], _Part.OPEN)
            case _Part.TEXT:
                return self._until(self._begin, _Part.CALLS)
            case _Part.CALLS:
                assert self._calls is not None, "the answer may call"
                held, self._held = self._held, ""
                return AnswerParts(calls=self._calls.push(held))

    def _open(self) -> AnswerParts | None:
        """Decide with which part the answer begins, or goes on behind a thought."""
        begun = self._held.lstrip()
        if self._thought is not None:
            begin = self._thought[0]
            if begun.startswith(begin):
                self._enter(_Part.THOUGHT, begun[len(begin) :])
                return AnswerParts()
            if begin.startswith(begun):
                return None
        if not begun:
            return None
        self._thought = None
        if self._calls is not None and not self._begin and begun.startswith(self._first):
            self._enter(_Part.CALLS, begun)
        else:
            self._enter(_Part.TEXT, self._held)
        return AnswerParts()

    def _until(self, marker: str, following: _Part) -> AnswerParts | None:
        """Give out the part's text up to `marker`, and never the beginning of one."""
        if not marker:
            held, self._held = self._held, ""
            return self._give(held)
        end = self._held.find(marker)
        if end >= 0:
            given = self._give(self._held[:end])
            self._is_behind_thought |= self.is_thinking
            self._thought = None
            self._enter(following, self._held[end + len(marker) :])
            return given
        certain = len(self._held) - overlap(self._held, marker)
        if not certain:
            return None
        given, self._held = self._give(self._held[:certain]), self._held[certain:]
        return given

    def _enter(self, part: _Part, rest: str) -> None:
        self.part, self._held, self._is_blank = part, rest, True

    def _give(self, text: str) -> AnswerParts:
        if self._is_blank and (self._dialect.thought or self._calls):
            begun = text.lstrip()
            if self.is_thinking or self._is_behind_thought:
                text = begun
            elif begun:
                text, self._blanks = self._blanks + text, ""
            else:
                text, self._blanks = "", self._blanks + text
        self._is_blank &= not text
        return AnswerParts(thought=text) if self.is_thinking else AnswerParts(text=text)


def _joined(found: list[AnswerParts]) -> AnswerParts:
    if len(found) == 1:
        return found[0]
    calls = tuple(call for parts in found for call in parts.calls)
    return AnswerParts("".join(p.text for p in found), "".join(p.thought for p in found), calls)


class OutputProcessor:
    """Counts the tokens that the engine generates for one choice, reads them as text, and ends it at a stop string.

    A token's logprob is given out with the last of its text, so that joined tokens and joined text are the same;
    those of tokens that reach into a stop string are never given out.
    """

    classes = Classes()
    fails_alone = True
    """A fault of one choice ends only that one, once the request has its first token."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        stop: StopAutomaton,
        min_tokens: int,
        reader: AnswerReader | None = None,
    ) -> None:
        """`reader` splits the answer into its parts; None: all of it is text."""
        self.index = index
        self.num_tokens = 0
        """Tokens generated up to and including the one that ended the answer, whether shown or not."""
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.decode, prompt_token_ids)
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[PromptTokenLogprob] = []
        """Those that no delta has brought yet."""
        self._matcher = StopMatcher(stop)
        self._reader = reader
        self._min_tokens = min_tokens
        self._num_read = 0
        """Characters that have been read, shown or held back."""
        self._num_shown = 0
        self._unread: list[tuple[int, TokenEvent]] = []
        """Tokens of a character that is not complete, each with the offset of its text."""
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        """Logprobs, each with the end of its token's text."""

    def push(self, event: TokenEvent) -> Delta:
        """Return the news of `event`; sets finish_reason at the end. Raises the engine's fault as a GatewayError."""
        if event.finish_reason in ("error", "cancelled"):
            raise from_fault(event.fault)
        self.num_tokens += event.token_id is not None
        text = self._match(self._read(event), last=event.finish_reason is not None)
        self.finish_reason = self._ending(event)
        self._num_shown += len(text)
        token_ids = () if event.token_id is None else (event.token_id,)
        delta = Delta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=tuple(self._release()),
            stop_string=self._matcher.matched,
        )
        if self._prompt_logprobs:
            delta = msgspec.structs.replace(delta, prompt_logprobs=tuple(self._prompt_logprobs))
            self._prompt_logprobs = []
        return delta if self._reader is None else self._split(delta, self._reader)

    def add_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Keep log probabilities of the prompt for the first delta; an engine that begins anew replaces them."""
        del self._prompt_logprobs[found.start - 1 :]
        for place, one in enumerate(found.tokens, start=found.start):
            self._prompt_logprobs.append(
                PromptTokenLogprob(
                    token=self._tokenizer.token(self._prompt_token_ids[place]),
                    logprob=one.logprob,
                    rank=one.rank,
                    top=tuple((self._tokenizer.token(top.token_id), top.logprob) for top in one.top),
                )
            )

    @property
    def is_answered(self) -> bool:
        """Is the prompt billed?"""
        return self.num_tokens > 0

    def abort(self) -> None:
        """End the choice where it is."""
        self.finish_reason = "abort"

    def _split(self, delta: Delta, reader: AnswerReader) -> Delta:
        """Divide a delta's text into thought, text and calls."""
        was_thinking = reader.is_thinking
        found = [reader.push(delta.text)]
        is_thought = was_thinking or reader.is_thinking
        if self.finish_reason is not None:
            found.append(reader.flush())
        return msgspec.structs.replace(
            delta,
            text="".join(parts.text for parts in found),
            thought="".join(parts.thought for parts in found),
            calls=tuple(call for parts in found for call in parts.calls),
            thought_tokens=len(delta.token_ids) if is_thought else 0,
        )

    def _read(self, event: TokenEvent) -> str:
        """Return the text that became certain; the token that the engine stopped at is counted and never read."""
        text = ""
        if event.token_id is not None and event.finish_reason != "stop":
            self._unread.append((self._num_read, event))
            text = self._detokenizer.push(event.token_id)
            if self._reader is not None and event.token_id in self._reader.special:
                text += self._detokenizer.flush() + self._reader.special[event.token_id]
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        self._num_read += len(text)
        if text or event.finish_reason is not None:
            self._hold()
        return text

    def _match(self, text: str, *, last: bool) -> str:
        """Return the part that may be shown. Stop strings count once more than min_tokens are out."""
        if self.num_tokens <= self._min_tokens:
            return text
        shown = self._matcher.push(text)
        return shown + self._matcher.flush() if last and self._matcher.matched is None else shown

    def _ending(self, event: TokenEvent) -> FinishReason | None:
        if event.finish_reason == "stop" or self._matcher.matched is not None:
            return "stop"
        return "length" if event.finish_reason is not None else None

    def _hold(self) -> None:
        for offset, event in self._unread:
            if event.token_id is not None and event.logprob is not None:
                token = self._tokenizer.token(event.token_id)
                top = tuple((self._tokenizer.token(one.token_id), one.logprob) for one in event.top_logprobs or ())
                logprob = TokenLogprob(token=token, logprob=event.logprob, top=top, offset=offset)
                self._held.append((self._num_read, logprob))
        self._unread.clear()

    def _release(self) -> list[TokenLogprob]:
        released = []
        while self._held and self._held[0][0] <= self._num_shown:
            released.append(self._held.popleft()[1])
        return released


class PooledOutput:
    """Reads the one event of a prompt that becomes a vector."""

    num_tokens = 0
    fails_alone = False
    """A fault of one prompt is the request's: an answer has all vectors."""

    def __init__(self, index: int, classes: Classes) -> None:
        self.index = index
        self.classes = classes
        """Of a classifier."""
        self.finish_reason: FinishReason | None = None

    @property
    def is_answered(self) -> bool:
        """Is the prompt billed?"""
        return self.finish_reason == "stop"

    def push(self, event: TokenEvent) -> Delta:
        """Return the vector; sets finish_reason. Raises the engine's fault as a GatewayError."""
        if event.pooled is None:
            raise from_fault(event.fault)
        self.finish_reason = "stop"
        return Delta(index=self.index, pooled=event.pooled)

    def abort(self) -> None:
        """End the choice where it is."""
        self.finish_reason = "abort"


class Choice:
    """One answer to one prompt: a request to the engine, its output, and the engine's own count at the end."""

    def __init__(self, prompt: int, request: Request, output: OutputProcessor | PooledOutput) -> None:
        self.prompt = prompt
        """The number of its prompt within the API request."""
        self.request = request
        self.output = output
        self.num_generated = 0
        """Tokens that the engine has sent, in the output or not."""
        self.is_computed = False
        """The engine has sent a token, or the prompt's vector."""
        self.cached_tokens = 0
        self.waited_s = 0.0
        self.load: tuple[float, float] | None = None
        self.count: EngineCount | None = None
        """The engine's own count, once it has ended the request."""
        self.last_token_at: float | None = None
        self.last: Delta | None = None
        """The news that comes with the finish reason: the request's last."""

    def count_event(self, event: TokenEvent) -> None:
        """Count an event, whether it is read or not."""
        self.num_generated += event.token_id is not None
        self.is_computed |= event.token_id is not None or event.pooled is not None
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.waited_s = max(self.waited_s, event.waited_s)
        self.load = self.load or event.load
        self.count = event.count or self.count


def delivered_tokens(choices: Sequence[Choice]) -> TokenCounts:
    """Count the prompts that have been answered at all, each once, and the tokens of the outputs."""
    answered = [choice for choice in choices if choice.output.is_answered]
    firsts = {choice.prompt: choice for choice in reversed(answered)}.values()
    return TokenCounts(
        prompt=sum(len(choice.request.prompt_token_ids) for choice in firsts),
        cached=sum(choice.cached_tokens for choice in firsts),
        output=sum(choice.output.num_tokens for choice in answered),
    )


ENDED_BY: dict[str, EndedBy] = {"completed": "completion", "cancelled": "caller", "failed": "platform"}
REASONS = {"failed": "error", "cancelled": "cancelled"}


def settlement_of(request_id: str, choices: Sequence[Choice], status: str, delivered: TokenCounts) -> Settlement:
    """Return the end of a request with what was delivered, and what the engine computed beyond it.

    Where the engine did not end every choice itself (it died), its count is lost: nothing is billed.
    """
    counts = [choice.count for choice in choices if choice.count is not None]
    reasons = {choice.output.finish_reason for choice in choices}
    reason = REASONS.get(status) or next(one for one in ("abort", "length", "stop") if one in reasons)
    end = Settlement(request_id=request_id, ended_by=ENDED_BY[status], finish_reason=reason)
    if len(counts) < len(choices):
        return end
    answered = [choice for choice in choices if choice.is_computed]
    count = sum(counts, EngineCount())
    computed = TokenCounts(
        prompt=sum(len(choice.request.prompt_token_ids) for choice in answered),
        cached=sum(choice.cached_tokens for choice in answered),
        output=sum(choice.num_generated for choice in answered),
    )
    return msgspec.structs.replace(
        end,
        delivered=delivered,
        undelivered=computed - delivered,
        adapter_loads=count.adapter_loads,
        engine_count=count.tokens,
    )
