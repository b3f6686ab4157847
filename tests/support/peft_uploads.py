"""PEFT adapters for the tiny base, as PEFT saves them, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make_adapter(base: Path, folder: Path, rank: int = 4, seed: int = 0) -> Path:
    """A LoRA on q and v with random B, so that it changes answers."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def form(folder: Path, name: str, **changed: bytes | None) -> dict[str, Any]:
    """Return httpx's arguments for an upload; `config` and `weights` replace a file's bytes, None omits it."""
    contents: dict[str, bytes | None] = {
        CONFIG: (folder / CONFIG).read_bytes(),
        WEIGHTS: (folder / WEIGHTS).read_bytes(),
    }
    for key, file in (("config", CONFIG), ("weights", WEIGHTS)):
        if key in changed:
            contents[file] = changed[key]
    files = {file: (file, content) for file, content in contents.items() if content is not None}
    return {"data": {"name": name}, "files": files}


def altered(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    """Return the weights file after `change(tensors)`."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    target = folder / "altered.safetensors"
    save_file(tensors, target, metadata={"format": "pt"})
    return target.read_bytes()
