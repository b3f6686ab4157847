"""One choice of a request: it converts engine events to deltas, and counts the tokens that are billed.

    answer = [thought] [text] [calls]

A `Dialect` is a model's notation of these parts. `AnswerReader` splits a text into the parts, character by character,
and gives a part out as soon as it is certain. One fact is known only at the end: if the prompt opened a thought that
the model never ends, this thought was the answer's text. A call's grammar puts its name before its arguments
(`constraints.tools`), so that a call is read in one pass (`serving.calls`). `OutputProcessor` turns the engine's tokens
into text, passes it to the reader, and ends the answer's text at a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from loramux.common.units import TokenCounts
from loramux.constraints.tools import ToolStyle, ToolUse, choose_style
from loramux.engine.messages import EngineCount, PromptLogprobs, Request, TokenEvent
from loramux.serving.calls import CallDelta, join_calls, overlap, scanner_of
from loramux.serving.errors import from_fault
from loramux.serving.messages import Classes, Delta, FinishReason, PromptTokenLogprob, TokenLogprob
from loramux.serving.tokenizer import Detokenizer, StopAutomaton, StopMatcher, Tokenizer

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
"""Texts around a thought: Qwen3, DeepSeek-R1, SmolLM3 and others; Magistral; Granite."""

MAX_HEAD = 1024
"""The largest number of characters, with blanks, within which a call must show the name of its tool."""

_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Texts with which a model marks the parts of an answer that are not plain text."""

    tools: ToolStyle | None = None
    thought: tuple[str, str] | None = None
    """Texts before and after a thought; None if the model does not think."""
    variables: frozenset[str] = frozenset()
    """Variables of the template that set how much the model thinks."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the vocabulary."""
        return (*(self.tools.markers if self.tools else ()), *(self.thought or ()))

    def effort_fields(self, effort: str | None) -> dict[str, object]:
        """Return the template's variables for `effort`, which is a hint; empty without such a variable."""
        if effort is None:
            return {}
        switches = [name for name in ("enable_thinking", "thinking") if name in self.variables]
        fields: dict[str, object] = {name: effort != "none" for name in switches}
        if "reasoning_effort" in self.variables:
            fields["reasoning_effort"] = effort
        return fields

    def begins_in_thought(self, prompt_tail: str) -> bool:
        """Return whether an answer to a prompt with this end begins within a thought."""
        return self.thought is not None and prompt_tail.rstrip().endswith(self.thought[0])

    def may_think(self, prompt_tail: str) -> bool:
        """Return whether an answer to a prompt with this end may begin with a thought."""
        return self.thought is not None and not prompt_tail.rstrip().endswith(self.thought[1])


@lru_cache(maxsize=1024)
def dialect_of(template: str, tool_parser: str | None = None) -> Dialect:
    """Return the dialect of a model with this chat template.

    `tool_parser` is the notation of calls that the revision or otherwise the base chose; None: the template's notation.
    """
    thought = next((pair for pair in _THOUGHTS if pair[1] in template), None)
    variables = frozenset(name for name in _VARIABLES if name in template)
    return Dialect(choose_style(template, tool_parser), thought, variables)


class AnswerParts(msgspec.Struct, frozen=True):
    """Parts of an answer that have become certain."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallDelta, ...] = ()
    is_unended_thought: bool = False
    """True if the text repeats an earlier thought: see `AnswerReader.flush`."""


class _Part(Enum):
    OPEN = "open"
    """Only blanks so far: a thought, a text or a call may follow."""
    THOUGHT = "thought"
    TEXT = "text"
    CALLS = "calls"


class AnswerReader:
    """Splits one answer into its thought, its text and its calls.

    Offsets count characters of the model's whole output, including markers.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        in_thought: bool,
        may_think: bool,
        may_call: bool,
        use: ToolUse | None = None,
        may_be_json: bool = False,
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`may_be_json`: an answer without calls is JSON of a format."""
        self.special = special
        """Markers of the dialect that are special tokens, which otherwise have no text."""
        self.part = _Part.THOUGHT if in_thought else _Part.OPEN
        self.position = 0
        """Offset up to which the parts are certain."""
        self.thought_end: int | None = None
        """Offset of the first character after a thought and its marker."""
        self.text_begin: int | None = None
        """Offset of the text's first character, once one was given out."""
        self.text_end: int | None = None
        """Offset of the text's end, once calls have begun."""
        self._dialect = dialect
        self._thought = dialect.thought if in_thought or may_think else None
        style = dialect.tools if may_call else None
        self._use = use
        self._calls = scanner_of(style, use) if style else None
        self._begin, self._first = (style.begin, style.first) if style else ("", "")
        """The text before the calls, and, if there is none, the character that begins an answer of calls."""
        is_ambiguous = may_be_json and style is not None and not style.begin
        self._heads = style.heads(use) if is_ambiguous and style and use and not use.is_required else ()
        """The beginnings of calls, without blanks, if the answer may also be JSON that is no call."""
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._leading: list[str] = []
        """Blanks before the held text, while no other character says which part they begin."""
        self._is_blank = True
        """True if the part has had only blanks so far."""
        self._blanks = ""
        """Blanks at the beginning of an answer that may consist only of calls. They are given out together with the
        first other character.
        """
        self._is_behind_thought = in_thought
        """True if a thought came first. Blanks at its beginning and after its end are not given out."""
        self._unended: list[str] | None = [] if in_thought else None
        """Pieces of a thought that the prompt has opened, while the thought has no end; otherwise None."""
        self._uncalled: list[str] | None = []
        """Text since the mark of a call, while no call has a name; otherwise None."""

    @property
    def is_thinking(self) -> bool:
        """True if the answer is within its thought."""
        return self.part is _Part.THOUGHT

    @property
    def is_calling(self) -> bool:
        """True if the answer is within its calls."""
        return self.part is _Part.CALLS

    def push(self, text: str) -> AnswerParts:
        """Return the parts that `text` makes certain."""
        if self.part is _Part.OPEN and not self._held and text.isspace():
            self._leading.append(text)
            return AnswerParts()
        self._hold(text)
        found: list[AnswerParts] = []
        while (parts := self._advance()) is not None:
            found.append(parts)
        return _joined(found)

    def flush(self, *, is_stopped: bool = False) -> AnswerParts:
        """Return the rest at the end of the answer. `is_stopped`: the model itself ended the answer.

        If the prompt opened a thought, and the model ended its answer without ending the thought, the model does not
        think. The text then belongs to the answer and is read as its text.
        """
        if self.part is _Part.CALLS:
            return self._flush_calls(is_stopped=is_stopped)
        self._hold("")
        if is_stopped and self.is_thinking and self._unended is not None:
            return self._read_as_text("".join(self._unended) + self._take(len(self._held)))
        return self._give(self._take(len(self._held)))

    def _flush_calls(self, *, is_stopped: bool) -> AnswerParts:
        """Return text that begins like calls, if a finished answer has no call in it."""
        if not is_stopped or self._uncalled is None:
            return AnswerParts()
        written = "".join(self._uncalled)
        if self._unended is not None:
            return self._read_as_text("".join(self._unended) + written, may_call=False)
        self._enter(_Part.TEXT)
        return self._give(written)

    def _read_as_text(self, text: str, *, may_call: bool = True) -> AnswerParts:
        """Return the parts of an answer that has no thought."""
        reader = AnswerReader(
            self._dialect,
            in_thought=False,
            may_think=False,
            may_call=may_call and self._calls is not None,
            use=self._use,
            may_be_json=bool(self._heads),
        )
        reader._is_behind_thought = True
        parts = _joined([reader.push(text), reader.flush(is_stopped=True)])
        self._enter(reader.part)
        self.thought_end = 0
        self.text_begin = self.position - len(text.lstrip())
        return msgspec.structs.replace(parts, is_unended_thought=True)

    def _hold(self, text: str) -> None:
        self._held = "".join([*self._leading, self._held, text])
        self._leading.clear()

    def _advance(self) -> AnswerParts | None:
        """Give out the certain text up to the next marker; return None if more text is needed."""
        if not self._held:
            return None
        match self.part:
            case _Part.OPEN:
                return self._open()
            case _Part.THOUGHT:
                assert self._thought is not None, "a thought has an end"
                return self._until({self._thought[1]: _Part.OPEN, self._begin: _Part.CALLS})
            case _Part.TEXT:
                return self._until({self._begin: _Part.CALLS})
            case _Part.CALLS:
                assert self._calls is not None, "the answer may call"
                written = self._take(len(self._held))
                calls = self._calls.push(written)
                if calls:
                    self._uncalled = self._unended = None
                elif self._uncalled is not None:
                    self._uncalled.append(written)
                return AnswerParts(calls=calls)

    def _open(self) -> AnswerParts | None:
        """Decide with which part the answer begins, or continues after a thought."""
        begun = self._held.lstrip()
        if not begun:
            self._leading, self._held = [self._held], ""
            return None
        if self._thought is not None:
            begin = self._thought[0]
            if begun.startswith(begin):
                self._take(len(self._held) - len(begun) + len(begin))
                self._enter(_Part.THOUGHT)
                return AnswerParts()
            if begin.startswith(begun):
                return None
        self._thought = None
        if self._calls is not None and not self._begin and begun.startswith(self._first):
            is_call = self._is_call(begun)
            if is_call is None:
                return None
            self._take(len(self._held) - len(begun))
            self._enter(_Part.CALLS if is_call else _Part.TEXT)
        else:
            self._enter(_Part.TEXT)
        return AnswerParts()

    def _is_call(self, begun: str) -> bool | None:
        """Return whether text begins a call of a known tool; None if more text is needed.

        An answer in a JSON format may begin with the same character as a call, even with the same key.
        """
        if not self._heads:
            return True
        parts = begun[:MAX_HEAD].split('"')
        written = '"'.join("".join(part.split()) if place % 2 == 0 else part for place, part in enumerate(parts))
        if any(written.startswith(head) for head in self._heads):
            return True
        may_follow = len(begun) < MAX_HEAD and any(head.startswith(written) for head in self._heads)
        return None if may_follow else False

    def _until(self, following: Mapping[str, _Part]) -> AnswerParts | None:
        """Give out the part's text up to the first marker, but never a text that may be the beginning of a marker.

        `following` has the part that each marker begins; an empty marker is ignored.
        """
        markers = [marker for marker in following if marker]
        ends = [(end, marker) for marker in markers if (end := self._held.find(marker)) >= 0]
        if ends:
            end, marker = min(ends)
            given = self._give(self._take(end))
            begun = self._take(len(marker))
            self._end(marker)
            self._enter(following[marker])
            if self.is_calling:
                self._uncalled = [begun]
            return given
        certain = len(self._held) - max((overlap(self._held, marker) for marker in markers), default=0)
        return self._give(self._take(certain)) if certain else None

    def _end(self, marker: str) -> None:
        """Note the end of a part at `marker`, which has been read."""
        if not self.is_thinking:
            self.text_end = self.position - len(marker)
            return
        is_call = marker == self._begin
        self.thought_end = self.position - (len(marker) if is_call else 0)
        self._is_behind_thought, self._thought = True, None
        if not is_call:
            self._unended = None

    def _take(self, length: int) -> str:
        """Remove text that is certain from the held text, and return it."""
        taken, self._held = self._held[:length], self._held[length:]
        self.position += len(taken)
        return taken

    def _enter(self, part: _Part) -> None:
        self.part, self._is_blank = part, True

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
        if not self.is_thinking:
            if text and self.text_begin is None:
                self.text_begin = self.position - len(text)
            return AnswerParts(text=text)
        if self._unended is not None:
            self._unended.append(text)
        return AnswerParts(thought=text)


def _joined(found: list[AnswerParts]) -> AnswerParts:
    if len(found) == 1:
        return found[0]
    return AnswerParts(
        text="".join(parts.text for parts in found),
        thought="".join(parts.thought for parts in found),
        calls=tuple(call for parts in found for call in parts.calls),
        is_unended_thought=any(parts.is_unended_thought for parts in found),
    )


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
        self._prompt_logprobs: list[PromptTokenLogprob] = []
        """Log probabilities of the prompt that no delta has brought yet."""
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
        delta = Delta(
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
        return self._with_prompt(delta)

    def _push_plain(self, token_id: int) -> Delta:
        """Do the work of `push` for a token of which nothing can be held back, as for most tokens of most answers."""
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        self._num_read += len(text)
        self._num_shown += len(text)
        return self._with_prompt(Delta(index=self.index, text=text, token_ids=(token_id,)))

    def _with_prompt(self, delta: Delta) -> Delta:
        """Return the delta with the prompt's log probabilities that no delta has brought yet."""
        if not self._prompt_logprobs:
            return delta
        found, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return msgspec.structs.replace(delta, prompt_logprobs=found)

    def add_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Keep log probabilities of the prompt for the first delta. An engine that starts the prompt again replaces
        them.
        """
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
        return parts if ending is None else _joined([parts, self._reader.flush(is_stopped=ending == "stop")])

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
        elif self._reader.part is _Part.OPEN and self._reader.thought_end is None:
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
        top = tuple((self._tokenizer.token(one.token_id), one.logprob) for one in event.top_logprobs or ())
        return TokenLogprob(token=self._tokenizer.token(event.token_id), logprob=logprob, top=top, offset=offset)

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
    """Output of a prompt for which the engine computes a vector and sends a single event."""

    num_tokens = 0
    fails_alone = False
    """False: a fault of one prompt ends the whole request, because an answer must have all vectors."""

    def __init__(self, index: int, classes: Classes) -> None:
        self.index = index
        self.classes = classes
        """Classes of a classifier."""
        self.finish_reason: FinishReason | None = None

    @property
    def is_answered(self) -> bool:
        """True if the prompt is billed."""
        return self.finish_reason == "stop"

    def push(self, event: TokenEvent) -> Delta:
        """Return the vector; sets finish_reason. Raises the engine's fault as a ServingError."""
        if event.pooled is None:
            raise from_fault(event.fault)
        self.finish_reason = "stop"
        return Delta(index=self.index, pooled=event.pooled)

    def abort(self) -> None:
        """End the choice at its current state."""
        self.finish_reason = "abort"


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
        """True if the engine has sent a token, or the prompt's vector."""
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
            return TokenCounts(prompt=prompt, cached=self.cached_tokens, output=self.num_generated)
        return TokenCounts() if self.count is None else self.count.tokens

    def count_event(self, event: TokenEvent) -> None:
        """Count an event, even if its text is not read."""
        self.num_generated += event.token_id is not None
        if self.is_computed and event.count is None and not (event.waited_s or event.cached_tokens or event.load):
            return  # most tokens say no more: only an engine's first and last event do
        self.is_computed |= event.token_id is not None or event.pooled is not None
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.waited_s = max(self.waited_s, event.waited_s)
        self.load = self.load or event.load
        self.count = event.count or self.count
