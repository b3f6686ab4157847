"""One answer to one prompt: what the engine is asked, what it says, and who pays for which part of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.request import Request
from loramux.gateway.ask import Delta, TokenUsage
from loramux.gateway.transcript import Transcript
from loramux.usage import Counted, Settlement


class Choice:
    """A request to the engine and its transcript, which ends before the engine does when nobody reads on."""

    def __init__(self, prompt: int, request: Request, transcript: Transcript) -> None:
        self.prompt = prompt
        """Which of the request's prompts it answers."""
        self.request = request
        self.transcript = transcript
        self.num_generated = 0
        """Tokens that the engine has sent, in the transcript or not."""
        self.cached_tokens = 0
        self.count: EngineCount | None = None
        """What the engine counted, once it has ended."""

    def note(self, event: TokenEvent) -> None:
        """Count an event, whoever reads it."""
        self.num_generated += event.token_id is not None
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.count = event.count or self.count

    def push(self, event: TokenEvent) -> Delta:
        """What the event adds to the answer. Raises what the engine reports as a fault."""
        return self.transcript.push(event)


def used(choices: Sequence[Choice]) -> TokenUsage:
    """What the client pays: prompts that have been answered at all, each once, and the tokens of the transcripts."""
    answered = [choice for choice in choices if choice.transcript.num_tokens]
    firsts = {choice.prompt: choice for choice in reversed(answered)}.values()
    return TokenUsage(
        prompt_tokens=sum(len(choice.request.prompt_token_ids) for choice in firsts),
        cached_tokens=sum(choice.cached_tokens for choice in firsts),
        completion_tokens=sum(choice.transcript.num_tokens for choice in answered),
    )


def settlement(request_id: str, choices: Sequence[Choice], status: str, *, paid: TokenUsage) -> Settlement:
    """The end of a request: `paid` is billed, and what the engine sent beyond it is waived.

    Where the engine did not end every choice itself (it died), nobody knows what it did: nothing is billed.
    """
    counts = [choice.count for choice in choices if choice.count is not None]
    reasons = {choice.transcript.finish_reason for choice in choices}
    told = {"failed": "error", "cancelled": "cancelled", "completed": "length" if "length" in reasons else "stop"}
    end = Settlement(request_id=request_id, finish_reason=told[status], status=status)
    if len(counts) < len(choices):
        return end
    answered = [choice for choice in choices if choice.num_generated]
    count = sum(counts, EngineCount())
    return msgspec.structs.replace(
        end,
        input_tokens=paid.prompt_tokens,
        cached_tokens=paid.cached_tokens,
        output_tokens=paid.completion_tokens,
        waived_input_tokens=sum(len(choice.request.prompt_token_ids) for choice in answered) - paid.prompt_tokens,
        waived_cached_tokens=sum(choice.cached_tokens for choice in answered) - paid.cached_tokens,
        waived_output_tokens=sum(choice.num_generated for choice in answered) - paid.completion_tokens,
        adapter_load=count.adapter_loads if paid.prompt_tokens else 0,
        counted=Counted(
            prompt_tokens=count.prompt_tokens, cached_tokens=count.cached_tokens, output_tokens=count.output_tokens
        ),
    )
