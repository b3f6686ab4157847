"""Tolerances: when two computations in float32 count as equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOGPROB_TOLERANCE = 2e-3
"""Nats. Orders of magnitude above float32 rounding, and below the effect of any fault in an adapter."""
OUTPUT_TOLERANCE = 1e-3
"""A share of the adapter's largest contribution to a linear's output."""
ROUNDING = 2e-5
"""A share of the output itself: the difference of float32 sums in another order."""

PARITY_FAILED = "parity_failed"
OUTPUTS_NOT_FINITE = "outputs_not_finite"


@dataclass(frozen=True, slots=True)
class ParityFault:
    """The reason for an adapter's refusal: PARITY_FAILED or OUTPUTS_NOT_FINITE, and a sentence with the figures."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The method, the figures and the fault, if any, of one comparison."""

    method: str
    figures: dict[str, float]
    fault: ParityFault | None = None


@dataclass(frozen=True, slots=True)
class NotRun:
    """The reason that nothing was compared."""

    reason: str


def compare_tokens(
    ours: list[int], our_logprobs: list[float], logits: torch.Tensor, tolerance: float = LOGPROB_TOLERANCE
) -> dict[str, float]:
    """Compare greedy tokens and their log probabilities with PEFT's float32`[tokens, vocab]` at the same positions.

    `differing` counts tokens that PEFT would not have chosen. A tie within the tolerance is counted apart: rounding
    decides which of two equally likely tokens comes first.
    """
    reference = logits.double().log_softmax(-1)
    theirs = reference.gather(1, torch.tensor(ours)[:, None])[:, 0]
    behind = reference.max(-1).values - theirs
    error = (torch.tensor(our_logprobs, dtype=torch.float64) - theirs).abs()
    return {
        "tokens": len(ours),
        "differing": int((behind > tolerance).sum()),
        "ties": int(((behind > 0) & (behind <= tolerance)).sum()),
        "largest_logprob_error": float(error.max()),
    }


def compare_outputs(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor) -> float:
    """Return the distance of two outputs of one linear in units of the allowed one: above 1 is a fault.

    All three are float32`[rows, out_features]`; `base` is the output without the adapter.
    """
    allowed = OUTPUT_TOLERANCE * (theirs - base).abs().max() + ROUNDING * theirs.abs().max()
    apart = (ours - theirs).abs().max()
    return float(apart / allowed) if allowed > 0 else float(apart > 0)
