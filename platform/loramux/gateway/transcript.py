"""One choice's answer as it grows: token events in, deltas out."""

from __future__ import annotations

from collections import deque

from loramux.engine.messages import TokenEvent
from loramux.gateway.ask import Delta, FinishReason, TokenLogprob
from loramux.gateway.detokenizer import Detokenizer
from loramux.gateway.errors import from_fault
from loramux.gateway.stops import StopMatcher
from loramux.gateway.tokenizer import Tokenizer


class Transcript:
    """Counts what the engine generates for one choice, reads it as text, and ends it at a stop string.

    A token's logprob is given out with the last of its text, so that joined tokens and joined text are the same;
    those of tokens that reach into a stop string are never given out.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, prompt_token_ids: list[int], stop: tuple[str, ...], min_tokens: int
    ) -> None:
        self.index = index
        self.num_tokens = 0
        """Tokens generated up to and including the one that ended the answer, whether shown or not."""
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.decode, prompt_token_ids)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_read = 0
        """Characters that have been read, shown or held back."""
        self._num_shown = 0
        self._unread: list[tuple[int, TokenEvent]] = []
        """Tokens of a character that is not complete, each with the offset of its text."""
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        """Logprobs, each with the end of its token's text."""

    def push(self, event: TokenEvent) -> Delta:
        """What `event` adds; sets finish_reason at the end. Raises what the engine reports as a fault."""
        if event.finish_reason in ("error", "cancelled"):
            raise from_fault(event.fault)
        self.num_tokens += event.token_id is not None
        text = self._match(self._read(event), last=event.finish_reason is not None)
        self.finish_reason = self._ending(event)
        self._num_shown += len(text)
        token_ids = () if event.token_id is None else (event.token_id,)
        return Delta(index=self.index, text=text, token_ids=token_ids, logprobs=tuple(self._release()))

    def _read(self, event: TokenEvent) -> str:
        """The text that became certain; the token that the engine stopped at is counted and never read."""
        text = ""
        if event.token_id is not None and event.finish_reason != "stop":
            self._unread.append((self._num_read, event))
            text = self._detokenizer.push(event.token_id)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        self._num_read += len(text)
        if text or event.finish_reason is not None:
            self._hold()
        return text

    def _match(self, text: str, *, last: bool) -> str:
        """The part that may be shown. Stop strings count once more than min_tokens are out."""
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
