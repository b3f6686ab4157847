"""Adapters of every convertible kind, made by PEFT with weights that matter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.tuners.boft import layer as boft

boft._FBD_CUDA = False  # PEFT would try to build a CUDA extension
EVERY = ["q_proj", "v_proj", "down_proj"]

# One of each kind has the kind's plain name.
KINDS: dict[str, peft.PeftConfig] = {
    "loha": peft.LoHaConfig(r=3, alpha=5, target_modules="all-linear"),
    "loha patterns": peft.LoHaConfig(
        r=2, alpha=5, target_modules=EVERY, rank_pattern={"down_proj": 4}, alpha_pattern={"q_proj": 9}
    ),
    "loha folded": peft.LoHaConfig(r=7, alpha=5, target_modules=["k_proj", "v_proj"]),
    "lokr": peft.LoKrConfig(r=2, alpha=3, target_modules="all-linear"),
    "lokr both": peft.LoKrConfig(r=1, alpha=3, target_modules=EVERY, decompose_both=True),
    "lokr factor": peft.LoKrConfig(r=1, alpha=3, target_modules=EVERY, decompose_factor=4, rank_pattern={"v_proj": 9}),
    "vera": peft.VeraConfig(r=6, target_modules=EVERY, projection_prng_key=3),
    "pvera": peft.PveraConfig(r=6, target_modules=EVERY, projection_prng_key=3),
    "randlora": peft.RandLoraConfig(r=5, target_modules=EVERY, randlora_alpha=2),
    "randlora sparse": peft.RandLoraConfig(r=8, target_modules="all-linear", randlora_alpha=2, sparse=True),
    "vblora": peft.VBLoRAConfig(r=3, target_modules=EVERY, num_vectors=11, vector_length=8, topk=3),
    "miss": peft.MissConfig(r=5, target_modules="all-linear"),
    "miss mini": peft.MissConfig(r=4, target_modules=EVERY, init_weights="mini", mini_r=8),
    "c3a": peft.C3AConfig(block_size=16, target_modules=EVERY, block_size_pattern={"v_proj": 8}),
    "delora": peft.DeloraConfig(r=4, target_modules=EVERY, rank_pattern={"down_proj": 6}, lambda_pattern={"q_proj": 3}),
    "gralora": peft.GraloraConfig(r=8, alpha=5, gralora_k=2, target_modules=EVERY),
    "gralora hybrid": peft.GraloraConfig(r=8, alpha=5, gralora_k=4, hybrid_r=3, target_modules="all-linear"),
    "adalora": peft.AdaLoraConfig(init_r=6, lora_alpha=12, total_step=10, target_modules=EVERY),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules="all-linear"),
    "oft cayley": peft.OFTConfig(oft_block_size=8, target_modules=EVERY, use_cayley_neumann=False),
    "oft terms": peft.OFTConfig(oft_block_size=4, target_modules=EVERY, num_cayley_neumann_terms=7),
    "oft two terms": peft.OFTConfig(oft_block_size=4, target_modules=EVERY, num_cayley_neumann_terms=2),
    "oft blocks": peft.OFTConfig(r=5, oft_block_size=0, target_modules=EVERY),
    "oft nearest": peft.OFTConfig(oft_block_size=7, target_modules=EVERY),
    "oft shared": peft.OFTConfig(oft_block_size=16, target_modules=EVERY, block_share=True),
    "oft constrained": peft.OFTConfig(oft_block_size=8, target_modules=EVERY, coft=True, eps=0.5),
    "boft": peft.BOFTConfig(boft_block_size=8, target_modules="all-linear"),
    "boft blocks": peft.BOFTConfig(boft_block_size=0, boft_block_num=4, target_modules=EVERY),
    "hra": peft.HRAConfig(r=6, target_modules="all-linear"),
    "hra orthogonal": peft.HRAConfig(r=5, target_modules=EVERY, apply_GS=True),
}

_SIZES = {
    "vera_lambda": 1.0,
    "randlora_lambda": 0.3,
    "miss_block": 0.05,
    "vblora_vector_bank": 0.2,
    "delora_lambda": 0.0,
}


def make_kind(base: Path, folder: Path, config: peft.PeftConfig, seed: int = 0) -> peft.PeftModel:
    """Save an adapter of `config` for the model in `base`; returns PEFT's model with it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config)
        torch.manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            size = next((size for key, size in _SIZES.items() if key in name), 0.2)
            if parameter.requires_grad and size:
                parameter.add_(torch.randn_like(parameter) * size)
        wrapped.save_pretrained(folder)
    return wrapped.eval()


def deltas(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    """Return each adapted linear's change `[out, in]`, by sending the identity through PEFT's own layer."""
    found: dict[str, Any] = {}
    layer_class = peft.tuners.tuners_utils.BaseTunerLayer
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, layer_class):
            eye = torch.eye(module.get_base_layer().in_features)
            with torch.no_grad():
                found[name] = (module(eye[None])[0] - module.get_base_layer()(eye)).T
    return found
