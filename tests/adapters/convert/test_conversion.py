"""Adapters of other kinds become the LoRA that computes the same as PEFT's own layers."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from other_kinds import KINDS, deltas, make_kind
from peft.tuners.lokr.layer import factorization as peft_factorization
from peft.tuners.oft.layer import OFTLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loramux_adapters.base import describe_base
from loramux_adapters.convert import conversion
from loramux_adapters.convert.base_dependent import nearest_divisor
from loramux_adapters.convert.conversion import CONVERTERS, convert_adapter
from loramux_adapters.convert.self_contained import factorization
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import PlanLimits, validate_adapter
from loramux_adapters.weights import AdapterWeights, load_adapter

LIMITS = PlanLimits(max_rank=96, max_bytes=64 << 20)


def converted(base: Path, folder: Path, into: Path) -> AdapterWeights:
    into.mkdir()
    described = describe_base(base)
    weights = load_file(base / "model.safetensors")
    conversion = convert_adapter(folder, into, described, LIMITS, lambda name: weights[f"{name}.weight"])
    assert conversion is not None
    plan = validate_adapter(into, described, LIMITS)
    assert conversion.max_rank == plan.max_rank
    return load_adapter(into, described, LIMITS, torch.float32)


def test_conversion_every_kind_is_tested() -> None:
    assert {config.peft_type.value for config in KINDS.values()} == set(CONVERTERS)


@pytest.mark.parametrize("name", KINDS)
def test_conversion_computes_what_peft_computes(base: Path, tmp_path: Path, name: str) -> None:
    wanted = deltas(make_kind(base, tmp_path / "other", copy.deepcopy(KINDS[name])))
    lora = converted(base, tmp_path / "other", tmp_path / "lora").modules
    assert lora.keys() == wanted.keys()
    for module, delta in wanted.items():
        got = lora[module].scale * (lora[module].b @ lora[module].a)
        assert delta.abs().max() > 1e-3
        assert torch.allclose(got, delta, rtol=1e-5, atol=3e-6 * delta.abs().max().item() + 1e-6), module


def test_conversion_of_reflections_has_their_number_as_rank(base: Path, tmp_path: Path) -> None:
    make_kind(base, tmp_path / "other", peft.HRAConfig(r=6, target_modules="all-linear"))
    pairs = converted(base, tmp_path / "other", tmp_path / "lora").modules.values()
    assert {len(pair.a) for pair in pairs} == {6}


@settings(max_examples=300, deadline=None)
@given(in_features=st.integers(1, 20_000), wanted=st.integers(1, 30_000))
def test_conversion_block_sizes_equal_pefts(in_features: int, wanted: int) -> None:
    assert nearest_divisor(in_features, wanted) == OFTLayer.adjust_oft_parameters(None, in_features, wanted)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_conversion_of_factors_taken_from_the_base_restores_it(base: Path, tmp_path: Path, init: str) -> None:
    """On wide, tall and square weights; an adapter that was not trained changes nothing."""
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules="all-linear", init_lora_weights=init)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "saved")
    (tmp_path / "lora").mkdir()
    convert_adapter(
        tmp_path / "saved", tmp_path / "lora", describe_base(base), LIMITS, lambda name: weights[f"{name}.weight"]
    )
    for module, pair in load_adapter(tmp_path / "lora", describe_base(base), LIMITS, torch.float32).modules.items():
        largest = weights[f"{module}.weight"].abs().max()
        assert (pair.b @ pair.a).abs().max() < 2e-5 * largest, module


def test_conversion_without_the_base_s_weight_is_refused(base: Path, tmp_path: Path) -> None:
    make_kind(base, tmp_path, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))
    (into := tmp_path / "into").mkdir()
    with pytest.raises(AdapterRejected, match="under another name") as caught:
        convert_adapter(tmp_path, into, describe_base(base), LIMITS)
    assert caught.value.field == "init_lora_weights"


def test_conversion_that_takes_too_long_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "MAX_WORK", 1e6)
    make_kind(base, tmp_path, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))
    (into := tmp_path / "into").mkdir()
    with pytest.raises(AdapterRejected, match="path_initial_model_for_weight_conversion") as caught:
        convert_adapter(tmp_path, into, describe_base(base), LIMITS)
    assert caught.value.code == "base_too_large"


@pytest.mark.parametrize("kept", [[True, False, True, True], [False] * 4], ids=["three of four", "none of four"])
def test_conversion_of_adalora_keeps_its_kept_ranks(base: Path, tmp_path: Path, kept: list[bool]) -> None:
    config = peft.AdaLoraConfig(init_r=4, lora_alpha=8, total_step=10, target_modules=["q_proj", "v_proj"])
    model = make_kind(base, tmp_path / "other", config)
    pruned, whole = "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    model.peft_config["default"].rank_pattern = {
        f"{pruned}.lora_E.default": kept,
        f"{whole}.lora_E.default": [True] * 4,
    }
    model.save_pretrained(tmp_path / "other")
    with torch.no_grad():
        model.base_model.model.get_submodule(pruned).lora_E["default"][[not keep for keep in kept]] = 0
    lora = converted(base, tmp_path / "other", tmp_path / "lora").modules
    for module, delta in deltas(model).items():
        if module == pruned and not any(kept):
            assert module not in lora
            continue
        assert torch.allclose(lora[module].b @ lora[module].a, delta, atol=1e-5)
        assert lora[module].a.shape[0] == (sum(kept) if module == pruned else 4)


@settings(max_examples=300, deadline=None)
@given(dimension=st.integers(1, 20_000), factor=st.just(-1) | st.integers(0, 200))
def test_conversion_kronecker_factors_equal_pefts(dimension: int, factor: int) -> None:
    assert factorization(dimension, factor) == peft_factorization(dimension, factor)


def test_conversion_of_half_precision_works(base: Path, tmp_path: Path) -> None:
    make_kind(base, tmp_path / "other", peft.LoHaConfig(r=3, target_modules=["q_proj"]))
    weights = tmp_path / "other" / "adapter_model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    one = "base_model.model.model.layers.0.self_attn.q_proj.hada_"
    w1, w2 = (tensors[f"{one}{w}_a"].double() @ tensors[f"{one}{w}_b"].double() for w in ("w1", "w2"))
    lora = converted(base, tmp_path / "other", tmp_path / "lora").modules["model.layers.0.self_attn.q_proj"]
    assert torch.allclose((lora.b @ lora.a).double(), w1 * w2 * 8 / 3, rtol=1e-4, atol=1e-6)


def test_conversion_leaves_a_lora_alone(base: Path, tmp_path: Path) -> None:
    make_kind(base, tmp_path, peft.LoraConfig(target_modules=["q_proj"]))
    (into := tmp_path / "into").mkdir()
    assert convert_adapter(tmp_path, into, describe_base(base), LIMITS) is None
    assert list(into.iterdir()) == []
