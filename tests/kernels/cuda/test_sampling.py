"""Sampling on the device, against the torch reference that sorts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux_kernels.cuda.sampling import BLOCK, BLOCK_CHUNKS, prepare_sample
from loramux_kernels.cuda.sampling import sample as choose
from loramux_kernels.sampling import arrival_times, exclude, sample_reference, steer
from loramux_kernels.tables import IN_PROMPT, NO_TOKEN, LogitBias, Penalties, SamplingBatch


def batch_of(rows: int, device: torch.device, **columns: object) -> SamplingBatch:
    """Neutral parameters but for `columns`: a number, or one for each row."""
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": range(rows), "step": 0}
    neutral |= {"num_rows": rows, "is_steered": 0}
    dtypes = {"seed": torch.int64} | dict.fromkeys(("top_k", "step", "num_rows", "is_steered"), torch.int32)
    tensors = {}
    for name, value in (neutral | columns).items():
        values = torch.as_tensor(list(value) if isinstance(value, range) else value, dtype=dtypes.get(name))
        tensors[name] = values.to(dtypes.get(name, torch.float32)).expand(rows).contiguous().to(device)
    return SamplingBatch(**tensors | {"num_rows": tensors["num_rows"][:1]})


def sample(logits: torch.Tensor, batch: SamplingBatch, run=choose) -> torch.Tensor:
    tokens = torch.full((len(logits),), -7, dtype=torch.int64, device=logits.device)
    run(logits, batch, tokens)
    return tokens


def check(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The reference's tokens; if rounding decided, a token that is as close to the maximum."""
    before = logits.clone()
    tokens = sample(logits, batch)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the model's logits are left alone"
    assert tokens.dtype == torch.int64
    wanted = sample(logits, batch, sample_reference)
    if torch.equal(tokens, wanted):
        return tokens
    assert torch.equal(tokens < 0, wanted < 0)
    steered = steer(logits.float(), batch)
    heat = torch.where(batch.temperature == 0, 1.0, batch.temperature)
    looser = replace(batch, top_p=batch.top_p + 1e-4, min_p=batch.min_p * 0.9999)
    race = -arrival_times(batch.seed, batch.step, logits.shape[1]).log()
    scores = exclude(steered / heat[:, None], looser) + torch.where(batch.temperature == 0, 0.0, 1.0)[:, None] * race
    won = scores.gather(1, tokens.clamp(min=0)[:, None])
    assert bool((won >= scores.gather(1, wanted.clamp(min=0)[:, None]) - 1e-4).all())
    return tokens


@settings(max_examples=12, deadline=None)
@given(
    vocab=st.integers(1, 200) | st.integers(4000, 9000),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            st.sampled_from([0, 0, 1, 3, 50, 10_000]),
            st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.9, 0.999]),
            st.sampled_from([0.0, 0.0, 0.05, 1.0]),
            st.integers(-(2**63), 2**63 - 1),
            st.integers(0, 2**31 - 1),
        ),
        min_size=1,
        max_size=4,
    ),
    steered=st.booleans(),
)
def test_sampling_equals_the_reference(device, vocab, spread, dtype, rows, steered):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(rows), vocab, generator=generator) * spread).to(dtype).to(device)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "step")
    batch = batch_of(len(rows), device, **dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    if steered:
        penalties = some_penalties(len(rows), vocab, 30, generator)
        ints = torch.randint(0, min(len(rows), vocab), (2, 5), generator=generator, dtype=torch.int32)
        terms = torch.tensor([float("-inf") if vocab > 1 else 1.0, *[9.0] * 4])
        bias = LogitBias(ints[0], ints[1], terms, torch.tensor([1], dtype=torch.int32))
        is_steered = penalties.counters >= 0
        is_steered[ints[0, 0]] = True
        batch = replace(
            batch, penalties=on(penalties, device), bias=on(bias, device), is_steered=is_steered.int().to(device)
        )
    check(logits, batch)


def some_penalties(rows: int, vocab: int, count: int, generator: torch.Generator) -> Penalties:
    """Rows share no sequence, some rows have no penalties, and some follow drafts."""

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    counts = torch.zeros(rows + 1, vocab + 3, dtype=torch.int32)
    counts[ints(rows + 1, count).long(), ints(vocab, count).long()] = ints(4, count) | IN_PROMPT * ints(2, count)
    counters = torch.randperm(rows + 1, generator=generator)[:rows].int()
    counters[ints(rows, 1).long()] = -1
    drafts = torch.where(counters[:, None] < 0, -1, ints(vocab, rows, 2))
    prices = torch.rand(3, rows, generator=generator)
    return Penalties(counts, counters, prices[0] + 0.5, prices[1], prices[2], drafts)


def on(struct, device: torch.device):
    given = {field.name: getattr(struct, field.name) for field in fields(struct)}
    return type(struct)(**{name: None if tensor is None else tensor.to(device) for name, tensor in given.items()})


def test_sampling_penalties_follow_their_definitions(device):
    """A token generated once and in the prompt; one in the prompt alone; one generated twice; one that is a draft."""
    logits = torch.tensor([[1.0, 2.0, -3.0, 4.0, 6.0]], device=device)
    counts = torch.tensor([[0, IN_PROMPT, 2, IN_PROMPT + 1, 0]], dtype=torch.int32)
    zero, drafts = torch.zeros(1, dtype=torch.int32), torch.tensor([[4, -1]], dtype=torch.int32)
    penalties = Penalties(counts, zero, *torch.tensor([[2.0], [0.5], [0.25]]), drafts)
    from loramux_kernels.cuda.sampling import prepare_steer

    batch = replace(batch_of(1, device, is_steered=1), penalties=on(penalties, device))
    changed = logits.clone()
    for launch in prepare_steer(logits, batch, changed):
        launch.run()
    wanted = [[1.0, 1.0, -6.0 - 0.5 - 0.5, 2.0 - 0.5 - 0.25, 3.0 - 0.5 - 0.25]]
    torch.testing.assert_close(changed.cpu(), torch.tensor(wanted))
    torch.testing.assert_close(changed, steer(logits, batch))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}])
@pytest.mark.parametrize("steered", [False, True])
def test_sampling_row_without_a_finite_best_has_no_token(device, params, steered):
    """One NaN, one +inf, -inf alone, and none of these; the first two in the second chunk."""
    logits = torch.randn(4, BLOCK + 9, generator=torch.Generator().manual_seed(1)).to(device)
    logits[0, BLOCK + 2], logits[1, BLOCK + 3], logits[2] = float("nan"), float("inf"), float("-inf")
    batch = batch_of(4, device, **params)
    if steered:
        ones = torch.ones(4)
        penalties = Penalties(torch.ones(4, BLOCK + 9, dtype=torch.int32), torch.arange(4).int(), ones, ones, ones)
        batch = replace(batch, penalties=on(penalties, device), is_steered=torch.ones(4).int().to(device))
    tokens = check(logits, batch).tolist()
    assert tokens[:3] == [NO_TOKEN] * 3
    assert tokens[3] >= 0


def test_sampling_rows_after_the_last_are_neither_steered_nor_drawn(device):
    """A bucket of four rows with two: what the others hold is that of earlier steps, and no token, count or row."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).to(device)
    wild = [0, 1, 10**8, 10**8]
    batch = batch_of(4, device, num_rows=2, is_steered=[0, 1, 1, 1], top_k=[0, 3, -5, 9], top_p=[1.0, 0.8, -1.0, 9.0])
    penalties = Penalties(
        torch.ones(2, 50, dtype=torch.int32), torch.tensor(wild, dtype=torch.int32), *torch.full((3, 4), 1.5)
    )
    rows, token_ids = torch.tensor([1, 10**8]).int(), torch.tensor([7, 10**8]).int()
    bias = LogitBias(rows, token_ids, torch.tensor([9.0, 9.0]), torch.tensor([1]).int())
    batch = replace(batch, penalties=on(penalties, device), bias=on(bias, device))
    tokens = sample(logits, batch)
    assert tokens[2:].tolist() == [-7, -7]
    assert tokens[1] == 7
    assert torch.equal(tokens[:1], check(logits[:1], batch_of(1, device)))


def test_sampling_launches_are_few_and_the_same_for_all_rows_of_a_recorded_step(device):
    logits, ints = torch.zeros(4, 50, device=device), torch.zeros(4, dtype=torch.int32)
    plain = batch_of(4, device)
    penalties = Penalties(torch.zeros(4, 50, dtype=torch.int32), ints, *torch.ones(3, 4))
    recorded = replace(plain, penalties=penalties, bias=LogitBias(ints, ints, torch.ones(4), ints[:1]))
    names = [
        [launch.kernel.__name__ for launch in prepare_sample(logits, batch, ints.long())] for batch in (plain, recorded)
    ]
    assert names == [["_scan", "_finish"], ["_steer", "_bias", "_scan", "_finish", "_finish"]]


def test_sampling_greedy_takes_the_first_of_equals(device):
    logits = torch.zeros(2, BLOCK + 10, device=device)
    logits[1, [7, BLOCK + 3]] = 1.0
    assert check(logits, batch_of(2, device, temperature=0.0)).tolist() == [0, 7]


def test_sampling_compares_more_chunks_than_a_program_holds_at_once(device):
    """The best token is in the last chunk of the first block, in the first of the second, and in both."""
    edge = BLOCK_CHUNKS * BLOCK
    logits = torch.zeros(4, edge + 10, device=device)
    logits[0, edge - 1] = logits[1, edge] = 1.0
    logits[2, [edge - 1, edge]] = 1.0
    tokens = check(logits, batch_of(4, device, temperature=0.0))
    assert tokens.tolist() == [edge - 1, edge, edge - 1, 0]


def test_sampling_flat_rows_race_over_the_whole_vocabulary(device):
    """More tokens stay than a list holds."""
    logits = torch.zeros(2, 2 * BLOCK + 5, device=device)
    check(logits, batch_of(2, device, top_p=[0.99, 0.999], seed=[3, 4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("params", [{"top_p": 0.3}, {"top_k": 5000}, {"top_k": 6000, "top_p": 0.9}, {"top_k": 3}])
def test_sampling_threshold_lies_between_the_last_token_that_stays_and_the_next(device, dtype, params):
    """Logits of both signs with many equals, in every dtype; the thresholds are compared by what stays."""
    generator = torch.Generator().manual_seed(3)
    for shift in (-20.0, 0.0, 20.0):
        logits = ((torch.randn(8, BLOCK + 2000, generator=generator) * 16).round() / 16 + shift).to(dtype).to(device)
        check(logits, batch_of(8, device, temperature=1.5, **params))


def test_sampling_seed_and_step_draw_the_same_with_any_other_rows(device):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).to(device)
    alone = sample(logits, batch_of(1, device, seed=42, step=7))
    beside = sample(
        logits.expand(5, -1).contiguous(), batch_of(5, device, seed=[1, 42, 2, 42, 3], step=[7, 7, 7, 8, 7])
    )
    assert beside[1] == alone[0]
    assert len(set(beside.tolist())) >= 4


def test_sampling_draws_follow_the_distribution(device):
    """Each row has its own step under one seed."""
    draws = 200
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(draws, -1).contiguous().to(device)
    tokens = sample(logits, batch_of(draws, device, seed=[11] * draws, step=range(draws)))
    wanted = draws * probabilities
    counts = torch.bincount(tokens.cpu(), minlength=4)
    assert ((counts - wanted) ** 2 / wanted).sum() < 16.27, "three degrees of freedom, p = 0.001; the seed is fixed"


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
    ],
)
def test_sampling_excluded_tokens_are_never_drawn(device, params, kept):
    draws = 4
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(draws, -1).contiguous().to(device)
    assert set(check(logits, batch_of(draws, device, **params)).tolist()) <= kept
