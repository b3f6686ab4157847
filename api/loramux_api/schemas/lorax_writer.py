"""LoRAX's generate: the answer, whole or token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from loramux.gateway import Answer, Delta, FinishReason, GatewayError, TokenUsage
from loramux_api.answering import Writer
from loramux_api.schemas.lorax import GenerateBody, Generated, LoraxDetails, LoraxError, LoraxToken, StreamedToken


class LoraxWriter(Writer):
    """Writes one request's answer. A stream's events are one token behind: the last one also tells the end."""

    ending = b""

    def __init__(self, body: GenerateBody, generation: Answer, eos_token_ids: Collection[int]) -> None:
        self._body = body
        self._generation = generation
        self._eos_token_ids = eos_token_ids
        self._text = ""
        self._untold = ""
        """Text whose token is not complete."""
        self._ids: list[int] = []
        """Of tokens that are not told yet."""
        self._last: LoraxToken | None = None
        self._finish_reason: FinishReason | None = None
        self._last_id = -1

    def opening(self) -> Iterable[StreamedToken]:
        """A stream begins with a token."""
        return ()

    def chunk(self, delta: Delta) -> StreamedToken | None:
        """The token before the delta's, if there is one."""
        tokens = self._tokens(delta)
        if not tokens:
            return None
        before, self._last = self._last, tokens[-1]
        if len(tokens) > 1:  # they became certain together: one event tells them
            self._last = msgspec.structs.replace(tokens[-1], text="".join(token.text for token in tokens))
        return None if before is None else StreamedToken(token=before)

    def closing(self, usage: TokenUsage) -> Iterable[StreamedToken]:
        """The last token, the whole text and the details."""
        last = self._last or LoraxToken(id=self._last_id, text="", logprob=0.0, special=True)
        last = msgspec.structs.replace(last, text=last.text + self._untold)
        text = self._shown(self._text)
        yield StreamedToken(token=last, generated_text=text, details=self._details(usage))

    def whole(self, choices: list[Delta], usage: TokenUsage) -> Generated:
        """The answer in one piece."""
        (choice,) = choices
        tokens = self._tokens(choice)
        if not self._body.asked.details:
            return Generated(generated_text=self._shown(choice.text))
        details = self._details(usage)
        details.prefill, details.tokens = [], tokens
        return Generated(generated_text=self._shown(choice.text), details=details)

    def failure(self, error: GatewayError) -> LoraxError:
        """What went wrong in the middle of a stream."""
        return LoraxError(error.message, "generation")

    def _tokens(self, delta: Delta) -> list[LoraxToken]:
        """The tokens whose text is complete with this delta."""
        self._text += delta.text
        self._untold += delta.text
        self._ids += delta.token_ids
        self._last_id = delta.token_ids[-1] if delta.token_ids else self._last_id
        self._finish_reason = delta.finish_reason or self._finish_reason
        tokens = []
        for told in delta.logprobs:
            text, self._untold = self._untold[: len(told.token.text)], self._untold[len(told.token.text) :]
            tokens.append(LoraxToken(id=self._ids.pop(0), text=text, logprob=told.logprob))
        return tokens

    def _shown(self, text: str) -> str:
        return self._body.inputs + text if self._body.asked.return_full_text else text

    def _details(self, usage: TokenUsage) -> LoraxDetails:
        reason = "length"
        if self._finish_reason == "stop":
            reason = "eos_token" if self._last_id in self._eos_token_ids else "stop_sequence"
        return LoraxDetails(
            finish_reason=reason,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.completion_tokens,
            seed=self._body.asked.seed,
        )
