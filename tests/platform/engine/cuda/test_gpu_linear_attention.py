"""Hybrids as a GPU serves them: states at fixed addresses, steps recorded, token for token with PEFT."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from adapter_zoo import CUT_HYBRIDS, HYBRIDS, NOT_FOR_PEFT, Asked, serve
from eager_drafts import draft_always
from formats import FormatZoo
from preempting import preempting

from loramux.engine.execution.gpu_runner import GpuRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LORA = {"lora_alpha": 10, "task_type": "CAUSAL_LM"}
RECIPES = {
    "all": peft.LoraConfig(r=5, target_modules="all-linear", **LORA),
    "inputs": peft.LoraConfig(r=19, target_modules=r".*\.(in_proj\w*|[bag]_proj)", **LORA),
}
QUICK = ("qwen3_5", "qwen3_next", "granite4_h_micro")
FAMILIES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in HYBRIDS]
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
TWO_LAYERS = {
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "falcon_h1_norm_first": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}


def make_zoo(family: str, root) -> FormatZoo:
    """Make a model of one layer of each kind: the interpreter is slow."""
    layers = TWO_LAYERS.get(family, KINDS) | {"mlp_only_layers": []}
    zoo = FormatZoo(family, root, [], num_hidden_layers=2, **layers)
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        config = copy.deepcopy(recipe)
        config.exclude_modules = NOT_FOR_PEFT.get(family)
        zoo.make_format(name, config, seed)
    return zoo


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_hybrid_mixed_steps_answer_as_peft_does(tmp_path, family: str, caplog, copies_of_decode_steps) -> None:
    """Prompts in chunks next to decoding rows, one of a single token, a preempted answer, and a prompt that begins at
    a cached state, over pages of NaN. A decode step is sent in one copy."""
    zoo = make_zoo(family, tmp_path)
    prompts = [(5, 6, 7), (11,), tuple(range(3, 40)), (9, 8)]
    adapters = ["all", None, "inputs", None]
    asked = [Asked(f"r{i}", a, p, 4 + i) for i, (a, p) in enumerate(zip(adapters, prompts, strict=True))]
    sizes = {"block_size": 32, "max_model_len": 64} if family in CUT_HYBRIDS else {"max_model_len": 128}
    engine = zoo.engine(device=DEVICE, max_num_seqs=3, max_num_batched_tokens=36, **sizes)
    assert isinstance(engine._runner, GpuRunner)
    engine._runner.bank.pool.fill_(float("nan"))
    copies = copies_of_decode_steps(engine)
    engine = preempting(engine)
    got = serve(zoo, engine, asked, arrivals=[0, 0, 1, 2])
    again = Asked("again", asked[2].adapter, asked[2].prompt, 3)
    assert serve(zoo, engine, [again]) == {"again": zoo.answer(again)}
    assert got == {request.name: zoo.answer(request) for request in asked}
    assert "without CUDA graphs" not in caplog.text
    assert {tuple(step) for step in copies} == {("send",)}
    stats, size = engine.stats(), engine.facts.block_size
    assert stats.preemptions > 0
    assert stats.pages_kv == 0
    assert stats.cached_tokens == len(again.prompt) // size * size


@pytest.mark.parametrize("family", [*QUICK, "lfm2"])
def test_gpu_hybrid_with_drafts_in_mixed_steps_preempted_answers_as_peft_does(tmp_path, family: str) -> None:
    """Refused drafts leave no trace in a state; accepted ones are computed again after the state before them."""
    zoo = make_zoo(family, tmp_path)
    asked = [
        Asked("r0", "all", (5, 6, 7), 9),
        Asked("r1", None, (11,), 8),
        Asked("r2", "inputs", tuple(range(3, 40)), 6),
    ]
    answers = {one.name: zoo.answer(one) for one in asked}
    sizes = {"block_size": 32, "max_model_len": 64} if family in CUT_HYBRIDS else {"max_model_len": 128}
    sizes |= {"speculation": "ngram", "max_draft_tokens": 4}
    engine = zoo.engine(device=DEVICE, max_num_seqs=3, max_num_batched_tokens=36, **sizes)
    engine._runner.bank.pool.fill_(float("nan"))
    engine = preempting(engine, every=5)
    draft_always(engine.scheduler, lambda own: answers[own.id], seed=3, most=4)
    assert serve(zoo, engine, asked, arrivals=[0, 0, 1]) == answers
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions > 0
    assert stats.pages_kv == 0
