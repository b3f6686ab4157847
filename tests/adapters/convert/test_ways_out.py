"""The calls of PEFT that refusals name work: their results are accepted."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from other_kinds import make_kind
from transformers import AutoModelForCausalLM

from loramux_adapters.config import UNSUPPORTED_KINDS
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import PlanLimits, validate_adapter

LIMITS = PlanLimits(max_rank=96, max_bytes=1 << 30)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_way_out_restores_a_plain_lora(init: str, base: Path, described, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "first")
    model.peft_config["default"].init_lora_weights = init
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(AdapterRejected, match="path_initial_model_for_weight_conversion"):
        validate_adapter(tmp_path / "trained", described, LIMITS)
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=tmp_path / "first")
    plan = validate_adapter(tmp_path / "plain", described, LIMITS)
    assert {pair.rank for pair in plan.pairs} == {8}


TO_LORA = {
    "FOURIERFT": peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"]),
    "PSOFT": peft.PsoftConfig(r=4, target_modules=["q_proj"]),
    "TINYLORA": peft.TinyLoraConfig(r=4, target_modules=["q_proj"]),
    "UNILORA": peft.UniLoraConfig(r=4, target_modules=["q_proj"]),
    "WAVEFT": peft.WaveFTConfig(n_frequency=20, target_modules=["q_proj"]),
}


def test_way_out_save_as_lora_is_named_for_these_kinds() -> None:
    assert {kind for kind, refusal in UNSUPPORTED_KINDS.items() if "save_as_lora" in refusal.way_out} == set(TO_LORA)


@pytest.mark.parametrize("kind", TO_LORA)
def test_way_out_save_as_lora_is_accepted(kind: str, base: Path, described, tmp_path: Path) -> None:
    model = make_kind(base, tmp_path / "other", TO_LORA[kind])
    peft.save_as_lora(tmp_path / "lora", model, rank=8)
    assert {pair.rank for pair in validate_adapter(tmp_path / "lora", described, LIMITS).pairs} == {8}
