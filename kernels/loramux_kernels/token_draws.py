"""Semantics: tokens[i] drawn from softmax(logits[row(i)] / temperature(i)) over what top_k, top_p and min_p keep.

The draw is inverse: the first token at which the cumulated weight exceeds `number(i)` of the sum. So a token is a
function of its row and its number alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loramux_kernels.native import native_for
from loramux_kernels.native.abi import DTYPES, DrawAbi

SMALL = 4096
"""Tokens that are sorted as they are; more are cut down by a histogram first."""

BINS, REACH = 4096, 40.0
"""Bins of the nucleus' histogram, and how far below the best it reaches: exp(-40) is below float32's precision."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token of one row of logits is drawn."""

    row: int
    temperature: float
    """Positive."""
    number: float
    """In [0, 1)."""
    top_k: int = 0
    """Tokens that stay, and equals of the last of them; 0: all."""
    top_p: float = 1.0
    """A token goes when those before it, by logit and then by id, already hold this share. The best stays."""
    min_p: float = 0.0
    """Share of the best token's probability that a token must have."""


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Return a token for each of `draws` from `logits` `[rows, vocab]` of any float dtype.

    The rows named hold no NaN and have a finite maximum; -inf forbids a token.
    """
    if not draws or (native := native_for(logits)) is None:
        return draw_tokens_reference(logits, draws)
    assert logits.stride(1) == 1, "a row is contiguous"
    rows = (DrawAbi(d.row, d.top_k, d.temperature, d.top_p, d.min_p, d.number) for d in draws)
    asked = (DrawAbi * len(draws))(*rows)
    tokens = torch.empty(len(draws), dtype=torch.int64)
    native.loramux_draw_tokens(
        DTYPES[logits.dtype],
        *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
        *(asked, len(draws)),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens.tolist()


def draw_tokens_reference(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """`draw_tokens` in torch, row by row."""
    tokens = []
    for draw in draws:
        row = logits[draw.row].float()
        # Differences from the best are at most 0, so that the division can only overflow to -inf.
        values, token_ids = keep((row - row.max()) / draw.temperature, draw)
        drawn = choose(values, draw.number)
        tokens.append(drawn if token_ids is None else int(token_ids[drawn]))
    return tokens


def keep(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits and ids of the tokens that `draw` allows; ids None where all are.

    Equals of the k-th stay with it. The most likely token always stays.
    """
    ids: torch.Tensor | None = None
    if 0 < draw.top_k < logits.numel():
        lowest = logits.topk(draw.top_k, sorted=False).values.min()
        ids = (logits >= lowest).nonzero()[:, 0]
        logits = logits[ids]
    for share, chosen in ((1.0 - draw.top_p, _nucleus), (draw.min_p, _above_min_p)):
        if share > 0.0:
            kept = chosen(logits, draw)
            logits, ids = logits[kept], kept if ids is None else ids[kept]
    return logits, ids


def _nucleus(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return the ascending indices of the most likely tokens that hold top_p together (Holtzman et al., 2020).

    A token is excluded when those before it, by logit and then by index, already hold top_p. A histogram of the mass
    over distances from the best finds the bin in which that happens; only this bin is sorted.
    """
    distance = logits.max() - logits
    weight = torch.exp(-distance).double()
    target = draw.top_p * weight.sum()
    if len(logits) <= SMALL:
        sure, edge = distance.new_zeros(0, dtype=torch.long), torch.arange(len(logits))
        before = target.new_zeros(())
    else:
        # The last bin takes all that is further away. `distance` is inf for forbidden tokens, and so is clamped first.
        bins = (distance.clamp(max=REACH) * ((BINS - 1) / REACH)).long()
        mass = torch.bincount(bins, weights=weight, minlength=BINS).cumsum(0)
        found = int(torch.searchsorted(mass, target).clamp(max=BINS - 1))
        sure, edge = (bins < found).nonzero()[:, 0], (bins == found).nonzero()[:, 0]
        before = mass[found - 1] if found else mass.new_zeros(())
    order = edge[torch.sort(distance[edge], stable=True).indices]
    held = before + weight[order].cumsum(0) - weight[order]
    inside = held < target
    inside[0] |= len(sure) == 0
    return torch.cat((sure, order[inside])).sort().values


def _above_min_p(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return the indices of the tokens whose probability is at least min_p of the best token's."""
    return (logits >= logits.max() + math.log(min(draw.min_p, 1.0))).nonzero()[:, 0]


def choose(logits: torch.Tensor, number: float) -> int:
    """Draw an index from softmax(logits): the first at which the cumulated weight exceeds `number` of the sum."""
    weights = torch.exp(logits - logits.max())
    sums = weights.double().cumsum(0)
    index = int(torch.searchsorted(sums, number * sums[-1], right=True))
    # Rounding may carry the product to the sum itself; the last index with any weight is right then.
    return index if index < len(weights) else int(weights.nonzero()[-1])
