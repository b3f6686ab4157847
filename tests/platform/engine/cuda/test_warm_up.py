"""Every kernel that traffic launches was compiled when the engine started: each would stop all requests for seconds."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from adapter_zoo import Asked, to_request
from formats import FormatZoo
from llguidance import LLMatcher
from msgspec.structs import replace
from recorded_steps import record_and_run, recorded
from specializations import specialization

from loramux.engine.execution.gpu_runner import warm_up
from loramux.engine.messages import Constraint
from loramux_adapters.bank import StepExtras
from loramux_adapters.modules import AdaptedHead
from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.sampling import prepare_forbid, prepare_sample
from loramux_kernels.tables import LogitBias, Penalties, SamplingBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = Constraint(grammar=LLMatcher.grammar_from_regex("[0-9]{5}"), field="f")


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


def sampling_kernels(logits: torch.Tensor) -> set[tuple[object, ...]]:
    """Return what is compiled to choose tokens from `logits` with everything that a request may ask for."""
    rows = len(logits)
    ints, floats = torch.zeros(rows, dtype=torch.int32), torch.ones(rows)
    counts = torch.zeros(rows, logits.shape[1] + 4096, dtype=torch.int32)
    batch = SamplingBatch(
        temperature=floats,
        top_k=ints,
        top_p=floats.clone(),
        min_p=floats.clone(),
        seed=ints.long(),
        step=ints.clone(),
        num_rows=ints[:1].clone(),
        is_steered=ints.clone(),
        penalties=Penalties(counts, ints.clone(), floats.clone(), floats.clone(), floats.clone()),
        bias=LogitBias(ints.clone(), ints.clone(), floats.clone(), ints[:1].clone()),
    )
    words = torch.zeros(rows, -(-logits.shape[1] // 32), dtype=torch.int32)
    plain = dataclasses.replace(batch, penalties=None, bias=None)
    launches = [
        prepare_forbid(logits, ints.long(), words),
        *prepare_sample(logits, batch, ints.long()),
        *prepare_sample(logits, plain, ints.long()),
    ]
    return {specialization(launch) for launch in launches}


@pytest.mark.parametrize("base_tokens", [97, 4096, 32_000, 32_768, 50_257, 128_256, 151_936, 262_144])
def test_logits_of_adapters_with_added_tokens_compile_no_kernel(base_tokens: int) -> None:
    """Tokens of Llama 3, Mistral, GPT-2, Qwen2 and Gemma 3 among them: aligned or not, a power of two or not."""
    bank = SimpleNamespace(extras=None, num_tokens=base_tokens)
    with torch.inference_mode():
        head = AdaptedHead(torch.nn.Linear(4, base_tokens, bias=False, dtype=torch.bfloat16), bank)
        hidden = torch.ones(2, 4, dtype=torch.bfloat16)
        at_start = sampling_kernels(head(hidden))
        for added in (1, 7, 16, 31, 100, 256, 4096):
            num_tokens = base_tokens + added
            bank.extras = StepExtras(None, None, None, embedding=(), head=(), tokens=((num_tokens, 0, 1),))
            logits = head(hidden)
            assert num_tokens <= logits.shape[1] <= num_tokens + 15
            late = sorted(str(one) for one in sampling_kernels(logits) - at_start)
            assert not late, "\n".join([f"{added} added:", *late])
            bank.extras.forbid_unknown(logits, base_tokens)
            assert logits.isfinite().sum(dim=1).tolist() == [num_tokens, base_tokens]
