"""Every served format of adapter as PEFT's configuration; a new format is one more line."""

from __future__ import annotations

import peft
from other_kinds import KINDS

LORA = {"r": 5, "lora_alpha": 10, "task_type": "CAUSAL_LM"}

SERVED: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(**LORA, target_modules=["q_proj", "v_proj"]),
    "lora-rslora": peft.LoraConfig(**LORA, target_modules=["q_proj", "o_proj"], use_rslora=True),
    "lora-patterns": peft.LoraConfig(
        **LORA,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"down_proj": 21},
        alpha_pattern={"q_proj": 3},
    ),
    "lora-all-linear": peft.LoraConfig(**LORA, target_modules="all-linear"),
    "lora-regex": peft.LoraConfig(**LORA, target_modules=r".*layers\.1\.(self_attn\.k|mlp\.up)_proj"),
    "lora-layers": peft.LoraConfig(**LORA, target_modules=["gate_proj", "o_proj"], layers_to_transform=[1]),
    "lora-alora": peft.LoraConfig(**LORA, target_modules="all-linear", alora_invocation_tokens=[13, 200]),
    "lora-exclude": peft.LoraConfig(**LORA, target_modules=["q_proj", "up_proj"], exclude_modules=r".*layers\.0\..*"),
    "lora-bias": peft.LoraConfig(**LORA, target_modules=["q_proj", "down_proj"], lora_bias=True),
    "lora-bias-all": peft.LoraConfig(**LORA, target_modules=["q_proj", "down_proj"], bias="all"),
    "lora-head-and-embedding": peft.LoraConfig(**LORA, target_modules=["lm_head", "embed_tokens", "o_proj"]),
    "lora-saved": peft.LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "lora-norms": peft.LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["norm"]),
    "pissa": peft.LoraConfig(**LORA, target_modules=["q_proj", "down_proj"], init_lora_weights="pissa"),
    "olora": peft.LoraConfig(**LORA, target_modules=["q_proj", "down_proj"], init_lora_weights="olora"),
    "lora-tokens": peft.LoraConfig(**LORA, target_modules=["q_proj"], trainable_token_indices=[5, 80, 9, 200]),
    "dora": peft.LoraConfig(**LORA, target_modules="all-linear", use_dora=True),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj", "lm_head"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
    **{name: config for name, config in KINDS.items() if " " not in name},
}

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

SERVED_ON_MIXTURES: dict[str, peft.PeftConfig] = {
    "all-linear": peft.LoraConfig(**LORA, target_modules="all-linear"),
    "experts": peft.LoraConfig(**LORA, target_modules=[], target_parameters=_EXPERTS),
    "experts-and-attention": peft.LoraConfig(
        **LORA, target_modules=["q_proj", "o_proj"], target_parameters=_EXPERTS, rank_pattern={"down_proj": 3}
    ),
}
"""The same for bases whose MLP is a mixture of experts."""

_ON = {"r": 4, "target_modules": ["q_proj"]}

REFUSED: dict[str, tuple[peft.PeftConfig, str]] = {
    "pissa-random": (peft.LoraConfig(**_ON, init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    "replication": (peft.LoraConfig(**_ON, layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
    "saved-linear": (peft.LoraConfig(**_ON, modules_to_save=["o_proj"]), "modules_to_save"),
    "vera-seed": (peft.VeraConfig(**_ON, save_projection=False), "save_projection"),
    "vblora-top": (
        peft.VBLoRAConfig(**_ON, num_vectors=300, vector_length=8, save_only_topk_weights=True),
        "save_only_topk_weights",
    ),
    "miss-bat": (peft.MissConfig(**_ON, init_weights="bat"), "init_weights"),
    "oft-old": (
        peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"], peft_version="0.17.1"),
        "use_cayley_neumann",
    ),
    "boft-butterfly": (
        peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, target_modules=["q_proj"]),
        "boft_n_butterfly_factor",
    ),
    "hira": (peft.HiraConfig(**_ON), "peft_type"),
    "shira": (peft.ShiraConfig(r=2, target_modules=["q_proj"]), "peft_type"),
    "fourierft": (peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"]), "peft_type"),
    "waveft": (peft.WaveFTConfig(n_frequency=20, target_modules=["q_proj"]), "peft_type"),
    "ln-tuning": (peft.LNTuningConfig(target_modules=["norm"]), "peft_type"),
    "prompt-tuning": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type"),
    "prefix-tuning": (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type"),
    "p-tuning": (peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type"),
}
"""Configurations whose files are refused, and the field that the refusal names."""
