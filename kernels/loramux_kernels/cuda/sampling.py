"""Semantics: token[s] = argmax(steered[s]) if greedy, else a draw from softmax(kept(steered[s] / temperature[s])).

Nothing is sorted. One pass over the vocabulary, shared by all programs, finds each row's greatest logit and, where no
token is ruled out, its winner. A row that rules tokens out is finished by one program: it lists the few tokens that
hold nearly all the mass, or takes all where they are many, and finds each threshold by bisection on the
bits of a float.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.candidates import arrival_time, list_tokens, mass_from, race, threshold
from loramux_kernels.cuda.launch import Launch, run_all
from loramux_kernels.cuda.steer import prepare_steer
from loramux_kernels.sampling import SamplingBatch

BLOCK = 4096
"""Tokens that a program holds at once, and the most that a row may list."""

_NEVER = tl.constexpr(float("-inf"))


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
    logits: tl.tensor, chunk_best: tl.tensor, chunk_token: tl.tensor, temperature: tl.tensor, top_k: tl.tensor,
    top_p: tl.tensor, min_p: tl.tensor, seed: tl.tensor, step: tl.tensor, logits_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
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
        score = score / heat - tl.log(arrival_time(word))
    best, at = tl.max(score, axis=0, return_indices=True)
    place = row * tl.num_programs(1) + chunk
    tl.store(chunk_best + place, best)
    tl.store(chunk_token + place, chunk * BLOCK + at)


@triton.jit
def _finish(
    logits: tl.tensor, chunk_best: tl.tensor, chunk_token: tl.tensor, listed: tl.tensor, listed_token: tl.tensor,
    tokens: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seed: tl.tensor, step: tl.tensor, logits_stride: tl.tensor, vocab: tl.tensor, chunks: tl.tensor,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
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
        count, mass = list_tokens(source, values, names, vocab, best, heat, k, p, floor, BLOCK)
        # More than fit a list: race over the whole vocabulary, as slow as it is rare.
        direct = tl.where(count > BLOCK, vocab, 0)
        count = tl.where(count > BLOCK, 0, count)
        lowest = tl.full((), 0, tl.uint32)
        if k < vocab:
            lowest = threshold(source, values, count, direct, best, heat, lowest, k.to(tl.float32), False, BLOCK)
            mass = mass_from(source, values, count, direct, best, heat, lowest, True, BLOCK)
        if p < 1.0:
            # Never 0, which no token at all would reach as well: the best one always stays.
            target = tl.maximum(p * mass, 1e-30)
            lowest = threshold(source, values, count, direct, best, heat, lowest, target, True, BLOCK)
        winner = race(
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
def _rules_out(row: tl.tensor, vocab: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    k = tl.load(top_k + row)
    return ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
