"""Tiny bases of every family, and adapter folders: as PEFT saves them, or as an attacker would."""

from __future__ import annotations

import copy
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

transformers.logging.set_verbosity_error()

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama_tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=24),
    "mistral": transformers.MistralConfig(**SMALL),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=24),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=24),
    "phi3": transformers.Phi3Config(**SMALL),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "granite": transformers.GraniteConfig(**SMALL),
    "smollm3": transformers.SmolLM3Config(**SMALL),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64),
}


def tiny_model(family: str, device: str = "cpu") -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family])).eval()


def tiny_base(family: str, directory: Path) -> Path:
    """A model folder that holds a config.json and not one weight."""
    FAMILIES[family].save_pretrained(directory)
    return directory


def save_adapter(family: str, directory: Path, **fields: Any) -> peft.PeftModel:
    """A PEFT adapter whose B is not zero, saved by PEFT itself; returns PEFT's model of it."""
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16} | fields)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(tiny_model(family), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        model.save_pretrained(directory)
    return model.eval()


def write_adapter(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def raw_safetensors(header: Any, data: bytes = b"") -> bytes:
    """The bytes of a safetensors file with this header, however wrong it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
