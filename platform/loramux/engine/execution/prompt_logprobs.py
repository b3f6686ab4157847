"""Log probabilities of a prompt's own tokens: how well the model expected each, given those before it.

Row p of a prompt's chunk has the logits for token p + 1, so that the rows of a prompt but its last are scored and the
last one is sampled from. A step scores few rows (`scheduling.step.MAX_SCORED_ROWS`): each takes as long as choosing a
token does, and the other rows of the step wait for it. Temperature, penalties and constraints do not apply: these are
the model's own numbers, as in vLLM and in OpenAI's completions with `echo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from loramux.engine.messages import PromptLogprob, PromptLogprobs, TokenEvent, TopLogprob
from loramux.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScoredRows:
    """The scored rows of a step, among those whose logits are computed."""

    rows: list[int] = field(default_factory=list)
    """Places among the step's `sampled_rows`."""
    spans: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """A sequence, and the first and one past the last of its tokens that the rows stand for."""

    def add(self, sequence: Sequence, first: int, last: int, place: int) -> None:
        """Add the tokens [first, last), whose logits begin at `place`."""
        if first < last:
            self.rows += range(place, place + last - first)
            self.spans.append((sequence, first, last))

    @property
    def targets(self) -> list[int]:
        """The token that follows each row's."""
        return [token for sequence, first, last in self.spans for token in sequence.token_ids[first + 1 : last + 1]]

    @property
    def most_asked(self) -> int:
        """The most alternatives that any of them asks for."""
        return max(sequence.request.sampling.prompt_logprobs or 0 for sequence, _, _ in self.spans)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a step's rows, on the host once the step's tokens are there."""

    scored: ScoredRows
    logprobs: torch.Tensor
    """float32[rows]"""
    ranks: torch.Tensor
    """int64[rows]"""
    values: torch.Tensor
    """float32[rows, most asked for]"""
    token_ids: torch.Tensor
    """int64[rows, most asked for]"""

    def events(self) -> list[TokenEvent]:
        """Return an event for each sequence."""
        found = (self.logprobs.tolist(), self.ranks.tolist(), self.values.tolist(), self.token_ids.tolist())
        rows = iter(zip(*found, strict=True))
        events = []
        for sequence, first, last in self.scored.spans:
            asked = sequence.request.sampling.prompt_logprobs or 0
            tokens = []
            for _ in range(first, last):
                logprob, rank, values, token_ids = next(rows)
                top = [TopLogprob(*pair) for pair in zip(token_ids[:asked], values[:asked], strict=True)]
                tokens.append(PromptLogprob(logprob, rank, top))
            events.append(TokenEvent(request_id=sequence.id, prompt_logprobs=PromptLogprobs(first + 1, tokens)))
        return events


def split_scored(logits: torch.Tensor, scored: ScoredRows | None) -> tuple[torch.Tensor, PromptScores | None]:
    """Return the logits that tokens are sampled from, and the scores of the other rows.

    Scores of logits on a device are copied to the host behind what was enqueued before.
    """
    if scored is None:
        return logits, None
    is_scored = np.zeros(len(logits), dtype=bool)
    is_scored[scored.rows] = True
    sampled = torch.from_numpy(np.flatnonzero(~is_scored)).to(logits.device)
    rows = logits[torch.tensor(scored.rows, device=logits.device)].float()
    targets = torch.tensor(scored.targets, device=logits.device)[:, None]
    totals = rows.logsumexp(dim=-1)
    chosen = rows.gather(1, targets)
    values, token_ids = rows.topk(scored.most_asked)
    results = (chosen[:, 0] - totals, (rows > chosen).sum(dim=-1) + 1, values - totals[:, None], token_ids)
    return logits[sampled], PromptScores(scored, *(to_host(result) for result in results))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which is complete once the stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
