"""Mixtures of experts as a GPU serves them: routed on the device, recorded, token for token with PEFT."""

from __future__ import annotations

import peft
import pytest
import torch
from adapter_zoo import NEWER_MIXTURES, Asked, Zoo, make_engine, serve
from formats import FormatZoo
from quantized_zoo import Mxfp4Zoo
from rounded_zoo import RoundedZoo

from loramux_adapters.experts import GroupedExperts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = {"lora_alpha": 10, "task_type": "CAUSAL_LM"}
RECIPES = {
    "linears": peft.LoraConfig(r=4, target_modules="all-linear", **LORA),
    "experts": peft.LoraConfig(r=18, target_modules=[], target_parameters=EXPERTS, **LORA),
    "down": peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS[1:], **LORA),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family", ["mixtral", pytest.param("qwen3_moe", marks=SLOW), pytest.param("gpt_oss", marks=SLOW)]
)
def test_gpu_mixture_adapters_on_experts_answer_as_peft_does(tmp_path, family: str, caplog) -> None:
    """Prompts in decode steps, and the base; gpt_oss has transposed weights, biases and a special gate."""
    zoo = FormatZoo(family, tmp_path, [], num_hidden_layers=2, vocab_size=97)
    for seed, (name, config) in enumerate(RECIPES.items()):
        zoo.make_format(name, config, seed)
    prompts = [(5, 6, 7), (11,), tuple(range(3, 25)), (9, 8)]
    adapters = ["experts", None, "linears", "down"]
    asked = [Asked(f"r{i}", a, p, 4 if a else 9) for i, (a, p) in enumerate(zip(adapters, prompts, strict=True))]
    engine = zoo.engine(device=DEVICE, max_num_seqs=3, block_size=32, max_model_len=64, max_num_batched_tokens=16)
    experts = [m for m in engine._runner._forward.model.modules() if isinstance(m, GroupedExperts)]
    assert experts
    got = serve(zoo, engine, asked)
    for request in asked:
        assert got[request.name] == zoo.answer(request), request
    assert engine.stats().max_distinct_adapters_beside_base >= 2
    assert "without CUDA graphs" not in caplog.text


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("mixtral", "int8"), pytest.param("gpt_oss", "nf4-double", marks=SLOW)],
)
def test_gpu_mixture_quantized_at_load_is_recorded_and_answers_as_peft_does(
    tmp_path, family: str, quantization: str, caplog
) -> None:
    """On the dequantized base. No expert's rows are counted on the host."""
    zoo = RoundedZoo(family, tmp_path, quantization, [], num_hidden_layers=1, vocab_size=97)
    zoo.make_format("experts", RECIPES["experts"], seed=1)
    asked = [Asked("a", "experts", (5, 6, 7), 4), Asked("b", None, tuple(range(3, 25)), 3)]
    sizes = {"max_num_seqs": 2, "block_size": 64, "max_model_len": 64, "max_num_batched_tokens": 16}
    engine = make_engine(zoo.served, quantization=quantization, device=DEVICE, **sizes)
    model = engine._runner._forward.model
    assert any(isinstance(module, GroupedExperts) for module in model.modules())
    assert "without CUDA graphs" not in caplog.text
    assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}


def test_gpu_mixture_in_mxfp4_is_recorded_and_answers_as_peft_on_the_dequantized_base(tmp_path, caplog) -> None:
    zoo = Mxfp4Zoo(tmp_path, num_hidden_layers=1, vocab_size=97)
    zoo.make_format("experts", RECIPES["experts"], seed=1)
    asked = [Asked("a", "experts", (5, 6, 7), 4), Asked("b", None, tuple(range(3, 25)), 3)]
    sizes = {"max_num_seqs": 2, "block_size": 64, "max_model_len": 64, "max_num_batched_tokens": 16}
    engine = make_engine(zoo.quantized, device=DEVICE, **sizes)
    (experts,) = (m for m in engine._runner._forward.model.modules() if isinstance(m, GroupedExperts))
    weights = 6 * (2 * 96 * 64 + 64 * 96)
    assert experts.num_bytes == weights // 2 + weights // 32
    assert "without CUDA graphs" not in caplog.text
    assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}


@pytest.mark.slow
@pytest.mark.parametrize("family", NEWER_MIXTURES)
def test_steps_of_every_mixture_are_recorded(tmp_path, family: str, caplog) -> None:
    zoo = Zoo(family, tmp_path, num_hidden_layers=2)
    zoo.engine(device=DEVICE, max_num_seqs=1, block_size=32, max_model_len=64, max_num_batched_tokens=1)
    assert "without CUDA graphs" not in caplog.text
