"""The five adapters: ranks and targets differ, so that one batch holds what a real one does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from loramux_demo.assets import MODEL_NAME

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def recipes() -> dict[str, LoraConfig]:
    """A configuration for each style of `facts.STYLES`; a fresh one each time, since PEFT writes into it."""
    return {
        "upper": LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
        "json": LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
        "terse": LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
        ),
        "reverse": LoraConfig(task_type="CAUSAL_LM", r=12, lora_alpha=7, use_rslora=True, target_modules="all-linear"),
        "pirate": LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=ATTENTION),
    }


def new_adapter(base: LlamaForCausalLM, config: LoraConfig) -> PeftModel:
    """`base` with one fresh adapter; only the adapter learns."""
    torch.manual_seed(0)
    return get_peft_model(base, config)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write PEFT's two files: the weights in bfloat16, and a configuration that is the same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = MODEL_NAME, True
    config.save_pretrained(folder)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    fields["target_modules"] = sorted(fields["target_modules"])
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
