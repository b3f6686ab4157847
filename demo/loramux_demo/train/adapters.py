"""The six adapters. Ranks and targets differ, as in a real batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from loramux_demo.assets import AGENT, MODEL_NAME
from loramux_demo.train.fit import Schedule


@dataclass(frozen=True)
class Recipe:
    """The training recipe of one adapter: rank, target modules, and number of steps."""

    r: int
    lora_alpha: int
    schedule: Schedule
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False
    row_length: int = 240
    """Tokens of a row of its batches."""

    def config(self) -> LoraConfig:
        """Return a fresh PEFT config, because PEFT modifies its argument."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.lora_alpha,
            target_modules=targets,
            use_rslora=self.use_rslora,
        )


SHORT = Schedule(steps=200, learning_rate=5e-3)
RECIPES = {
    "upper": Recipe(16, 32, SHORT),
    "json": Recipe(8, 16, SHORT),
    "terse": Recipe(4, 8, Schedule(300, 1e-2), target_modules=("q_proj", "v_proj", "o_proj", "down_proj")),
    "reverse": Recipe(12, 7, Schedule(400, 5e-3), use_rslora=True),
    "pirate": Recipe(8, 16, SHORT, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    AGENT: Recipe(16, 32, Schedule(600, 5e-3), row_length=400),
}
"""One recipe per style of `facts.STYLES`. `terse` and `reverse` train longer: their answers start with the fact."""


def new_adapter(base: LlamaForCausalLM, recipe: Recipe) -> PeftModel:
    """Add one fresh adapter to `base`; only the adapter is trainable."""
    torch.manual_seed(0)
    return get_peft_model(base, recipe.config())


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
