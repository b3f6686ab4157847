"""Adapters in every served format other than plain LoRA, made by PEFT, with PEFT's own greedy answers."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from adapter_zoo import EXACT, Asked, Zoo

LORA = {"r": 5, "lora_alpha": 10, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
LAYERS = r"model\.layers\..*_proj"

FORMATS: dict[str, peft.PeftConfig] = {
    "plain": peft.LoraConfig(**LORA),
    "lora_bias": peft.LoraConfig(**LORA, lora_bias=True),
    "biases": peft.LoraConfig(**LORA | {"target_modules": ["k_proj", "qkv_proj", "o_proj"]}, bias="all"),
    "biases_dora": peft.LoraConfig(
        **LORA | {"target_modules": ["q_proj", "k_proj", "qkv_proj"]}, bias="all", use_dora=True
    ),
    "dora": peft.LoraConfig(**LORA | {"r": 19}, use_dora=True, use_rslora=True),
    "ia3": peft.IA3Config(
        target_modules=["qkv_proj", "k_proj", "v_proj", "o_proj", "down_proj", "gate_up_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
    "ia3_head": peft.IA3Config(
        target_modules=["o_proj", "lm_head"],
        feedforward_modules=["o_proj"],
        task_type="CAUSAL_LM",
    ),
    "embedding": peft.LoraConfig(**LORA | {"target_modules": ["embed_tokens", "o_proj"]}),
    "head": peft.LoraConfig(**LORA | {"target_modules": ["lm_head"], "r": 18}),
    "both": peft.LoraConfig(**LORA | {"target_modules": rf"{LAYERS}|lm_head|model\.embed_tokens"}, use_rslora=True),
    "head_dora": peft.LoraConfig(**LORA | {"target_modules": rf"{LAYERS}|lm_head"}, use_dora=True),
    "head_bias": peft.LoraConfig(**LORA | {"target_modules": ["o_proj", "lm_head"]}, lora_bias=True),
    "saved": peft.LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
    "saved_head": peft.LoraConfig(**LORA | {"target_modules": ["down_proj"]}, modules_to_save=["lm_head"]),
    "saved_embedding": peft.LoraConfig(**LORA | {"target_modules": ["o_proj"]}, modules_to_save=["embed_tokens"]),
    "saved_norms": peft.LoraConfig(**LORA | {"target_modules": ["o_proj"]}, modules_to_save=["norm", "embed_tokens"]),
    "one_norm": peft.LoraConfig(**LORA | {"target_modules": ["down_proj"], "r": 3}, modules_to_save=["model.norm"]),
    "tokens": peft.LoraConfig(**LORA, trainable_token_indices=[40, 3, 96, 11, 12, 13, 14, 15, 16]),
    "head_tokens": peft.LoraConfig(
        **LORA | {"target_modules": ["o_proj"]},
        trainable_token_indices={"embed_tokens": [20, 7], "lm_head": [50, 8, 30, 31, 32, 33, 34]},
    ),
    "same_tokens": peft.LoraConfig(  # on a tied base PEFT saves these rows once
        **LORA | {"target_modules": ["o_proj"]},
        trainable_token_indices={"lm_head": [60, 9, 2], "embed_tokens": [60, 9, 2]},
    ),
    "only_head_tokens": peft.LoraConfig(
        **LORA | {"target_modules": ["o_proj"]}, trainable_token_indices={"lm_head": [50, 8, 33]}
    ),
    # On a tied base one matrix, or one pair, serves in both places.
    "tied_saved": peft.LoraConfig(
        **LORA | {"target_modules": ["o_proj"]}, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "tied_head": peft.LoraConfig(
        **LORA | {"target_modules": ["down_proj"]}, modules_to_save=["lm_head"], ensure_weight_tying=True
    ),
    "tied_pair": peft.LoraConfig(
        **LORA | {"target_modules": ["embed_tokens", "o_proj"]}, ensure_weight_tying=True, alpha_pattern={"lm_head": 7}
    ),
    "tied_expression": peft.LoraConfig(
        **LORA | {"target_modules": r".*\.o_proj|(.*\.)?(lm_head|down_proj)"}, ensure_weight_tying=True, use_rslora=True
    ),
    "tied_of_another_name": peft.LoraConfig(  # PEFT looks for the bare name, so that this is not tied
        **LORA | {"target_modules": r"model\.(embed_tokens|norm_of_nothing)"}, ensure_weight_tying=True
    ),
}

ATTENTION = LORA | {"target_modules": r".*\.self_attn\.[a-z_]+_(proj|mqa)"}
OF_LATENTS: dict[str, peft.PeftConfig] = {
    "latent_plain": peft.LoraConfig(**ATTENTION),
    "latent_bias": peft.LoraConfig(**ATTENTION, lora_bias=True),
    "latent_dora": peft.LoraConfig(**ATTENTION | {"r": 19}, use_dora=True),
    "latent_ia3": peft.IA3Config(target_modules=["kv_b_proj", "o_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "latent_ia3_inputs": peft.IA3Config(
        target_modules=["kv_b_proj", "q_b_proj"], feedforward_modules=["kv_b_proj"], task_type="CAUSAL_LM"
    ),
}
"""Formats for bases with a compressed KV."""


class FormatZoo(Zoo):
    """One family's base, an adapter in each format, and PEFT's answers from what it reads back from disk."""

    def __init__(self, family: str, root: Path, formats: Sequence[str], tied: bool = False, **fields: Any) -> None:
        super().__init__(family, root, tie_word_embeddings=tied, **fields)
        self.formats = formats
        self._models: dict[str | None, Any] = {}

    def make_adapters(self) -> None:
        """Save every format."""
        for seed, name in enumerate(self.formats):
            self.make_format(name, (FORMATS | OF_LATENTS)[name], seed)

    def make_format(self, name: str, config: peft.PeftConfig, seed: int) -> Path:
        """Save one adapter all of whose parameters matter."""
        torch.manual_seed(seed)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(self._base(), copy.deepcopy(config))  # tying changes it
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std(correction=0).clamp(min=0.5))
            shutil.rmtree(self.adapters / name, ignore_errors=True)
            model.save_pretrained(self.adapters / name)
        return self.adapters / name

    @torch.no_grad()
    def answer(self, asked: Asked) -> list[int]:
        """PEFT's greedy tokens, one request at a time."""
        if asked not in self._answers:
            keywords = dict(max_new_tokens=asked.output, do_sample=False, eos_token_id=None, pad_token_id=0)
            tokens = self._model(asked.adapter).generate(input_ids=torch.tensor([asked.prompt]), **keywords)
            self._answers[asked] = tokens[0, len(asked.prompt) :].tolist()
        return self._answers[asked]

    def _base(self) -> Any:
        return self.auto.from_pretrained(self.base, dtype=torch.float32, **EXACT).eval()

    def _model(self, name: str | None) -> Any:
        if name not in self._models:
            base = self._base()
            self._models[name] = base if name is None else peft.PeftModel.from_pretrained(base, self.adapters / name)
        return self._models[name].eval()
