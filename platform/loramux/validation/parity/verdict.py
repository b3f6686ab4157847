"""When two computations in float32 count as the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOGPROB_TOLERANCE = 2e-3
"""Nats. Orders of magnitude above what float32 rounds, and below what any fault in an adapter makes."""
OUTPUT_TOLERANCE = 1e-3
"""Of the adapter's largest contribution to a linear's output."""
ROUNDING = 2e-5
"""Of the output itself: what float32 sums of different order differ by."""

PARITY_FAILED = "parity_failed"
OUTPUTS_NOT_FINITE = "outputs_not_finite"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an adapter is refused: PARITY_FAILED or OUTPUTS_NOT_FINITE, and a sentence with the numbers."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and how it went."""

    method: str
    figures: dict[str, float]
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class NotRun:
    """Why there is nothing to compare."""

    reason: str


def compare_tokens(ours: list[int], our_logprobs: list[float], logits: torch.Tensor) -> dict[str, float]:
    """Greedy tokens and their log probabilities against PEFT's float32`[tokens, vocab]` for the same positions.

    `differing` counts tokens that PEFT would not have chosen, though a tie within the tolerance is no difference:
    which of two equally likely tokens comes first is a matter of rounding.
    """
    reference = logits.double().log_softmax(-1)
    theirs = reference.gather(1, torch.tensor(ours)[:, None])[:, 0]
    behind = reference.max(-1).values - theirs
    error = (torch.tensor(our_logprobs, dtype=torch.float64) - theirs).abs()
    return {
        "tokens": len(ours),
        "differing": int((behind > LOGPROB_TOLERANCE).sum()),
        "ties": int(((behind > 0) & (behind <= LOGPROB_TOLERANCE)).sum()),
        "largest_logprob_error": float(error.max()),
    }


def compare_outputs(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor) -> float:
    """How far one linear's outputs lie apart, in units of what is allowed: above 1 is a fault.

    All three are float32`[rows, out_features]`; `base` is the output without the adapter.
    """
    allowed = OUTPUT_TOLERANCE * (theirs - base).abs().max() + ROUNDING * theirs.abs().max()
    apart = (ours - theirs).abs().max()
    return float(apart / allowed) if allowed > 0 else float(apart > 0)
