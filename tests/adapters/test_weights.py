"""The weights in memory against PEFT's own loading, and PEFT's own arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_peft import FAMILIES, save_adapter, tiny_model, write_adapter

from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import PlanLimits
from loramux_adapters.weights import AdapterWeights, load_adapter

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"down_proj": 3, "c_proj": 5}},
    "patterns": {
        "target_modules": r".*\.(qkv_proj|q_proj|o_proj|c_attn|c_fc)",
        "r": 4,
        "alpha_pattern": {"o_proj": 7, r"h\.1\.mlp.*": 9},
    },
}


@torch.no_grad()
def assert_computes_what_peft_computes(model: peft.PeftModel, weights: AdapterWeights) -> None:
    """On random rows, every adapted linear's output minus the base's equals our low-rank product."""
    for name, lora in weights.modules.items():
        module = model.get_submodule(f"base_model.model.{name}")
        x = torch.randn(5, module.in_features)
        ours = lora.scale * (x @ lora.a.T) @ lora.b.T
        torch.testing.assert_close(module(x) - module.base_layer(x), ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_equal_pefts(recipe: str, family: str, base_of, tmp_path: Path) -> None:
    model = save_adapter(family, tmp_path, **RECIPES[recipe])
    weights = load_adapter(tmp_path, base_of(family), PlanLimits(), torch.float32)
    theirs = peft.load_peft_weights(tmp_path, device="cpu")
    ours = {key: tensor for pair in weights.plan.pairs for key, tensor in both(weights, pair).items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(lora.a.is_contiguous() and lora.b.is_contiguous() for lora in weights.modules.values())
    assert_computes_what_peft_computes(model, weights)


def both(weights: AdapterWeights, pair: Any) -> dict[str, torch.Tensor]:
    lora = weights.modules[pair.module]
    assert lora.scale == pair.scale
    return {pair.a_key: lora.a, pair.b_key: lora.b}


@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_loaded_in_the_serving_dtype(
    saved: torch.dtype, served: torch.dtype, good_config, good_tensors, llama, tmp_path: Path
) -> None:
    tensors = {key: tensor.to(saved) for key, tensor in good_tensors.items()}
    weights = load_adapter(write_adapter(tmp_path, good_config, tensors), llama, PlanLimits(), served)
    for pair in weights.plan.pairs:
        for key, tensor in both(weights, pair).items():
            assert tensor.dtype == served
            assert torch.equal(tensor, tensors[key].to(served))


def test_weights_overflow_in_the_serving_dtype_is_refused(good_config, good_tensors, llama, tmp_path: Path) -> None:
    key = sorted(good_tensors)[0]
    good_tensors[key] = good_tensors[key].clone()
    good_tensors[key][0, 0] = 1e6
    directory = write_adapter(tmp_path, good_config, good_tensors)
    assert load_adapter(directory, llama, PlanLimits(), torch.bfloat16).modules
    with pytest.raises(AdapterRejected) as caught:
        load_adapter(directory, llama, PlanLimits(), torch.float16)
    assert (caught.value.code, caught.value.field) == ("weights_overflow", key)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 16 / 8), ({"use_rslora": True}, 16 / math.sqrt(8)), ({"alpha_pattern": {"q_proj": 4}}, 0.5)],
)
def test_weights_scales_equal_pefts(
    fields: dict[str, Any], scale: float, good_config, good_tensors, llama, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path, good_config | fields, good_tensors)
    weights = load_adapter(directory, llama, PlanLimits(), torch.float32)
    assert weights.modules["model.layers.0.self_attn.q_proj"].scale == scale


def test_weights_of_a_converted_pissa_fit_the_unchanged_base(tmp_path: Path, base_of) -> None:
    """PEFT's conversion of PiSSA, which the refusal of init_lora_weights names, gives a LoRA of the original base."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=4, target_modules=["q_proj"], init_lora_weights="pissa"
    )
    original = tiny_model("llama")
    weight = original.model.layers[0].self_attn.q_proj.weight.detach().clone()
    model = peft.get_peft_model(original, config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(AdapterRejected, match="path_initial_model_for_weight_conversion"):
        load_adapter(tmp_path / "raw", base_of("llama"), PlanLimits(), torch.float32)
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    lora = load_adapter(tmp_path / "plain", base_of("llama"), PlanLimits(), torch.float32).modules[
        "model.layers.0.self_attn.q_proj"
    ]
    x = torch.randn(3, 64)
    served = x @ weight.T + lora.scale * (x @ lora.a.T) @ lora.b.T
    trained = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        torch.testing.assert_close(trained(x), served, rtol=1e-4, atol=1e-4)


def test_weights_loaded_equal_the_file(good_folder: Path, llama) -> None:
    raw = load_file(good_folder / "adapter_model.safetensors")
    weights = load_adapter(good_folder, llama, PlanLimits(), torch.float32)
    assert sum(lora.a.numel() + lora.b.numel() for lora in weights.modules.values()) == sum(
        tensor.numel() for tensor in raw.values()
    )
