"""Sampling: what each parameter rules out, that seeds repeat, and that the draws follow the distribution."""

from __future__ import annotations

import pytest
import torch

from loramux.engine.request import Request, SamplingParams
from loramux.engine.sampler import Sampler, steer, truncate
from loramux.engine.sequence import Sequence

EOS = 9


def sequence(name: str = "r", prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 20} | params)
    made = Sequence(Request(id=name, tenant="t", prompt_token_ids=list(prompt), sampling=sampling), 0.0)
    made.token_ids += output
    return made


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits).nonzero().flatten().tolist()


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([1.0, 2.0, -3.0, 4.0])
    s = sequence(prompt=(1,), output=(2, 2), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = torch.tensor([1.0, 2.0 / 2, -3.0 * 2 - 0.5 - 2 * 0.25, 4.0])
    torch.testing.assert_close(steer(logits, s), expected)
    assert logits.tolist() == [1.0, 2.0, -3.0, 4.0], "the model's logits are left alone"


def test_logit_bias_decides() -> None:
    s = sequence(temperature=0.0, logit_bias={0: 100.0, 3: -100.0})
    (event,) = Sampler(()).sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [s])
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
def test_truncation(params: dict, expected: list[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(truncate(logits, sequence(**params).request.sampling)) == expected


def test_min_tokens_forbids_every_end() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 5.0
    logits[0, 4] = 4.0
    logits[0, 3] = 1.0
    early = sequence(temperature=0.0, min_tokens=2, stop_token_ids=(4,), output=(1,))
    late = sequence(temperature=0.0, min_tokens=2, stop_token_ids=(4,), output=(1, 1))
    sampler = Sampler((EOS,))
    (event,) = sampler.sample(logits, [early])
    assert (event.token_id, event.finish_reason) == (3, None)
    (event,) = sampler.sample(logits, [late])
    assert (event.token_id, event.finish_reason) == (EOS, "stop")


def test_ignore_eos_goes_on_but_stop_tokens_still_end() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 5.0
    sampler = Sampler((EOS,))
    (event,) = sampler.sample(logits, [sequence(temperature=0.0, ignore_eos=True)])
    assert (event.token_id, event.finish_reason) == (EOS, None)
    (event,) = sampler.sample(logits, [sequence(temperature=0.0, ignore_eos=True, stop_token_ids=(EOS,))])
    assert event.finish_reason == "stop"


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    s = sequence(temperature=0.0, logprobs=2, logit_bias={3: 100.0})
    (event,) = Sampler(()).sample(logits, [s])
    assert event.token_id == 3
    assert event.logprob == pytest.approx(-2.9957, abs=1e-3)
    assert [t.token_id for t in event.top_logprobs] == [0, 1]


def test_a_seed_repeats_whatever_runs_beside_it() -> None:
    torch.manual_seed(0)
    rows = torch.randn(30, 50)

    def run(others: int) -> list[int]:
        sampler = Sampler(())
        tokens = []
        for row in rows:
            batch = [sequence("seeded", seed=42), *(sequence(f"o{i}") for i in range(others))]
            tokens.append(sampler.sample(row.repeat(others + 1, 1), batch)[0].token_id)
        return tokens

    assert run(0) == run(3)
    assert len(set(run(0))) > 5


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler, s = Sampler(()), sequence(seed=1)
    drawn = [sampler.sample(probs.log()[None], [s])[0].token_id for _ in range(4000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    chi_squared = ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum()
    assert chi_squared < 16.27, "three degrees of freedom, p = 0.001, and the seed is fixed"


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    cold, hot = sequence("c", seed=1, temperature=0.1), sequence("h", seed=1, temperature=10.0)
    sampler = Sampler(())
    assert {sampler.sample(logits, [cold])[0].token_id for _ in range(50)} == {0}
    assert len({sampler.sample(logits, [hot])[0].token_id for _ in range(50)}) == 4
