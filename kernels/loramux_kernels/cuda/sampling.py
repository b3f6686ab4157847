"""Semantics: token[s] = argmax(steered[s]) if greedy, else a draw from softmax(kept(steered[s] / temperature[s])).

Nothing is sorted. One pass over the vocabulary, shared by all programs, finds each row's greatest logit and, where no
token is ruled out, its winner. A row that rules tokens out is finished by one program: it lists the few tokens that
hold nearly all the mass, or takes all where they are many; thresholds come by bisection on the bits of a float.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch, run_all
from loramux_kernels.cuda.steer import prepare_steer
from loramux_kernels.sampling import SamplingBatch

BLOCK = 4096
"""Tokens that a program holds at once, and the most that a row may list."""

_NEVER = tl.constexpr(float("-inf"))
_NOBODY = tl.constexpr(2**31 - 1)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token for each row of `logits` `[S, vocab]`: int64[S]. Arguments as for the public operator, on a GPU."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    run_all(prepare_sample(logits, batch, tokens))
    return tokens


def prepare_sample(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor) -> list[Launch]:
    """The launches that fill `tokens` int64[S]; none of them changes `logits`."""
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    launches = []
    if batch.penalties is not None or batch.bias is not None:
        logits = logits.to(torch.float32, copy=True)
        launches += prepare_steer(logits, batch)
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, BLOCK)
    shared = {
        "logits": logits,
        "logits_stride": logits.stride(0),
        "vocab": vocab,
        "chunk_best": logits.new_empty(rows, chunks, dtype=torch.float32),
        "chunk_token": logits.new_empty(rows, chunks, dtype=torch.int32),
        **{name: getattr(batch, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "step")},
        "BLOCK": BLOCK,
    }
    finish = {
        **shared,
        "tokens": tokens,
        "chunks": chunks,
        "listed": logits.new_empty(rows, BLOCK, dtype=torch.float32),
        "listed_token": logits.new_empty(rows, BLOCK, dtype=torch.int32),
        "BLOCK_CHUNKS": triton.next_power_of_2(chunks),
    }
    scan = Launch(_scan, (rows, chunks), shared, num_warps=4, num_stages=1)
    return [*launches, scan, Launch(_finish, (rows,), finish, num_warps=8, num_stages=1)]


@triton.jit
def _scan(
    logits,
    chunk_best,
    chunk_token,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    step,
    logits_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """The best score of one chunk of one row: of the race, or the logit where the race must wait for a threshold."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    score = tl.load(logits + row * logits_stride + token, mask=token < vocab, other=_NEVER).to(tl.float32)
    if (heat != 0.0) & ~_rules_out(row, vocab, top_k, top_p, min_p):
        quad = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        a, b, c, d = tl.philox(tl.load(seed + row), quad, tl.load(step + row), quad * 0, quad * 0)
        word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        score = score / heat - tl.log(_arrival_time(word))
    best, at = tl.max(score, axis=0, return_indices=True)
    place = row * tl.num_programs(1) + chunk
    tl.store(chunk_best + place, best)
    tl.store(chunk_token + place, chunk * BLOCK + at)


@triton.jit
def _finish(
    logits,
    chunk_best,
    chunk_token,
    listed,
    listed_token,
    tokens,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    step,
    logits_stride,
    vocab,
    chunks,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The winner among a row's chunks, or the whole race where tokens are ruled out."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    bests = tl.load(chunk_best + row * chunks + chunk, mask=chunk < chunks, other=_NEVER)
    best, at = tl.max(bests, axis=0, return_indices=True)
    winner = tl.load(chunk_token + row * chunks + at)
    heat = tl.load(temperature + row)
    if (heat != 0.0) & _rules_out(row, vocab, top_k, top_p, min_p):
        source = logits + row * logits_stride
        values = listed + row * BLOCK
        names = listed_token + row * BLOCK
        k = tl.load(top_k + row)
        k = tl.where((k <= 0) | (k > vocab), vocab, k)
        p = tl.load(top_p + row)
        floor = tl.log(tl.load(min_p + row))
        count, mass = _list_tokens(source, values, names, vocab, best, heat, k, p, floor, BLOCK)
        # More than fit a list: race over the whole vocabulary, as slow as it is rare.
        direct = tl.where(count > BLOCK, vocab, 0)
        count = tl.where(count > BLOCK, 0, count)
        lowest = tl.full((), 0, tl.uint32)
        if k < vocab:
            lowest = _threshold(source, values, count, direct, best, heat, lowest, k.to(tl.float32), False, BLOCK)
            mass = _mass(source, values, count, direct, best, heat, lowest, True, BLOCK)
        if p < 1.0:
            lowest = _threshold(source, values, count, direct, best, heat, lowest, p * mass, True, BLOCK)
        winner = _race(
            source,
            values,
            names,
            count,
            direct,
            best,
            heat,
            lowest,
            floor,
            tl.load(seed + row),
            tl.load(step + row),
            BLOCK,
        )
    tl.store(tokens + row, winner.to(tl.int64))


@triton.jit
def _rules_out(row, vocab, top_k, top_p, min_p):
    k = tl.load(top_k + row)
    return ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)


@triton.jit
def _list_tokens(source, values, names, vocab, best, heat, k, p, floor, BLOCK: tl.constexpr):
    """List the tokens within some margin of the best, all that can stay: (their number, all tokens' mass)."""
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
def _holds(margin, count, held, mass, vocab, k, p, floor):
    """Whether all tokens that stay lie within `margin` of the best: k of them, clearly more than p, or min_p's."""
    return ((k < vocab) & (count >= k)) | (
        (k == vocab) & (((p < 1.0) & (held >= 1.001 * p * mass)) | ((p >= 1.0) & (-floor <= margin)))
    )


@triton.jit
def _threshold(source, values, count, direct, best, heat, lowest, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which on upwards the tokens number, or weigh, at least `target`; not below `lowest`."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    for _ in range(32):
        if _mass(source, values, count, direct, best, heat, tl.maximum(found | bit, lowest), BY_MASS, BLOCK) >= target:
            found = found | bit
        bit = bit >> 1
    return tl.maximum(found, lowest)


@triton.jit
def _mass(source, values, count, direct, best, heat, lowest, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
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
def _race(source, values, names, count, direct, best, heat, lowest, floor, seed, step, BLOCK: tl.constexpr):
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
        score = tl.where(stays, logit / heat - tl.log(_arrival_time(word)), _NEVER)
        best_here, at = tl.max(score, axis=0, return_indices=True)
        here = tl.min(tl.where(tl.arange(0, BLOCK) == at, token, _NOBODY))
        winner = tl.where(best_here > top, here, winner)
        top = tl.maximum(top, best_here)
    return winner


@triton.jit
def _read(source, values, start, count, direct, BLOCK: tl.constexpr):
    """(logits, whether there is one) of a block of the list of `count` tokens, or of the row's `direct` ones."""
    index = start + tl.arange(0, BLOCK)
    from_list = tl.load(values + index, mask=index < count, other=_NEVER)
    from_row = tl.load(source + index, mask=index < direct, other=_NEVER).to(tl.float32)
    return tl.maximum(from_list, from_row), index < tl.maximum(count, direct)


@triton.jit
def _key(value):
    """Unsigned integers in the order of the floats."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _arrival_time(word):
    """An Exp(1) number from 32 random bits: `-log(1 - u)`, whose small values keep their precision."""
    uniform = (word.to(tl.float32) + 0.5) * 2.0**-32
    series = uniform * (1.0 + uniform * (0.5 + uniform / 3.0))
    return tl.where(uniform < 2.0**-10, series, -tl.log(1.0 - uniform))
