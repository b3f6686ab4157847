"""The table of model families: it says what transformers' modules are, and a new family is one row of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from adapter_zoo import FAMILIES, RECIPES, ROUTED, SERVED, SMALL, WIDE_HEADS, Asked, Zoo, load, serve

from loramux.engine.engine import build_engine
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import read_config
from loramux.engine.execution.fused_layers import FusedLayer
from loramux_adapters import families
from loramux_adapters.base import mixtures
from loramux_adapters.families import ExpertForm, Family, family_of
from loramux_adapters.latent import expands_latents

NEW = Family("sarvam_moe", fuses_layers=True, experts=ExpertForm())
"""A family of transformers' that is not served."""
NEW_IN_ZOO = (transformers.SarvamMoEConfig, WIDE_HEADS | ROUTED)


def model_of(family: str) -> transformers.PreTrainedModel:
    """The zoo's model without weights."""
    make, fields = FAMILIES[family]
    config = make(**SMALL | fields)
    auto = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else None
    with torch.device("meta"):
        return (auto or transformers.AutoModelForCausalLM).from_config(config)


def test_family_in_one_row_is_served_with_peft_s_tokens_in_fused_layers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES, "sarvam_moe", NEW_IN_ZOO)
    zoo = Zoo("sarvam_moe", tmp_path)
    with pytest.raises(UnsupportedModel, match="model_type 'sarvam_moe' has not been shown"):
        read_config(zoo.base)
    monkeypatch.setitem(families.FAMILIES, "sarvam_moe", NEW)
    zoo.make_adapter("plain", RECIPES["plain"], 1)
    asked = [Asked(f"r{i}", [None, "plain"][i % 2], tuple(range(5 + i, 17 + i)), 6) for i in range(4)]
    loaded, settings = load(zoo.base)
    engine = build_engine(loaded, settings, wake=lambda: None)
    assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}
    layers = [m for m in loaded.runner._forward.model.modules() if isinstance(m, FusedLayer)]
    assert len(layers) == SMALL["num_hidden_layers"]
    engine.close()


@pytest.mark.parametrize("name", SERVED)
def test_row_says_what_transformers_modules_are(name: str) -> None:
    model = model_of(name)
    row = family_of(model.config)
    assert model.config.model_type in families.FAMILIES
    decoder = model.get_decoder()
    found = list(mixtures(decoder))
    assert bool(found) == (row.experts is not None) or (row.experts is not None and row.experts.is_optional)
    for mixture in found:
        assert [name for name in families.ROUTERS if hasattr(mixture.module, name)] == [row.experts.router]
        assert getattr(mixture.module.experts, "is_transposed", False) == row.experts.is_transposed
        assert getattr(mixture.module.experts, "is_concatenated", True) != row.experts.alternates_gate_and_up
    holders = {
        name
        for layer in decoder.layers
        for name, child in layer.named_children()
        if any(isinstance(part, torch.nn.Conv1d) for part in child.children())
    }
    keeps_none = name == "granite4_micro"  # attention in every layer
    assert holders == (set() if row.states is None or keeps_none else {row.states.module})
    assert row.compresses_kv == any(map(expands_latents, model.modules()))
    rotary = getattr(decoder, "rotary_emb", None)
    asks_the_batch = hasattr(rotary, "original_max_seq_len") and not hasattr(rotary, "_set_cos_sin_cache")
    assert row.recomputes_rope <= asks_the_batch


@pytest.mark.parametrize("name", [name for name in SERVED if family_of(model_of(name).config).fuses_layers])
def test_norm_of_the_row_is_transformers_to_the_bit(name: str) -> None:
    """In half precision, where a family that rounds last and one that rounds first differ."""
    make, fields = FAMILIES[name]
    config = make(**SMALL | fields)
    row = family_of(config)
    norm = type(model_of(name).get_decoder().norm)(64).bfloat16()
    torch.manual_seed(0)
    norm.weight.data.normal_()
    x = torch.randn(50, 64).bfloat16() * 3
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    normalised = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    weight = norm.weight.float() + row.norm.stores_distance_from_one
    expected = weight * normalised if row.norm.rounds_last else weight * normalised.bfloat16().float()
    assert torch.equal(norm(x), expected.bfloat16())
