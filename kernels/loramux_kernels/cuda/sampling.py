"""From logits to tokens, as Triton kernels: masks of constrained rows, penalties, truncation, and the draw.

Semantics:

    forbid_tokens   logits[rows[m], t] = -inf if bit t % 32 of words[m, t // 32] is 0, or words[m] ends before t
    sample          tokens[s] = argmax(steered[s]) if greedy, else a draw from softmax(kept(steered[s] / heat[s])), or
                    NO_TOKEN if steered[s] holds NaN, +inf, or -inf alone; heat: temperature, s: a row below num_rows

The vocabulary is never sorted. One pass over it, shared by all programs, finds each row's greatest logit, and the
row's winner if all tokens are allowed. If a row excludes tokens (top-k, top-p or min-p), one program finishes it. The
program lists the few tokens that hold nearly all the mass; if these are too many for the list, it takes all tokens. It
finds each threshold by its bits, two at a time: a pass over the candidates compares three keys with the target. Every
pass keeps a sum for each place in a block and adds these once at its end, because the warps of a program wait for each
other whenever they add something together.

Penalties and bias come first (`prepare_steer`), on a float32 copy of the logits of the rows that ask for them. The
counts of a sequence's tokens are kept on the device (`Penalties`), so no launch reads a history.

A CUDA graph holds all five launches. Programs of rows that do not ask for penalties or bias, and of rows that only pad,
end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch, run_all
from loramux_kernels.tables import IN_PROMPT, NO_TOKEN, SamplingBatch

BLOCK = 4096
"""Tokens that a program holds at once, and the most tokens that a row may list."""

BLOCK_CHUNKS = 32
"""Chunks whose winners a program compares at once. The number of chunks of a vocabulary is not a constant of the
kernel: adapters with more tokens than the base then need no compilation."""

ROUNDS = {torch.float32: 16, torch.float16: 10, torch.bfloat16: 8}
"""Rounds that find a threshold, two bits each: the further bits of a logit in float32 are those of its sign."""

TERMS = 1024
"""Number of terms of a bias that a program takes."""

_NEVER = tl.constexpr(float("-inf"))
_INFINITE = tl.constexpr(float("inf"))
_NOT_A_NUMBER = tl.constexpr(float("nan"))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_LAST = tl.constexpr(2**31 - 1)
"""A number after every token."""
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_IN_PROMPT = tl.constexpr(IN_PROMPT)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Remove tokens from rows of `logits`, in place. Arguments as for the public operator, on a GPU."""
    if len(rows):
        prepare_forbid(logits, rows, words).run()


def prepare_forbid(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> Launch:
    """Return the launch that changes `logits`: a program for each row and block of tokens. It writes only forbidden
    tokens."""
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    assert words.is_contiguous(), "words are contiguous"
    arguments = {
        "logits": logits,
        "rows": rows,
        "words": words,
        "logits_stride": logits.stride(0),
        "vocab": logits.shape[1],
        "num_words": words.shape[1],
        "BLOCK": BLOCK,
    }
    return Launch(_forbid, (len(rows), triton.cdiv(logits.shape[1], BLOCK)), arguments, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["num_words"])
def _forbid(
    logits: tl.tensor, rows: tl.tensor, words: tl.tensor, logits_stride: tl.tensor, vocab: tl.tensor,
    num_words: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Forbid tokens of one row in one block of tokens for each program."""
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = token // 32
    own = tl.load(words + number * num_words + word, mask=word < num_words, other=0)
    is_allowed = (own >> (token % 32)) & 1
    row = tl.load(rows + number)
    never = tl.full((BLOCK,), _NEVER, dtype=tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + token, never, mask=(token < vocab) & (is_allowed == 0))


def sample(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor) -> None:
    """Put a token for each row of `logits` into `tokens`. Arguments as for the public operator, on a GPU."""
    run_all(prepare_sample(logits, batch, tokens))


def prepare_sample(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor) -> list[Launch]:
    """Return the launches that fill `tokens` int64[S]; none of them changes `logits`."""
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, BLOCK)
    chunk_best = logits.new_empty(rows, chunks, dtype=torch.float32)
    may_steer = batch.penalties is not None
    # Rows as far apart as those of `logits`. If no row is steered, it is not read.
    steered = logits.new_empty(rows, logits.stride(0), dtype=torch.float32) if may_steer else chunk_best
    shared = {
        "logits_stride": logits.stride(0),
        "vocab": vocab,
        "chunk_best": chunk_best,
        "chunk_token": logits.new_empty(rows, chunks, dtype=torch.int32),
        **{name: getattr(batch, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "step")},
        "num_rows": batch.num_rows,
        "is_steered": batch.is_steered,
        "BLOCK": BLOCK,
    }
    finish = {
        **shared,
        "tokens": tokens,
        "chunks": chunks,
        "listed": logits.new_empty(rows, BLOCK, dtype=torch.float32),
        "listed_token": logits.new_empty(rows, BLOCK, dtype=torch.int32),
        "BLOCK_CHUNKS": BLOCK_CHUNKS,
    }
    launches = prepare_steer(logits, batch, steered) if may_steer else []
    scan = {**shared, "logits": logits, "steered": steered}
    launches.append(Launch(_scan, (rows, chunks), scan, num_warps=4, num_stages=1))
    for source in (logits, steered)[: 1 + may_steer]:
        of_source = {
            "logits": source,
            "OF_STEERED": source is steered,
            # Candidates that a pass reads at once: more would not fit the registers.
            "PASS_BLOCK": BLOCK if source.dtype == torch.float32 else 2 * BLOCK,
            "ROUNDS": ROUNDS[source.dtype],
        }
        # A thread of 32 warps has 64 registers at most, too few for its part of a block.
        launches.append(Launch(_finish, (rows,), finish | of_source, num_warps=16, num_stages=1))
    return launches


def prepare_steer(logits: torch.Tensor, batch: SamplingBatch, steered: torch.Tensor) -> list[Launch]:
    """Return the launches that put the steered rows of `logits` `[S, vocab]` into float32 `steered`, whose rows have
    the same stride. Other rows are not written."""
    rows, vocab = logits.shape
    shared = {"steered": steered, "num_rows": batch.num_rows, "logits_stride": logits.stride(0), "vocab": vocab}
    p, b = batch.penalties, batch.bias
    assert p is not None, "rows with a bias have penalties too, which may be neutral"
    assert p.counts.shape[1] >= vocab, "every token has a count"
    steer = {
        **shared,
        "logits": logits,
        "is_steered": batch.is_steered,
        "counts": p.counts,
        "counters": p.counters,
        "drafts": p.counters if p.drafts is None else p.drafts,
        "repetition": p.repetition,
        "presence": p.presence,
        "frequency": p.frequency,
        "counts_stride": p.counts.stride(0),
        "num_drafts": 0 if p.drafts is None else p.drafts.shape[1],
        "BLOCK": BLOCK,
    }
    launches = [Launch(_steer, (rows, triton.cdiv(vocab, BLOCK)), steer, num_warps=4, num_stages=1)]
    if b is not None:
        terms = {"rows": b.rows, "token_ids": b.token_ids, "values": b.values, "number": b.number}
        bias = {**shared, **terms, "BLOCK": TERMS}
        launches.append(Launch(_bias, (triton.cdiv(len(b.rows), TERMS),), bias, num_warps=4, num_stages=1))
    return launches


@triton.jit(do_not_specialize=["num_drafts"])
def _steer(
    logits: tl.tensor, steered: tl.tensor, is_steered: tl.tensor, num_rows: tl.tensor, counts: tl.tensor,
    counters: tl.tensor, drafts: tl.tensor, repetition: tl.tensor, presence: tl.tensor, frequency: tl.tensor,
    logits_stride: tl.tensor, counts_stride: tl.tensor, vocab: tl.tensor, num_drafts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copy one chunk of one row, with penalties on the tokens that its sequence has read or generated."""
    row = tl.program_id(0).to(tl.int64)
    if (row < tl.load(num_rows)) & (tl.load(is_steered + row) != 0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        place = row * logits_stride + token
        logit = tl.load(logits + place, mask=inside, other=_NEVER).to(tl.float32)
        counter = tl.load(counters + row).to(tl.int64)
        own = counts + counter * counts_stride
        count = tl.load(own + token, mask=token < tl.where(counter >= 0, vocab, 0), other=0)
        for number in range(0, num_drafts):
            count += (token == tl.load(drafts + row * num_drafts + number)).to(tl.int32)
        written = (count & (_IN_PROMPT - 1)).to(tl.float32)
        factor = tl.load(repetition + row)
        changed = tl.where(logit > 0, logit / factor, logit * factor)
        changed -= tl.load(frequency + row) * written + tl.where(written > 0, tl.load(presence + row), 0.0)
        # A logit that is not finite stays, so that its row is found to have no token.
        is_changed = (count != 0) & (logit < _INFINITE)
        tl.store(steered + place, tl.where(is_changed, tl.minimum(changed, _LARGEST), logit), mask=inside)


@triton.jit
def _bias(
    steered: tl.tensor, rows: tl.tensor, token_ids: tl.tensor, values: tl.tensor, number: tl.tensor,
    num_rows: tl.tensor, logits_stride: tl.tensor, vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.load(number)
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ids + index, mask=inside, other=0)
    inside &= (row < tl.load(num_rows)) & (token < vocab)
    place = steered + row * logits_stride + token
    logit = tl.load(place, mask=inside, other=0.0)
    changed = tl.minimum(logit + tl.load(values + index, mask=inside, other=0.0), _LARGEST)
    tl.store(place, tl.where(logit < _INFINITE, changed, logit), mask=inside)


@triton.jit
def _scan(
    logits: tl.tensor, steered: tl.tensor, chunk_best: tl.tensor, chunk_token: tl.tensor, temperature: tl.tensor,
    top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, seed: tl.tensor, step: tl.tensor, num_rows: tl.tensor,
    is_steered: tl.tensor, logits_stride: tl.tensor, vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the best score of one chunk of one row: of the race, or the logit if the race must wait for a threshold.
    NaN if the chunk holds NaN or +inf, and no token if it holds only -inf."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if row < tl.load(num_rows):
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        is_own = tl.load(is_steered + row) != 0
        place = row * logits_stride + token
        plain = tl.load(logits + place, mask=token < tl.where(is_own, 0, vocab), other=_NEVER).to(tl.float32)
        changed = tl.load(steered + place, mask=token < tl.where(is_own, vocab, 0), other=_NEVER)
        score = tl.where(is_own, changed, plain)
        is_bad = tl.max((_is_nan(score) | (score == _INFINITE)).to(tl.int32), axis=0) != 0
        has_token = tl.max((score > _NEVER).to(tl.int32), axis=0) != 0
        score = tl.where(_is_nan(score), _NEVER, score)
        heat = tl.load(temperature + row)
        if (heat != 0.0) & ~_rules_out(row, vocab, top_k, top_p, min_p):
            quad = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            a, b, c, d = tl.philox(tl.load(seed + row), quad, tl.load(step + row), quad * 0, quad * 0)
            # The four words of a counter go to four neighbouring tokens, as in `race`.
            word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
            score = score / heat - tl.log(arrival_time(word))
        best, at = tl.max(score, axis=0, return_indices=True)
        own = row * tl.num_programs(1) + chunk
        tl.store(chunk_best + own, tl.where(is_bad, _NOT_A_NUMBER, best))
        tl.store(chunk_token + own, tl.where(has_token, chunk * BLOCK + at, _LAST))


@triton.jit(do_not_specialize=["chunks"])
def _finish(
    logits: tl.tensor, chunk_best: tl.tensor, chunk_token: tl.tensor, listed: tl.tensor, listed_token: tl.tensor,
    tokens: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seed: tl.tensor, step: tl.tensor, num_rows: tl.tensor, is_steered: tl.tensor, logits_stride: tl.tensor,
    vocab: tl.tensor, chunks: tl.tensor,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, PASS_BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    OF_STEERED: tl.constexpr,
) -> None:  # fmt: skip
    """Store the winner among a row's chunks; run the whole race if the row excludes tokens. One launch is for the rows
    of the model's logits, and one for the steered rows, whose dtype differs."""
    row = tl.program_id(0).to(tl.int64)
    if (row >= tl.load(num_rows)) | ((tl.load(is_steered + row) != 0) != OF_STEERED):
        return
    is_bad = tl.full((), 0, tl.int32)
    best = tl.full((), _NEVER, tl.float32)
    winner = tl.load(chunk_token + row * chunks)
    for start in range(0, chunks, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)
        bests = tl.load(chunk_best + row * chunks + chunk, mask=chunk < chunks, other=_NEVER)
        is_bad = tl.maximum(is_bad, tl.max(_is_nan(bests).to(tl.int32), axis=0))
        best_here, at = tl.max(tl.where(_is_nan(bests), _NEVER, bests), axis=0, return_indices=True)
        # The first of equals wins.
        winner = tl.where(best_here > best, tl.load(chunk_token + row * chunks + start + at), winner)
        best = tl.maximum(best, best_here)
    heat = tl.load(temperature + row)
    has_token = (is_bad == 0) & (winner < vocab)
    if has_token & (heat != 0.0) & _rules_out(row, vocab, top_k, top_p, min_p):
        source = logits + row * logits_stride
        values = listed + row * BLOCK
        names = listed_token + row * BLOCK
        k = tl.load(top_k + row)
        k = tl.where((k <= 0) | (k > vocab), vocab, k)
        p = tl.load(top_p + row)
        floor = tl.log(tl.load(min_p + row))
        count, mass = list_tokens(source, values, names, vocab, best, heat, k, p, floor, BLOCK)
        # If more tokens qualify than fit the list, the race reads the whole vocabulary. This is slow, and rare.
        direct = tl.where(count > BLOCK, vocab, 0)
        count = tl.where(count > BLOCK, 0, count)
        lowest = tl.full((), 0, tl.uint32)
        if k < vocab:
            wanted = k.to(tl.float32)
            lowest = threshold(source, values, count, direct, best, heat, lowest, wanted, False, ROUNDS, PASS_BLOCK)
            mass = mass_from(source, values, count, direct, best, heat, lowest, PASS_BLOCK)
        if p < 1.0:
            # Never 0: a mass of 0 would be reached without any token. So the best token always stays.
            target = tl.maximum(p * mass, 1e-30)
            lowest = threshold(source, values, count, direct, best, heat, lowest, target, True, ROUNDS, PASS_BLOCK)
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
    tl.store(tokens + row, tl.where(has_token & (winner < vocab), winner, _NO_TOKEN).to(tl.int64))


@triton.jit
def _is_nan(value: tl.tensor) -> tl.tensor:
    return value != value  # noqa: PLR0124 - true for NaN alone


@triton.jit
def _rules_out(row: tl.tensor, vocab: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    k = tl.load(top_k + row)
    return ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)


# A row's candidates are `count` listed tokens. If they do not fit the list, they are the first `direct` tokens of the
# row itself. One of the two numbers is always 0.


@triton.jit
def list_tokens(
    source: tl.tensor, values: tl.tensor, names: tl.tensor, vocab: tl.tensor, best: tl.tensor, heat: tl.tensor,
    k: tl.tensor, p: tl.tensor, floor: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """List all tokens that can stay: those within some margin of the best. Return (their number, the mass of all
    tokens)."""
    near, middle, far = 4.0, 8.0, 14.0
    none = tl.zeros((BLOCK,), tl.int32)
    nothing = tl.zeros((BLOCK,), tl.float32)
    near_counts, middle_counts, far_counts = none, none, none
    near_masses, middle_masses, far_masses, masses = nothing, nothing, nothing, nothing
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        distance = (best - tl.load(source + token, mask=token < vocab, other=_NEVER).to(tl.float32)) / heat
        weight = tl.exp(-distance)
        near_counts += (distance <= near).to(tl.int32)
        middle_counts += (distance <= middle).to(tl.int32)
        far_counts += (distance <= far).to(tl.int32)
        near_masses += tl.where(distance <= near, weight, 0.0)
        middle_masses += tl.where(distance <= middle, weight, 0.0)
        far_masses += tl.where(distance <= far, weight, 0.0)
        masses += weight
    near_count, middle_count, far_count = tl.sum(near_counts), tl.sum(middle_counts), tl.sum(far_counts)
    mass = tl.sum(masses)
    margin, within = float("inf"), vocab
    if _holds(far, far_count, tl.sum(far_masses), mass, vocab, k, p, floor):
        margin, within = far, far_count
    if _holds(middle, middle_count, tl.sum(middle_masses), mass, vocab, k, p, floor):
        margin, within = middle, middle_count
    if _holds(near, near_count, tl.sum(near_masses), mass, vocab, k, p, floor):
        margin, within = near, near_count
    count = tl.where(within > BLOCK, within, 0)
    # Nothing is listed if the list cannot hold all.
    for start in range(0, tl.where(within > BLOCK, 0, vocab), BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(source + token, mask=token < vocab, other=_NEVER).to(tl.float32)
        listed = (token < vocab) & ((best - logit) / heat <= margin)
        place = count + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(values + place, logit, mask=listed & (place < BLOCK))
        tl.store(names + place, token, mask=listed & (place < BLOCK))
        count += tl.sum(listed.to(tl.int32))
    # Other threads of this program read the list that was just written.
    tl.debug_barrier()
    return count, mass


@triton.jit
def _holds(
    margin: tl.tensor, count: tl.tensor, held: tl.tensor, mass: tl.tensor, vocab: tl.tensor, k: tl.tensor,
    p: tl.tensor, floor: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return whether all tokens that stay are within `margin` of the best: k of them, clearly more than p, or
    min_p's."""
    return ((k < vocab) & (count >= k)) | (
        (k == vocab) & (((p < 1.0) & (held >= 1.001 * p * mass)) | ((p >= 1.0) & (-floor <= margin)))
    )


@triton.jit
def threshold(
    source: tl.tensor, values: tl.tensor, count: tl.tensor, direct: tl.tensor, best: tl.tensor, heat: tl.tensor,
    lowest: tl.tensor, target: tl.tensor,
    BY_MASS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the largest key at and above which the number, or the mass, of tokens is at least `target`; at least
    `lowest`."""
    found = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 30, tl.uint32)
    # From the highest bits, because the keys are unsigned integers in the order of the floats.
    for _ in range(ROUNDS):
        first = tl.maximum(found + one, lowest)
        second = tl.maximum(found + one * 2, lowest)
        third = tl.maximum(found + one * 3, lowest)
        firsts = tl.zeros((BLOCK,), tl.float32)
        seconds, thirds = firsts, firsts
        for start in range(0, tl.maximum(count, direct), BLOCK):
            logit, inside = _read(source, values, start, count, direct, BLOCK)
            key = _key(logit)
            size = tl.where(inside, tl.exp((logit - best) / heat), 0.0) if BY_MASS else inside.to(tl.float32)
            firsts += tl.where(key >= first, size, 0.0)
            seconds += tl.where(key >= second, size, 0.0)
            thirds += tl.where(key >= third, size, 0.0)
        # A sum of fewer numbers is never more, because none is negative and all are added in the same order.
        found += tl.where(tl.sum(firsts) >= target, one, 0)
        found += tl.where(tl.sum(seconds) >= target, one, 0)
        found += tl.where(tl.sum(thirds) >= target, one, 0)
        one = one >> 2
    return tl.maximum(found, lowest)


@triton.jit
def mass_from(
    source: tl.tensor, values: tl.tensor, count: tl.tensor, direct: tl.tensor, best: tl.tensor, heat: tl.tensor,
    lowest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the mass of the tokens whose keys are at least `lowest`."""
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.maximum(count, direct), BLOCK):
        logit, inside = _read(source, values, start, count, direct, BLOCK)
        masses += tl.where(inside & (_key(logit) >= lowest), tl.exp((logit - best) / heat), 0.0)
    return tl.sum(masses)


@triton.jit
def race(
    source: tl.tensor, values: tl.tensor, names: tl.tensor, count: tl.tensor, direct: tl.tensor, best: tl.tensor,
    heat: tl.tensor, lowest: tl.tensor, floor: tl.tensor, seed: tl.tensor, step: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the token that arrives first among those that stay."""
    top = tl.full((BLOCK,), _NEVER, tl.float32)
    winner = tl.full((BLOCK,), _LAST, tl.int32)
    for start in range(0, tl.maximum(count, direct), BLOCK):
        logit, inside = _read(source, values, start, count, direct, BLOCK)
        index = start + tl.arange(0, BLOCK)
        token = tl.where(index < direct, index, tl.load(names + index, mask=index < count, other=0))
        quad = token // 4
        a, b, c, d = tl.philox(seed, quad, step, quad * 0, quad * 0)
        lane = token % 4
        word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
        stays = inside & (_key(logit) >= lowest) & ((logit - best) / heat >= floor)
        # Differences from the best are at most 0, so the division can only overflow to -inf.
        score = tl.where(stays, (logit - best) / heat - tl.log(arrival_time(word)), _NEVER)
        winner = tl.where(score > top, token, winner)
        top = tl.maximum(top, score)
    # The first of equals wins.
    return tl.min(tl.where(top == tl.max(top, axis=0), winner, _LAST), axis=0)


@triton.jit
def _read(
    source: tl.tensor, values: tl.tensor, start: tl.tensor, count: tl.tensor, direct: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return (logits, whether the index exists) for a block of the `count` listed tokens, or of the row's first
    `direct`."""
    index = start + tl.arange(0, BLOCK)
    from_list = tl.load(values + index, mask=index < count, other=_NEVER)
    from_row = tl.load(source + index, mask=index < direct, other=_NEVER).to(tl.float32)
    return tl.maximum(from_list, from_row), index < tl.maximum(count, direct)


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """Map floats to unsigned integers of the same order."""
    # Adding 0.0 turns -0.0 into 0.0: equal logits must have equal keys.
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def arrival_time(word: tl.tensor) -> tl.tensor:
    """Return an Exp(1) number from 32 random bits: `-log(1 - u)`. A series keeps the precision of small values."""
    uniform = (word.to(tl.float32) + 0.5) * 2.0**-32
    series = uniform * (1.0 + uniform * (0.5 + uniform / 3.0))
    return tl.where(uniform < 2.0**-10, series, -tl.log(1.0 - uniform))
