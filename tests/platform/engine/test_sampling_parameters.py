"""Every row of the table of sampling parameters does what the table says, on the host and on the device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sampler_alone import SamplerAlone

from loramux.common.sampling import DRAWING, KINDS, NEUTRAL, PARAMETERS, PENALTIES, STEERING, range_fault
from loramux.engine.execution.device_sampler import SampledRows
from loramux.engine.execution.sampler import RequestState, draw_of, is_steered, steer
from loramux.engine.messages import Request, SamplingParams
from loramux.engine.scheduling.sequence import Sequence
from loramux_kernels import sampling as kernels

VOCAB = 12
LOGITS = torch.linspace(-2.0, 3.0, VOCAB)


def sequence(**params: object) -> Sequence:
    sampling = SamplingParams(max_tokens=20, **params)
    made = Sequence(Request(id="r", tenant="t", prompt_token_ids=[1, 2], sampling=sampling), 0.0)
    made.token_ids += [3, 3]
    return made


def example(name: str) -> dict[str, object]:
    return {name: PARAMETERS[name].example}


@pytest.mark.parametrize("name", PARAMETERS)
def test_example_is_not_neutral_and_in_range(name: str) -> None:
    assert PARAMETERS[name].example != getattr(NEUTRAL, name)
    assert range_fault(SamplingParams(max_tokens=1, **example(name))) is None


@pytest.mark.parametrize("name", PARAMETERS)
def test_steer_applies_exactly_the_parameters_that_act_on_logits(name: str) -> None:
    one = sequence(**example(name))
    changed = not torch.equal(steer(LOGITS, one, RequestState(one.request.sampling, VOCAB)), LOGITS)
    assert changed == is_steered(one) == (PARAMETERS[name].acts_on == "logits")
    assert (name in STEERING) != (name in DRAWING)


@pytest.mark.parametrize("name", PARAMETERS)
def test_device_applies_exactly_the_parameters_that_act_on_logits(name: str) -> None:
    one, sampler = sequence(**example(name)), SamplerAlone((), VOCAB)
    rows = sampler.sampler._allowed_only(LOGITS[None].clone(), [one])
    batch = sampler.stage(SampledRows([one])).batch
    assert torch.equal(kernels.steer(rows, batch)[0], LOGITS) == (name not in STEERING)


@pytest.mark.parametrize("name", DRAWING)
def test_draw_has_the_parameters_of_a_draw(name: str) -> None:
    value = PARAMETERS[name].example
    draw, neutral = (draw_of(one.request.sampling, 7, 2, 0) for one in (sequence(**example(name)), sequence()))
    assert replace(neutral, **{name: value}) == draw != neutral
    batch = SamplerAlone((), VOCAB).stage(SampledRows([sequence(**example(name))])).batch
    assert getattr(batch, name).tolist() == pytest.approx([value])


@pytest.mark.parametrize("name", [name for name in KINDS if name != "temperature" and name in DRAWING])
def test_parameter_of_a_draw_removes_tokens(name: str) -> None:
    """min_p's example keeps all but tokens that are far below the best."""
    logits = LOGITS * 3
    draw = draw_of(sequence(**example(name)).request.sampling, 7, 2, 0)
    kept, _ = kernels.keep(logits, draw)
    batch = SamplerAlone((), VOCAB).stage(SampledRows([sequence(**example(name))])).batch
    on_device = kernels.exclude((logits - logits.max())[None], batch)
    assert 0 < len(kept) == int(on_device.isfinite().sum()) < VOCAB


@pytest.mark.parametrize("name", [name for name, one in PARAMETERS.items() if one.range is not None])
def test_engine_refuses_what_the_wire_refuses(name: str) -> None:
    limits = PARAMETERS[name].range
    for value in (limits.ge - 1, limits.le + 1, math.nan, math.inf):
        given = {0: 0.0, 1: value} if isinstance(getattr(NEUTRAL, name), dict) else value
        message = range_fault(SamplingParams(max_tokens=1, **{name: given}))
        assert message is not None
        assert message.startswith(f"{name} must be a finite number from {limits.ge} to {limits.le}")


def test_penalties_are_the_columns_of_the_device() -> None:
    examples = {name: PARAMETERS[name].example for name in PENALTIES}
    batch = SamplerAlone((), VOCAB).stage(SampledRows([sequence(**examples)])).batch
    assert batch.penalties is not None
    for name, value in examples.items():
        assert getattr(batch.penalties, name.removesuffix("_penalty")).tolist() == pytest.approx([value])
