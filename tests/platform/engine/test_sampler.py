"""Sampling: what each parameter rules out, that seeds repeat, and that the draws follow the distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_harness import decoding

from loramux.engine.execution.sampler import LARGEST, RequestState, Sampler, draw_of, steer
from loramux.engine.messages import Request, SamplingParams
from loramux.engine.scheduling.sequence import Sequence
from loramux_kernels.sampling import SMALL, choose, keep

EOS = 9


def sequence(name: str = "r", prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 20} | params)
    made = Sequence(Request(id=name, tenant="t", prompt_token_ids=list(prompt), sampling=sampling), 0.0)
    made.token_ids += output
    return made


def truncate(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """The definition: -inf for what top_k, then top_p, then min_p exclude, by sorting the vocabulary."""
    never = float("-inf")
    if 0 < params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], never)
    if params.top_p < 1.0:
        ordered, ids = logits.sort(descending=True, stable=True)
        probs = ordered.double().softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= params.top_p
        outside[0] = False
        logits = logits.index_fill(0, ids[outside], never)
    if params.min_p > 0.0:
        logits = logits.masked_fill(logits < logits.max() + torch.tensor(params.min_p).log(), never)
    return torch.isfinite(logits).nonzero().flatten().tolist()


def kept(logits: torch.Tensor, **params: object) -> list[int]:
    values, ids = keep(logits, draw_of(sequence(**params).request.sampling, 0, 0, 0))
    found = list(range(len(logits))) if ids is None else ids.tolist()
    assert torch.equal(values, logits[found])
    return found


def test_sampler_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([1.0, 2.0, -3.0, 4.0])
    s = sequence(prompt=(1,), output=(2, 2), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = torch.tensor([1.0, 2.0 / 2, -3.0 * 2 - 0.5 - 2 * 0.25, 4.0])
    torch.testing.assert_close(steer(logits, s, RequestState(s.request.sampling, 4)), expected)
    assert logits.tolist() == [1.0, 2.0, -3.0, 4.0], "the model's logits are left alone"


def test_sampler_logit_bias_decides() -> None:
    s = sequence(temperature=0.0, logit_bias={0: 100.0, 3: -100.0})
    (event,) = Sampler(()).sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), decoding([s]))
    assert event.token_id == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 0}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.0}, [0]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
    ],
)
def test_sampler_truncation_keeps_the_tokens_that_each_parameter_allows(params: dict, expected: list[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(logits, **params) == expected
    assert truncate(logits, sequence(**params).request.sampling) == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 2, 50, SMALL, SMALL + 1, 20_000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    steps=st.sampled_from([0, 3, 1000]),
    top_k=st.sampled_from([0, 1, 7, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01, 0.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
)
def test_sampler_truncation_without_sorting_equals_its_definition(
    seed, size, spread, steps, top_k, top_p, min_p
) -> None:
    """With ties (`steps` levels of logits) and with forbidden tokens."""
    torch.manual_seed(seed)
    logits = torch.randn(size) * spread
    if steps:
        logits = (logits * steps / 10).round() * 10 / steps
    logits[torch.rand(size) < 0.1] = float("-inf")
    logits[seed % size] = 1.0
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = truncate(logits, sequence(**params).request.sampling)
    found = [i for i in kept(logits, **params) if logits[i] > float("-inf")]
    # If the mass before a token is top_p to within rounding, the two sums may disagree about this one token.
    assert len(set(found) ^ set(expected)) <= 1


def test_sampler_counts_a_history_once_and_equals_a_fresh_count() -> None:
    torch.manual_seed(0)
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0.0}
    growing = sequence(prompt=(1, 2, 2), **params)
    state = RequestState(growing.request.sampling, 20)
    for token in (5, 5, 2, 7, 5):
        logits = torch.randn(20)
        fresh = RequestState(growing.request.sampling, 20)
        assert torch.equal(steer(logits, growing, state), steer(logits, growing, fresh))
        growing.token_ids.append(token)


def test_sampler_min_tokens_forbids_every_end() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 5.0
    logits[0, 4] = 4.0
    logits[0, 3] = 1.0
    early = sequence(temperature=0.0, min_tokens=2, stop_token_ids=(4,), output=(1,))
    late = sequence(temperature=0.0, min_tokens=2, stop_token_ids=(4,), output=(1, 1))
    sampler = Sampler((EOS,))
    (event,) = sampler.sample(logits, decoding([early]))
    assert (event.token_id, event.finish_reason) == (3, None)
    (event,) = sampler.sample(logits, decoding([late]))
    assert (event.token_id, event.finish_reason) == (EOS, "stop")


def test_sampler_ignore_eos_continues_and_stop_tokens_still_end() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 5.0
    sampler = Sampler((EOS,))
    (event,) = sampler.sample(logits, decoding([sequence(temperature=0.0, ignore_eos=True)]))
    assert (event.token_id, event.finish_reason) == (EOS, None)
    (event,) = sampler.sample(logits, decoding([sequence(temperature=0.0, ignore_eos=True, stop_token_ids=(EOS,))]))
    assert event.finish_reason == "stop"


def test_sampler_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    s = sequence(temperature=0.0, logprobs=2, logit_bias={3: 100.0})
    (event,) = Sampler(()).sample(logits, decoding([s]))
    assert event.token_id == 3
    assert event.logprob == pytest.approx(-2.9957, abs=1e-3)
    assert [t.token_id for t in event.top_logprobs] == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_allowed_tokens_are_the_only_ones_and_logprobs_stay_the_models(temperature: float) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    named = {"logprobs": 0, "logprob_token_ids": (1, 0)}
    s = sequence(temperature=temperature, allowed_token_ids=(3,), **named)
    (event,) = Sampler(()).sample(logits, decoding([s]))
    assert event.token_id == 3
    assert event.logprob == pytest.approx(-2.9957, abs=1e-3)
    assert [t.token_id for t in event.top_logprobs] == [1, 0, 3]
    assert event.top_logprobs[0].logprob == pytest.approx(-1.2040, abs=1e-3)


def test_sampler_min_tokens_gives_way_where_only_ends_are_allowed() -> None:
    logits = torch.zeros(1, 10)
    both, ends = ((EOS, 4), (EOS,))
    asked = [sequence(temperature=0.0, min_tokens=2, allowed_token_ids=allowed) for allowed in (both, ends)]
    assert [Sampler((EOS,)).sample(logits, decoding([one]))[0].token_id for one in asked] == [4, EOS]


def sample_next(sampler: Sampler, logits: torch.Tensor, sequences: list[Sequence]) -> int:
    """Sample a token for each sequence and append it; return the first one's."""
    for event, one in zip(events := sampler.sample(logits, decoding(sequences)), sequences, strict=True):
        one.token_ids.append(event.token_id)
    return events[0].token_id


def test_draw_depends_on_the_seed_and_the_number_of_generated_tokens_alone() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    whole, resumed = sequence("whole", seed=5), sequence("resumed", seed=5)
    tokens = [sample_next(Sampler(()), logits, [whole]) for _ in range(10)]
    resumed.token_ids += tokens[:6]
    assert [sample_next(Sampler(()), logits, [resumed]) for _ in range(4)] == tokens[6:]
    assert len(set(tokens)) > 3


def test_sampler_seed_repeats_with_any_other_rows() -> None:
    torch.manual_seed(0)
    rows = torch.randn(30, 50)

    def run(others: int) -> list[int]:
        batch = [sequence("seeded", seed=42), *(sequence(f"o{i}") for i in range(others))]
        sampler = Sampler(())
        return [sample_next(sampler, row.repeat(others + 1, 1), batch) for row in rows]

    assert run(0) == run(3)
    assert len(set(run(0))) > 5


def test_sampler_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler, s = Sampler(()), sequence(seed=1)
    drawn = [sample_next(sampler, probs.log()[None], [s]) for _ in range(4000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    chi_squared = ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum()
    assert chi_squared < 16.27, "three degrees of freedom, p = 0.001, and the seed is fixed"


def test_sampler_lower_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    cold, hot = sequence("c", seed=1, temperature=0.1), sequence("h", seed=1, temperature=10.0)
    sampler = Sampler(())
    assert {sample_next(sampler, logits, [cold]) for _ in range(50)} == {0}
    assert len({sample_next(sampler, logits, [hot]) for _ in range(50)}) == 4


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.0, "logprobs": 2}]
)
@pytest.mark.parametrize("broken", ["nan", "-inf", "inf"])
def test_sampler_not_finite_logits_end_their_own_row_with_a_fault(params: dict, broken: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 10)
    names = ["before", "broken", "after"]
    alone = [
        Sampler((EOS,)).sample(logits[row : row + 1], decoding([sequence(names[row], **params)]))[0] for row in (0, 2)
    ]
    logits[1] = float(broken)
    if broken != "-inf":
        logits[1, :5] = torch.randn(5)
    told = Sampler((EOS,)).sample(logits, decoding([sequence(name, **params) for name in names]))
    assert [told[0], told[2]] == alone
    assert (told[1].token_id, told[1].finish_reason) == (None, "error")
    assert told[1].fault is not None
    assert told[1].fault.code == "internal_error"
    assert "not finite" in told[1].fault.message


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e-6])
def test_sampler_tiny_temperature_is_greedy_and_not_a_fault(temperature: float) -> None:
    logits = torch.tensor([[1.0, 300.0, 2.0, 299.0]])
    (event,) = Sampler(()).sample(logits, decoding([sequence(temperature=temperature, seed=3)]))
    assert event.token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-4, 1.0, 1e300])
@pytest.mark.parametrize(
    ("row", "params"),
    [
        ([1.0, 300.0, 2.0, 299.0], {"repetition_penalty": 1e-38}),
        ([1.0, 300.0, -2.0, 299.0], {"repetition_penalty": 1e-37}),
        ([1.0, 300.0, -2.0, 299.0], {"frequency_penalty": -1e300, "presence_penalty": 1e300}),
        ([LARGEST, LARGEST, -LARGEST, -LARGEST], {}),
        ([LARGEST, LARGEST, -LARGEST, float("-inf")], {"repetition_penalty": 0.01, "logit_bias": {3: 100.0}}),
        ([-LARGEST, -LARGEST, -LARGEST, -LARGEST], {"repetition_penalty": 100.0}),
        ([1.0, 2.0, 3.0, 4.0], {"logit_bias": {0: 1e300, 1: 1e300}, "top_p": 0.9, "min_p": 0.1, "top_k": 3}),
    ],
)
def test_sampler_steering_that_overflows_still_yields_tokens(
    row: list[float], params: dict, temperature: float
) -> None:
    def neighbour() -> Sequence:
        return sequence("neighbour", temperature=1.0, seed=4, repetition_penalty=1.2)

    logits = torch.tensor([row, [0.5, 0.25, 0.125, 1.0]])
    (alone,) = Sampler(()).sample(logits[1:], decoding([neighbour()]))
    extreme = sequence("extreme", output=(1, 2), temperature=temperature, seed=3, **params)
    told, beside = Sampler(()).sample(logits, decoding([extreme, neighbour()]))
    assert beside == alone
    assert told.fault is None
    assert told.token_id in range(4)
    assert row[told.token_id] > float("-inf"), "a forbidden token stays forbidden"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_row_whose_every_token_is_forbidden_ends_alone(temperature: float) -> None:
    params = {"temperature": temperature, "seed": 1}
    forbidden = sequence("forbidden", min_tokens=3, stop_token_ids=(0, 1, 2, 3), **params)
    told, beside = Sampler(()).sample(torch.ones(2, 4), decoding([forbidden, sequence("beside", **params)]))
    assert (told.token_id, told.finish_reason) == (None, "error")
    assert beside.token_id in range(4)


def test_sampler_token_outside_the_vocabulary_ends_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "loramux.engine.execution.sampler.draw_tokens", lambda logits, draws: [len(logits[0])] * len(draws)
    )
    told, beside = Sampler(()).sample(
        torch.eye(2, 4), decoding([sequence("drawn"), sequence("greedy", temperature=0.0)])
    )
    assert (told.token_id, told.finish_reason) == (None, "error")
    assert (beside.token_id, beside.fault) == (1, None)


def test_sampler_draw_stays_within_its_weights() -> None:
    for logits in ([float("inf")] * 3, [float("nan")] * 3, [0.0, float("-inf"), float("-inf")]):
        assert choose(torch.tensor(logits), 0.7) in range(3)


_EXTREMES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 1e30, -1e30, LARGEST, -LARGEST, float("-inf")])
_FACTORS = st.sampled_from([1e-300, 1e-38, 1e-30, 0.01, 1.0, 100.0, 1e38, 1e300]) | st.floats(1e-300, 1e300)
_TERMS = st.sampled_from([0.0, 2.0, -2.0, 1e38, -1e38, 1e308, -1e308])


@settings(max_examples=200, deadline=None)
@example(  # -1.8e8 times 1e300 is beyond float64's range too
    row=[float("-inf"), -1e30, -1e30, -179769328.0],
    temperature=0.0,
    repetition=1e300,
    presence=0.0,
    frequency=0.0,
    bias={},
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    min_tokens=0,
)
@given(
    row=st.lists(_EXTREMES | st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=12),
    temperature=st.just(0.0) | _FACTORS,
    repetition=_FACTORS,
    presence=_TERMS,
    frequency=_TERMS,
    bias=st.dictionaries(st.integers(0, 3), _TERMS),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([0.0, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 0.5, 1.0, 1e300]),
    min_tokens=st.sampled_from([0, 9]),
)
def test_sampler_extremes_give_a_token_of_the_vocabulary_or_a_fault(
    row, temperature, repetition, presence, frequency, bias, top_k, top_p, min_p, min_tokens
) -> None:
    asked = sequence(
        output=(1, 1, 3),
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        min_tokens=min_tokens,
        seed=5,
    )
    (event,) = Sampler((0,)).sample(torch.tensor([row]), decoding([asked]))
    possible = [i for i, logit in enumerate(row) if logit > float("-inf") and not (min_tokens and i == 0)]
    if possible:
        assert event.fault is None
        assert event.token_id in possible
    else:
        assert (event.token_id, event.finish_reason) == (None, "error")
