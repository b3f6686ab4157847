"""What a row of logits needs when tokens are ruled out: a list of those that may stay, thresholds, and their race.

Device functions of `sampling`. A row's candidates are `count` listed tokens or, when they do not fit a list, the
`direct` first ones of the row itself; one of the two numbers is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEVER = tl.constexpr(float("-inf"))
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def list_tokens(
    source: tl.tensor, values: tl.tensor, names: tl.tensor, vocab: tl.tensor, best: tl.tensor, heat: tl.tensor,
    k: tl.tensor, p: tl.tensor, floor: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """List the tokens within some margin of the best, all that can stay among them: (number, all mass)."""
    near, middle, far = 4.0, 8.0, 14.0
    near_count, middle_count, far_count = 0, 0, 0
    near_mass, middle_mass, far_mass, mass = 0.0, 0.0, 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        distance = (best - tl.load(source + token, mask=token < vocab, other=_NEVER).to(tl.float32)) / heat
        weight = tl.exp(-distance)
        near_count += tl.sum((distance <= near).to(tl.int32))
        middle_count += tl.sum((distance <= middle).to(tl.int32))
        far_count += tl.sum((distance <= far).to(tl.int32))
        near_mass += tl.sum(tl.where(distance <= near, weight, 0.0))
        middle_mass += tl.sum(tl.where(distance <= middle, weight, 0.0))
        far_mass += tl.sum(tl.where(distance <= far, weight, 0.0))
        mass += tl.sum(weight)
    margin = float("inf")
    if _holds(far, far_count, far_mass, mass, vocab, k, p, floor):
        margin = far
    if _holds(middle, middle_count, middle_mass, mass, vocab, k, p, floor):
        margin = middle
    if _holds(near, near_count, near_mass, mass, vocab, k, p, floor):
        margin = near
    count = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(source + token, mask=token < vocab, other=_NEVER).to(tl.float32)
        listed = (token < vocab) & ((best - logit) / heat <= margin)
        place = count + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(values + place, logit, mask=listed & (place < BLOCK))
        tl.store(names + place, token, mask=listed & (place < BLOCK))
        count += tl.sum(listed.to(tl.int32))
    tl.debug_barrier()
    return count, mass


@triton.jit
def _holds(
    margin: tl.tensor, count: tl.tensor, held: tl.tensor, mass: tl.tensor, vocab: tl.tensor, k: tl.tensor,
    p: tl.tensor, floor: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Whether all tokens that stay lie within `margin` of the best: k of them, clearly more than p, or min_p's."""
    return ((k < vocab) & (count >= k)) | (
        (k == vocab) & (((p < 1.0) & (held >= 1.001 * p * mass)) | ((p >= 1.0) & (-floor <= margin)))
    )


@triton.jit
def threshold(
    source: tl.tensor, values: tl.tensor, count: tl.tensor, direct: tl.tensor, best: tl.tensor, heat: tl.tensor,
    lowest: tl.tensor, target: tl.tensor,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest key from which on upwards the tokens number, or weigh, at least `target`; not below `lowest`."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    for _ in range(32):
        if (
            mass_from(source, values, count, direct, best, heat, tl.maximum(found | bit, lowest), BY_MASS, BLOCK)
            >= target
        ):
            found = found | bit
        bit = bit >> 1
    return tl.maximum(found, lowest)


@triton.jit
def mass_from(
    source: tl.tensor, values: tl.tensor, count: tl.tensor, direct: tl.tensor, best: tl.tensor, heat: tl.tensor,
    lowest: tl.tensor,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Number or weight of the tokens whose keys are at least `lowest`."""
    mass = 0.0
    for start in range(0, tl.maximum(count, direct), BLOCK):
        logit, inside = _read(source, values, start, count, direct, BLOCK)
        stays = inside & (_key(logit) >= lowest)
        if BY_MASS:
            mass += tl.sum(tl.where(stays, tl.exp((logit - best) / heat), 0.0))
        else:
            mass += tl.sum(stays.to(tl.float32))
    return mass


@triton.jit
def race(
    source: tl.tensor, values: tl.tensor, names: tl.tensor, count: tl.tensor, direct: tl.tensor, best: tl.tensor,
    heat: tl.tensor, lowest: tl.tensor, floor: tl.tensor, seed: tl.tensor, step: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The token that arrives first among those that stay."""
    top = tl.full((), _NEVER, tl.float32)
    winner = _NOBODY
    for start in range(0, tl.maximum(count, direct), BLOCK):
        logit, inside = _read(source, values, start, count, direct, BLOCK)
        index = start + tl.arange(0, BLOCK)
        token = tl.where(index < direct, index, tl.load(names + index, mask=index < count, other=0))
        quad = token // 4
        a, b, c, d = tl.philox(seed, quad, step, quad * 0, quad * 0)
        lane = token % 4
        word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
        stays = inside & (_key(logit) >= lowest) & ((logit - best) / heat >= floor)
        score = tl.where(stays, logit / heat - tl.log(arrival_time(word)), _NEVER)
        best_here, at = tl.max(score, axis=0, return_indices=True)
        here = tl.min(tl.where(tl.arange(0, BLOCK) == at, token, _NOBODY))
        winner = tl.where(best_here > top, here, winner)
        top = tl.maximum(top, best_here)
    return winner


@triton.jit
def _read(
    source: tl.tensor, values: tl.tensor, start: tl.tensor, count: tl.tensor, direct: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(logits, whether there is one) of a block of the list of `count` tokens, or of the row's `direct` ones."""
    index = start + tl.arange(0, BLOCK)
    from_list = tl.load(values + index, mask=index < count, other=_NEVER)
    from_row = tl.load(source + index, mask=index < direct, other=_NEVER).to(tl.float32)
    return tl.maximum(from_list, from_row), index < tl.maximum(count, direct)


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """Unsigned integers in the order of the floats."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def arrival_time(word: tl.tensor) -> tl.tensor:
    """An Exp(1) number from 32 random bits: `-log(1 - u)`, whose small values keep their precision."""
    uniform = (word.to(tl.float32) + 0.5) * 2.0**-32
    series = uniform * (1.0 + uniform * (0.5 + uniform / 3.0))
    return tl.where(uniform < 2.0**-10, series, -tl.log(1.0 - uniform))
