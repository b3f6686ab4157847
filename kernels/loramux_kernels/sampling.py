"""Sampling, from logits to tokens: masks of constrained rows, penalties, truncation, and the draw.

Semantics:

    forbid_tokens   logits[rows[m], t] = -inf if bit t % 32 of words[m, t // 32] is 0, or words[m] ends before t
    sample          tokens[s] = argmax(steered[s]) if greedy, else a draw from softmax(kept(steered[s] / heat[s])), or
                    NO_TOKEN if steered[s] holds NaN, +inf, or -inf alone; heat: temperature, s: a row below num_rows
    draw_tokens     token[i] drawn from softmax(kept(logits[row(i)] / temperature(i)))

`steered` is the logits after penalties and bias; `kept` leaves the tokens that top_k, then top_p, then min_p allow.

`sample` is for a GPU: all rows at once, without the host. Its draw is an exponential race: the token with the greatest
logit - log(Exp(1)) is distributed as the softmax. `draw_tokens` is for a CPU. Its draw is inverse: the first token at
which the cumulated weight exceeds `number(i)` of the sum. So a token depends only on its row and its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.native.abi import DTYPES, DrawAbi
from loramux_kernels.native.loader import native_for
from loramux_kernels.tables import IN_PROMPT, NO_TOKEN, SamplingBatch

WORD_BITS = 32
"""Tokens in one word of a mask."""

SMALL = 4096
"""Maximum number of tokens that are sorted directly. A larger number is first reduced by a histogram."""

BINS, REACH = 4096, 40.0
"""Bins of the nucleus' histogram, and its reach below the best logit: exp(-40) is below float32's precision."""

_NEVER = float("-inf")
_WORD = 0xFFFF_FFFF
_LARGEST = torch.finfo(torch.float32).max


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Remove tokens from rows of `logits` `[S, vocab]`, any float dtype, in place.

    `rows` int64[M], no row twice; `words` int32[M, W], contiguous.
    """
    if runs_triton(logits):
        from loramux_kernels.cuda import sampling as triton

        triton.forbid_tokens(logits, rows, words)
    else:
        forbid_tokens_reference(logits, rows, words)


def forbid_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Compute `forbid_tokens` in torch, on any device."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    vocab = logits.shape[1]
    for row, own in zip(rows.tolist(), words, strict=True):
        allowed = (own[:, None] >> bits & 1).bool().flatten()[:vocab]
        logits[row, : len(allowed)].masked_fill_(~allowed, _NEVER)
        logits[row, len(allowed) :] = _NEVER


def sample(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor) -> None:
    """Choose a token for each of the first `num_rows` rows of `logits` `[S, vocab]`, any float dtype, which are not
    changed.

    The result is in `tokens`, int64[S]; its other rows are not changed. Sums are taken in float32.
    """
    if runs_triton(logits):
        from loramux_kernels.cuda import sampling as triton

        triton.sample(logits, batch, tokens)
    else:
        sample_reference(logits, batch, tokens)


def sample_reference(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor) -> None:
    """Compute `sample` in torch, on any device."""
    steered = steer(logits.float(), batch)
    greedy = batch.temperature == 0
    best = steered.amax(dim=-1, keepdim=True)  # NaN wins over every number
    # Differences from the best are at most 0, so the division can only overflow to -inf.
    scaled = (steered - best) / torch.where(greedy, 1.0, batch.temperature)[:, None]
    scores = exclude(scaled, batch) - arrival_times(batch.seed, batch.step, logits.shape[1]).log()
    chosen = torch.where(greedy[:, None], steered, scores).argmax(dim=-1)
    is_chosen = torch.arange(len(tokens), device=tokens.device) < batch.num_rows
    chosen = torch.where(best[:, 0].isfinite(), chosen, NO_TOKEN)
    tokens.copy_(torch.where(is_chosen, chosen, tokens))


def steer(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Apply penalties and bias to float32 logits `[S, vocab]`, in a new tensor. NaN and +inf stay; a finite logit stays
    below +inf."""
    before, vocab = logits, logits.shape[1]
    if (p := batch.penalties) is not None:
        counts = p.counts[p.counters.clamp(min=0).long(), :vocab].masked_fill(p.counters[:, None] < 0, 0)
        if p.drafts is not None:
            rows, places = (p.drafts >= 0).nonzero(as_tuple=True)
            drafted = p.drafts[rows, places]
            counts = counts.index_put((rows, drafted.long()), torch.ones_like(drafted), accumulate=True)
        written, repetition = counts & (IN_PROMPT - 1), p.repetition[:, None]
        changed = torch.where(logits > 0, logits / repetition, logits * repetition)
        changed = changed - p.frequency[:, None] * written - p.presence[:, None] * (written > 0)
        logits = torch.where(counts != 0, changed.clamp(max=_LARGEST), logits)
    if (b := batch.bias) is not None:
        is_term = (torch.arange(len(b.rows), device=b.rows.device) < b.number) & (b.rows < batch.num_rows)
        is_term &= b.token_ids < vocab
        terms = b.rows[is_term].long(), b.token_ids[is_term].long()
        logits = logits.index_put(terms, b.values[is_term], accumulate=True).clamp(max=_LARGEST)
    return torch.where(before < float("inf"), logits, before)


def exclude(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return float32 logits `[S, vocab]` over the temperature, -inf if top_k, top_p or min_p excludes a token."""
    vocab = scaled.shape[1]
    ordered = scaled.sort(dim=-1, descending=True).values
    k = torch.where((batch.top_k <= 0) | (batch.top_k > vocab), vocab, batch.top_k).long()
    ordered = ordered.masked_fill(ordered < ordered.gather(1, k[:, None] - 1), _NEVER)
    probabilities = ordered.softmax(dim=-1)
    # Tokens with equal logits are kept or removed together, because the mass above them is the same.
    above = (probabilities.cumsum(dim=-1) - probabilities).masked_fill(_repeats(ordered), 0.0).cummax(dim=-1).values
    above[:, 0] = 0.0
    last = (
        (((above < batch.top_p[:, None]) | (batch.top_p[:, None] >= 1)) & (ordered > _NEVER)).sum(dim=-1).clamp(min=1)
    )
    lowest = ordered.gather(1, last[:, None] - 1)
    return scaled.masked_fill((scaled < lowest) | (scaled < ordered[:, :1] + batch.min_p[:, None].log()), _NEVER)


def _repeats(ordered: torch.Tensor) -> torch.Tensor:
    repeats = torch.zeros_like(ordered, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return repeats


def arrival_times(seed: torch.Tensor, step: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return independent Exp(1) numbers `float32[S, vocab]`: with rates p, token t arrives first with probability p[t].

    The generator is Philox 4x32-10 (Salmon et al., 2011). The key is the seed, and the counter (token // 4, step, 0, 0)
    yields the numbers of four neighbouring tokens.
    """
    quads = torch.arange(-(-vocab // 4), device=seed.device).expand(len(seed), -1)
    words = philox(seed[:, None], quads, step.long()[:, None].expand_as(quads))
    uniform = (torch.stack(words, dim=-1).flatten(1)[:, :vocab].float() + 0.5) * 2.0**-32
    # -log(1 - u). Small values decide the race, and the series keeps their precision.
    return torch.where(uniform < 2.0**-10, uniform * (1 + uniform * (0.5 + uniform / 3)), -(1 - uniform).log())


def philox(key: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run ten rounds over the counter (c0, c1, 0, 0); return four words, as int64 tensors with values below 2^32."""
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        # The multipliers, and below the additions to the key, are the constants of Philox 4x32.
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (right >> 32 & _WORD) ^ c1 ^ k0, (left >> 32 & _WORD) ^ c3 ^ k1
        c1, c3 = right & _WORD, left & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters for drawing the token of one row of logits."""

    row: int
    temperature: float
    """Positive temperature."""
    number: float
    """Random number in [0, 1)."""
    top_k: int = 0
    """Number of tokens that are kept, in addition to tokens equal to the last of them; 0: all tokens."""
    top_p: float = 1.0
    """Share of the mass: a token is removed if the tokens before it, by logit and then by id, already have this share.
    The best token is always kept.
    """
    min_p: float = 0.0
    """Share of the best token's probability that a token must have."""


_abi_fields = attrgetter(*(field[0] for field in DrawAbi._fields_))


def most_likely_tokens(logits: torch.Tensor) -> list[int | None]:
    """Return the most likely token of each row of `logits` `[rows, vocab]`, of any float dtype; among equal tokens the
    first.

    The result is None for a row whose highest logit is infinite, or one of whose logits is NaN.
    """
    if (native := native_for(logits)) is None or logits.stride(1) != 1:
        return most_likely_tokens_reference(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    native.loramux_most_likely(
        DTYPES[logits.dtype],
        *(logits.data_ptr(), logits.stride(0), *logits.shape),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return [None if token < 0 else token for token in tokens.tolist()]


def most_likely_tokens_reference(logits: torch.Tensor) -> list[int | None]:
    """Compute `most_likely_tokens` in torch."""
    highest, tokens = logits.max(dim=-1)  # NaN wins over every number
    return [
        token if finite else None for token, finite in zip(tokens.tolist(), highest.isfinite().tolist(), strict=True)
    ]


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Return a token for each of `draws` from `logits` `[rows, vocab]` of any float dtype.

    The rows of `draws` hold no NaN and have a finite maximum; -inf forbids a token.
    """
    if not draws or (native := native_for(logits)) is None:
        return draw_tokens_reference(logits, draws)
    assert logits.stride(1) == 1, "a row is contiguous"
    rows = (DrawAbi(*_abi_fields(draw)) for draw in draws)
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
    """Compute `draw_tokens` in torch, row by row."""
    tokens = []
    for draw in draws:
        row = logits[draw.row].float()
        # Differences from the best are at most 0, so the division can only overflow to -inf.
        values, token_ids = keep((row - row.max()) / draw.temperature, draw)
        drawn = choose(values, draw.number)
        tokens.append(drawn if token_ids is None else int(token_ids[drawn]))
    return tokens


def keep(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits and ids of the tokens that `draw` allows; ids is None if all are allowed.

    Tokens equal to the k-th token are kept too. The most likely token is always kept.
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

    A token is excluded if the tokens before it, by logit and then by index, already have top_p of the mass. A histogram
    of the mass over distances from the best finds the bin in which that happens; only this bin is sorted.
    """
    distance = logits.max() - logits
    weight = torch.exp(-distance).double()
    target = draw.top_p * weight.sum()
    if len(logits) <= SMALL:
        sure, edge = distance.new_zeros(0, dtype=torch.long), torch.arange(len(logits))
        before = target.new_zeros(())
    else:
        # The last bin takes everything further away. `distance` is inf for forbidden tokens, so it is clamped first.
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
    """Draw an index from softmax(logits): the first at which the cumulated weight exceeds `number` times the sum."""
    weights = torch.exp(logits - logits.max())
    sums = weights.double().cumsum(0)
    index = int(torch.searchsorted(sums, number * sums[-1], right=True))
    # Rounding may make the product equal to the sum. The last index with any weight is then right.
    return index if index < len(weights) else int(weights.nonzero()[-1])
