"""Tiny random models of every family, PEFT adapters for them, and PEFT's own greedy answers in float32."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.loader import LoadedModel, load_model
from loramux.engine.messages import AdapterRef, Request, SamplingParams
from loramux_adapters.base import describe_base
from loramux_adapters.convert.renaming import rename_adapter
from loramux_adapters.plan import PlanLimits

transformers.logging.set_verbosity_error()

EXACT = {"attn_implementation": "eager"}
"""How a reference is loaded: some versions of transformers choose an attention that leaves out Gemma's soft cap."""

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE_HEADS = {"head_dim": 24}
WINDOW = {"sliding_window": 7}
SIX_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SIX_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3}
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,  # pages of 16 tokens hold the widest tile of an adapter
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}

TWO_WIDTHS = (
    WIDE_HEADS | WINDOW | {"global_head_dim": 40, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
)

FIRST_FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, WIDE_HEADS),
    "mistral": (transformers.MistralConfig, WINDOW),
    "gemma2": (
        transformers.Gemma2Config,
        WIDE_HEADS
        | WINDOW
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (transformers.Gemma3TextConfig, WIDE_HEADS | WINDOW | {"query_pre_attn_scalar": 24}),
    "phi3": (transformers.Phi3Config, WINDOW),
    "olmo2": (transformers.Olmo2Config, {}),
    "granite": (transformers.GraniteConfig, {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "smollm3": (transformers.SmolLM3Config, {}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2} | WINDOW),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        WIDE_HEADS | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
}
"""Families that every test goes through at length."""

NEWER_FAMILIES = {
    "gemma": (transformers.GemmaConfig, WIDE_HEADS),
    "olmo3": (transformers.Olmo3Config, WINDOW | {"num_hidden_layers": 4}),
    "ministral": (transformers.MinistralConfig, WINDOW | {"head_dim": 16}),
    "ministral3": (
        transformers.Ministral3Config,
        WIDE_HEADS
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "granite4_micro": (
        transformers.GraniteMoeHybridConfig,
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "num_local_experts": 0}
        | {"shared_intermediate_size": 40, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    ),
    "granite_swa": (transformers.GraniteSWAConfig, WINDOW),
    "glm": (transformers.GlmConfig, WIDE_HEADS),
    "glm4": (transformers.Glm4Config, WIDE_HEADS),
    "cohere": (transformers.CohereConfig, {"use_qk_norm": True}),
    "cohere2": (transformers.Cohere2Config, WINDOW | {"num_hidden_layers": 4}),
    "exaone4": (transformers.Exaone4Config, WINDOW | {"sliding_window_pattern": 2}),
    "seed_oss": (transformers.SeedOssConfig, WIDE_HEADS),
    "ernie4_5": (transformers.Ernie4_5Config, {}),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, WIDE_HEADS),
    "starcoder2": (transformers.Starcoder2Config, WINDOW),
    "arcee": (transformers.ArceeConfig, {}),
    "apertus": (transformers.ApertusConfig, {}),
    "cwm": (transformers.CwmConfig, WIDE_HEADS | WINDOW | {"num_hidden_layers": 4}),
    "gemma4": (transformers.Gemma4TextConfig, TWO_WIDTHS | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4_e2b": (
        transformers.Gemma4TextConfig,
        TWO_WIDTHS
        | {
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 10,
        },
    ),
    "gemma3n": (
        transformers.Gemma3nTextConfig,
        WIDE_HEADS
        | WINDOW
        | {
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "num_kv_shared_layers": 3,
            "activation_sparsity_pattern": [0.9, 0.4, 0.9, 0.0, 0.0],
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 10,
            "laurel_rank": 6,
            "altup_num_inputs": 3,
            "final_logit_softcapping": 3.0,
        },
    ),
}

NEWER_MIXTURES = {
    "gpt_oss": (transformers.GptOssConfig, WIDE_HEADS | WINDOW | SIX_LOCAL | {"swiglu_limit": 0.5}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, SIX_EXPERTS | {"shared_expert_intermediate_size": 48}),
    "glm4_moe": (transformers.Glm4MoeConfig, WIDE_HEADS | ROUTED | {"use_qk_norm": True}),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, ROUTED | LATENT),
    "deepseek_v2": (transformers.DeepseekV2Config, ROUTED | LATENT),
    "deepseek_v3": (transformers.DeepseekV3Config, ROUTED | LATENT | {"n_group": 2}),
    "granitemoe": (transformers.GraniteMoeConfig, SIX_LOCAL | {"residual_multiplier": 0.5}),
    "granitemoeshared": (transformers.GraniteMoeSharedConfig, SIX_LOCAL | {"shared_intermediate_size": 40}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.5}),
    "phimoe": (transformers.PhimoeConfig, SIX_LOCAL | {"num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "moe_layer_start_index": 1},
    ),
    "dots1": (transformers.Dots1Config, WIDE_HEADS | ROUTED),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        WIDE_HEADS
        | SIX_LOCAL
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "solar_open": (transformers.SolarOpenConfig, WIDE_HEADS | ROUTED),
    "exaone_moe": (
        transformers.ExaoneMoeConfig,
        WIDE_HEADS | WINDOW | SIX_EXPERTS | {"sliding_window_pattern": 2, "n_group": 2},
    ),
    "granitemoe_swa": (
        transformers.GraniteMoeSWAConfig,
        WINDOW
        | SIX_LOCAL
        | {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "shared_intermediate_size": 40,
            "layer_rope_theta": [10000.0, 0, 500.0],
        },
    ),
    "cohere2_moe": (
        transformers.Cohere2MoeConfig,
        WIDE_HEADS
        | WINDOW
        | {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1, "expert_selection_fn": "sigmoid"}
        | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40, "sliding_window_pattern": 2},
    ),
    "gemma4_26b_a4b": (
        transformers.Gemma4TextConfig,
        TWO_WIDTHS
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
}

HYBRID = {
    "head_dim": 24,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 20,
}

CUT_HYBRIDS = {
    "qwen3_5": (transformers.Qwen3_5TextConfig, HYBRID),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        HYBRID | SIX_EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        HYBRID | SIX_EXPERTS | {"shared_expert_intermediate_size": 48},
    ),
}
"""Some of the layers have linear attention, which ranks divide."""

MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.05, 0.4],
    "shared_intermediate_size": 40,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "logits_scaling": 0.5,
}

NEMOTRON = {
    "head_dim": 24,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 12,
    "chunk_size": 16,
    "time_step_min": 0.05,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}

FALCON = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_chunk_size": 16,
    "mamba_proj_bias": True,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 3.0,
    "ssm_out_multiplier": 8.0,
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 1.3],
    "mlp_multipliers": [0.7, 1.2],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
OLMO_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
}

WHOLE_HYBRIDS = {
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, MAMBA | SIX_LOCAL),
    "granite4_h_micro": (
        transformers.GraniteMoeHybridConfig,
        MAMBA | {"num_local_experts": 0, "mamba_n_groups": 1, "tie_word_embeddings": True},
    ),
    "nemotron_h": (transformers.NemotronHConfig, NEMOTRON),
    "bamba": (
        transformers.BambaConfig,
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_conv_bias": False},
    ),
    "falcon_h1": (transformers.FalconH1Config, FALCON | {"mamba_norm_before_gate": False}),
    "falcon_h1_norm_first": (transformers.FalconH1Config, FALCON | {"mamba_rms_norm": True, "num_hidden_layers": 2}),
    "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    "lfm2_moe": (
        transformers.Lfm2MoeConfig,
        SIX_EXPERTS
        | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "olmo_hybrid": (transformers.OlmoHybridConfig, OLMO_HYBRID),
}
"""Hybrids that one rank serves: with Mamba 2, convolutions, or linear attention in another form."""

HYBRIDS = CUT_HYBRIDS | WHOLE_HYBRIDS

UNDIVIDED = (*WHOLE_HYBRIDS, "gemma3n")
"""Families that one rank serves."""


def with_images(
    config_class: type, text_class: type, vision: Mapping[str, object], **more: object
) -> Callable[..., object]:
    """Make configs of a model of text and images from the fields of its text."""
    tokens = {f"{name}_token_id": 90 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}

    def make(**fields: object) -> object:
        return config_class(text_config=text_class(**fields).to_dict(), vision_config=vision, **tokens, **more)

    return make


VISION = {"hidden_size": 16, "intermediate_size": 16}
PATCHES = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
BLOCKS = VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
HALF_SECTIONS = {
    "rope_parameters": SECTIONS["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}
}

FULL_FIRST = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
"""Layers of which the last does not hide what those before it see."""

WITH_IMAGES = {
    "gemma3_images": (
        with_images(
            transformers.Gemma3Config,
            transformers.Gemma3TextConfig,
            PATCHES | {"image_size": 24, "patch_size": 4},
            mm_tokens_per_image=9,
        ),
        WIDE_HEADS | WINDOW | FULL_FIRST | {"query_pre_attn_scalar": 24},
    ),
    "gemma4_images": (
        with_images(
            transformers.Gemma4Config,
            transformers.Gemma4TextConfig,
            PATCHES | {"head_dim": 8, "num_key_value_heads": 2, "patch_size": 4},
        ),
        TWO_WIDTHS
        | FULL_FIRST
        | {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 97}
        | {"hidden_size_per_layer_input": 10},
    ),
    "mistral3_images": (
        with_images(
            transformers.Mistral3Config,
            transformers.MistralConfig,
            PATCHES | {"model_type": "pixtral", "head_dim": 8, "patch_size": 2},
        ),
        WIDE_HEADS,
    ),
    "qwen2_vl": (
        with_images(
            transformers.Qwen2VLConfig,
            Qwen2VLTextConfig,
            {"depth": 2, "embed_dim": 24, "num_heads": 3, "hidden_size": 64, "patch_size": 4},
        ),
        SECTIONS,
    ),
    "qwen2_5_vl": (
        with_images(
            transformers.Qwen2_5_VLConfig,
            Qwen2_5_VLTextConfig,
            BLOCKS | {"window_size": 24, "fullatt_block_indexes": [1]},
        ),
        SECTIONS,
    ),
    "qwen3_vl": (
        with_images(
            transformers.Qwen3VLConfig,
            transformers.Qwen3VLTextConfig,
            BLOCKS | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        ),
        SECTIONS | {"head_dim": 16},
    ),
    "qwen3_vl_moe": (
        with_images(
            transformers.Qwen3VLMoeConfig,
            transformers.Qwen3VLMoeTextConfig,
            BLOCKS | {"num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
        ),
        SECTIONS | SIX_EXPERTS | {"head_dim": 16, "mlp_only_layers": [1]},
    ),
    "qwen3_5_images": (
        with_images(
            transformers.Qwen3_5Config, transformers.Qwen3_5TextConfig, BLOCKS | {"num_position_embeddings": 16}
        ),
        HYBRID | HALF_SECTIONS,
    ),
    "qwen3_5_moe_images": (
        with_images(
            transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeTextConfig, BLOCKS | {"num_position_embeddings": 16}
        ),
        HYBRID | HALF_SECTIONS | SIX_EXPERTS | {"shared_expert_intermediate_size": 48},
    ),
}
"""Models of text and images."""

REFUSED_FAMILIES = {
    "falcon": (transformers.FalconConfig, {"new_decoder_architecture": True}),
    "llama4": (
        transformers.Llama4TextConfig,
        WIDE_HEADS | {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 16},
    ),
}

FAMILIES = FIRST_FAMILIES | NEWER_FAMILIES | NEWER_MIXTURES | HYBRIDS | WITH_IMAGES | REFUSED_FAMILIES
SERVED = [family for family in FAMILIES if family not in REFUSED_FAMILIES]

ON_RANKS = pytest.mark.parametrize(
    "ranks", [pytest.param(1, id="one rank"), pytest.param(2, id="two ranks", marks=pytest.mark.slow)]
)
"""For tests of what must be alike on `tensor_parallel_size=ranks`. The engine is closed by the test."""

LINEARS = (
    r".*\.(qkv_proj|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj|q_b_proj|kv_b_proj|c_fc|c_proj"
    r"|input_linear|output_linear|out_proj|in_proj\w*)"
)
"""Linears of every family, by their names."""

NOT_FOR_PEFT = {
    "gemma4_images": r".*vision_tower.*",
    **dict.fromkeys(("nemotron_h", "falcon_h1", "falcon_h1_norm_first"), r".*\.out_proj"),
}
"""Modules on which PEFT itself fails: linears that clip their results, or whose weight alone a fused kernel reads."""

ATTENTION = ["qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"]

RECIPES = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rslora": {"r": 20, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(qkv_proj|q_proj|v_proj)"},
    "patterns": {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"down_proj": 33},
        "alpha_pattern": {"o_proj": 3},
    },
    "one_layer": {"r": 17, "lora_alpha": 17, "target_modules": ["down_proj", "o_proj"], "layers_to_transform": [1]},
}


@dataclass(frozen=True)
class Asked:
    """One greedy request of a test."""

    name: str
    adapter: str | None
    prompt: tuple[int, ...]
    output: int


class Zoo:
    """One family's model and adapters on disk, and PEFT's answers."""

    def __init__(self, family: str, root: Path, saved_as: torch.dtype = torch.float32, **fields: object) -> None:
        self.family = family
        self.base = root / "base"
        self.adapters = root / "adapters"
        config_class, extra = FAMILIES[family]
        torch.manual_seed(0)
        config = config_class(**SMALL | extra | fields)
        # Return the whole model, even if its text could be loaded separately, because the whole model is published and
        # trained.
        whole = family in WITH_IMAGES
        self.auto = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
        model = self.auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms that start at one and biases at zero would hide a missing multiplication.
                if name.endswith(".dt_bias"):  # states that remember a token for long, and others that forget it
                    parameter.copy_(torch.linspace(-8.0, 1.0, len(parameter)))
                elif name.endswith((".A_log", ".D")):  # states matter more than the value that is added to them
                    parameter.mul_(0.2)
                elif parameter.std() == 0:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3.0)
            saved = model.state_dict()
            for name, buffer in model.named_buffers():  # factors of layers, biases of routers
                if name in saved and buffer.is_floating_point():
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        model.to(saved_as).save_pretrained(self.base)
        self._answers: dict[Asked, list[int]] = {}
        self._reference: peft.PeftModel | None = None

    def make_adapters(self) -> None:
        """Save every recipe with weights that matter."""
        for seed, (name, recipe) in enumerate(RECIPES.items()):
            self.make_adapter(name, recipe, 100 + seed)

    def make_adapter(self, name: str, recipe: dict[str, object], seed: int) -> None:
        """Save an adapter whose B is not zero."""
        config = peft.LoraConfig(task_type="CAUSAL_LM", exclude_modules=NOT_FOR_PEFT.get(self.family), **recipe)
        if self._reference is None:
            model = self.auto.from_pretrained(self.base, dtype=torch.float32, **EXACT).eval()
            self._reference = peft.get_peft_model(model, config, adapter_name=name)
        else:
            self._reference.add_adapter(name, config)
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in self._reference.named_parameters():
                if f"lora_B.{name}." in key:
                    parameter.copy_(torch.randn(parameter.shape) * 0.15)
        self._reference.save_pretrained(self.adapters, selected_adapters=[name])
        self._reference.eval()

    def rename_adapter(self, name: str) -> None:
        """Do the same as an upload if the served text model has other names than the trained one."""
        with tempfile.TemporaryDirectory() as into:
            if (
                rename_adapter(self.adapters / name, Path(into), describe_base(self.base), PlanLimits(max_rank=64))
                is None
            ):
                return
            shutil.copytree(into, self.adapters / name, dirs_exist_ok=True)

    def forget_adapter(self, name: str) -> None:
        """Drop an adapter from PEFT's model; its files stay."""
        assert self._reference is not None
        self._reference.delete_adapter(name)

    def ref(self, name: str) -> AdapterRef:
        return AdapterRef(digest=f"sha256:{name}", path=str(self.adapters / name))

    def answer(self, asked: Asked) -> list[int]:
        """PEFT's greedy tokens, one request at a time."""
        if asked not in self._answers:
            self._answers[asked] = self.generate(asked)[0]
        return self._answers[asked]

    @torch.no_grad()
    def generate(self, asked: Asked, cache: transformers.Cache | None = None) -> tuple[list[int], torch.Tensor]:
        """PEFT's greedy tokens and their logits `[tokens, vocab]`, with keys and values in `cache`."""
        model = self._reference
        assert model is not None
        keywords = dict(max_new_tokens=asked.output, do_sample=False, eos_token_id=None, pad_token_id=0)
        keywords |= dict(output_logits=True, return_dict_in_generate=True, past_key_values=cache)
        if asked.adapter is not None:
            model.set_adapter(asked.adapter)
        with model.disable_adapter() if asked.adapter is None else nullcontext():
            prompt = torch.tensor([asked.prompt])
            # The mask is given because `generate` would take token 0 for padding.
            made = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **keywords)
        return made.sequences[0, len(asked.prompt) :].tolist(), torch.cat(made.logits)

    def engine(self, **engine_settings: Any) -> Engine:
        return make_engine(self.base, **engine_settings)


def make_engine(base: Path, **engine_settings: Any) -> Engine:
    loaded, settings = load(base, **engine_settings)
    return build_engine(loaded, settings, wake=lambda: None)


def _model_type(base: Path) -> str:
    return json.loads((base / "config.json").read_text())["model_type"]


def load(
    base: Path, quantization: Any = "none", dtype: Any = "float32", **engine_settings: Any
) -> tuple[LoadedModel, Settings]:
    defaults: dict[str, Any] = {
        "device": os.environ.get("LORAMUX_TEST_DEVICE", "cpu"),
        "num_threads": 1,
        # A hybrid with one layer of attention and wide linears needs larger pages; the engine chooses them.
        "block_size": None if _model_type(base) in {config.model_type for config, _ in WHOLE_HYBRIDS.values()} else 16,
        "pool_bytes": 4 << 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "in_process": engine_settings.get("tensor_parallel_size", 1) > 1,  # ranks are threads: processes start slowly
    }
    settings = Settings(
        model=ModelSettings(path=str(base), served_model_name="base", dtype=dtype, quantization=quantization),
        engine=EngineSettings(**defaults | engine_settings),
    )
    return load_model(settings), settings


def serve(zoo: Zoo, engine: Engine, asked: list[Asked], arrivals: list[int] | None = None) -> dict[str, list[int]]:
    """Run the requests to their ends; see `run`."""
    return run(engine, [to_request(zoo, one) for one in asked], arrivals)


def run(engine: Engine, requests: list[Request], arrivals: list[int] | None = None) -> dict[str, list[int]]:
    """Run the requests to their ends, the i-th arriving before step `arrivals[i]`; returns their tokens.

    A load takes as many steps as it has parts, however slow the machine is: each part ends before the next step.
    """
    arrivals = arrivals or [0] * len(requests)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    ended: set[str] = set()
    turn = 0
    while len(ended) < len(requests):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == turn:
                engine.submit(request)
        known = engine.scheduler.memory.residency._known.values()
        loads: list[Any] = [one.pending for one in known if one.pending is not None]
        wait(loads, timeout=5.0)
        report = engine.step()
        turn += 1
        for event in report.events if report else []:
            assert event.finish_reason != "error", event.fault
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
            if event.finish_reason:
                ended.add(event.request_id)
    return tokens


def to_request(zoo: Zoo, asked: Asked, **sampling: Any) -> Request:
    parameters = {"max_tokens": asked.output, "temperature": 0.0, "ignore_eos": True} | sampling
    return Request(
        id=asked.name,
        tenant="t",
        prompt_token_ids=list(asked.prompt),
        sampling=SamplingParams(**parameters),
        adapter=zoo.ref(asked.adapter) if asked.adapter else None,
    )
