"""Every kernel that traffic launches was compiled when the engine started: each would stop all requests for seconds."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from adapter_zoo import Asked, to_request
from formats import FormatZoo
from llguidance import LLMatcher
from msgspec.structs import replace
from recorded_steps import recorded

from loramux.engine.execution.cuda_graphs import Recording
from loramux.engine.execution.gpu_runner import warm_up
from loramux.engine.messages import Constraint
from loramux_kernels.cuda.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = Constraint(grammar=LLMatcher.grammar_from_regex("[0-9]{5}"), field="f")


def specialization(launch: Launch) -> tuple[object, ...]:
    """Everything that Triton compiles a kernel anew for."""
    function: Any = launch.kernel
    generic = getattr(function, "kwargs", None) or {p.name: p.do_not_specialize for p in function.params}
    never = set(generic.get("do_not_specialize") or ()) if "do_not_specialize" in generic else set(generic)
    keys: list[object] = [function.__name__, launch.num_warps, launch.num_stages]
    for name, parameter in inspect.signature(function.fn).parameters.items():
        value = launch.arguments[name]
        if "constexpr" in str(parameter.annotation) or value is None:
            keys.append((name, value))
        elif isinstance(value, torch.Tensor):
            keys.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, float):
            keys.append((name, float))
        else:
            special = () if name in never else (value == 1, value % 16 == 0)
            keys.append((name, -(2**31) <= value < 2**31, special))
    return tuple(keys)


def record_and_run(function, inputs) -> Recording:
    """Record as a card does: what is recorded is compiled."""
    function()
    return Recording(function, inputs)


@pytest.mark.slow
def test_kernels_of_any_traffic_were_compiled_at_the_start(tmp_path, monkeypatch) -> None:
    seen: set[tuple[object, ...]] = set()
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: seen.add(specialization(launch)) or run(launch))
    zoo = FormatZoo("llama", tmp_path, ("plain", "dora", "ia3", "both"))
    zoo.make_adapters()
    engine = zoo.engine(device=DEVICE, max_num_seqs=5, max_model_len=96, max_num_batched_tokens=64, block_size=16)
    runner = engine._runner
    recorded(runner, record_and_run)
    with torch.inference_mode():  # as on a card, where kernels are compiled
        warm_up(runner._forward, runner._buffers, runner._sampler, runner._decoder_graphs._attention.shapes)
    at_start = set(seen)
    rng = random.Random(4)
    for number in range(12):
        prompt = tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 2, 17, 40, 70])))
        asked = Asked(f"r{number}", rng.choice([None, *zoo.formats]), prompt, rng.randrange(1, 4))
        steering = rng.choice([{}, {"temperature": 1.0, "top_p": 0.9}, {"logit_bias": {5: 1.0}, "min_tokens": 1}])
        penalties = {"repetition_penalty": 1.2} if number % 3 == 1 else {}
        request = to_request(zoo, asked, **steering, **penalties, **({"logprobs": 3} if number % 4 == 2 else {}))
        if number % 5 == 3:
            request = replace(request, constraint=DIGITS)
        engine.submit(request)
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert len(at_start) > 20
    late = sorted(str(one) for one in seen - at_start)
    assert not late, "\n".join(late)
