"""Refusals by config.json alone: what is served passes in every spelling, and what is not is named."""

from __future__ import annotations

from typing import Any

import pytest

from loramux_adapters.checkpoint_config import refusal_of_config
from loramux_adapters.families import ENCODERS, FAMILIES


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "rope_scaling": None, "rope_parameters": {"rope_type": "llama3"}},
        {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}},
        {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "linear"}}},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "use_bidirectional_attention": False}},
        {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
        {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
        {"model_type": "gemma4_text", "rope_parameters": {"full_attention": {"rope_type": "proportional"}}},
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model_type": "llama", "quantization_config": {"load_in_4bit": True}},
    ],
    ids=str,
)
def test_config_that_is_served_is_not_refused(fields: dict[str, Any]) -> None:
    assert refusal_of_config(fields) is None


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_every_served_family_passes(family: str) -> None:
    assert refusal_of_config({"model_type": family}) is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "qwen3_omni_moe"}, "nearest of the supported ones are qwen3_5_moe, qwen3_moe"),
        ({"model_type": "nemotron"}, "do not pass the step on to attention"),
        ({"model_type": "llama4"}, "'llama4' is not served: its attention is cut into chunks"),
        ({"model_type": "deepseek_v32"}, "a trained indexer chooses"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "'mistral4' is not served"),
        ({"model_type": "gemma3", "text_config": {"model_type": "zzz"}}, "'zzz' has not been shown"),
        ({"model_type": "zzz"}, "supported are apertus"),
        ({"model_type": "llama", "rope_scaling": {"type": "axial"}}, "'axial'"),
        ({"model_type": "gemma3", "text_config": {"rope_parameters": {"full": {"rope_type": "axial"}}}}, "'axial'"),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}, "sees later tokens"),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "all"}}, "sees later tokens"),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": ["x"]}}, "sees later tokens"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key' is not served"),
        ({"model_type": "bert", "quantization_config": {"quant_method": "gptq"}}, "weights of 16 or 32 bits"),
        ({"model_type": "modernbert", "rope_parameters": {"full": {"rope_type": "dynamic"}}}, "'dynamic'"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True, "quantization_config": {"a": 1}},
            "quantiz",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "sees later tokens"),
        ({"model_type": "robberta"}, "nearest of the supported ones are roberta"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "exl3"}}, "'exl3'"),
        ({"model_type": "llama", "quantization_config": ["gptq"]}, "quantized in a form that is not served"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}},
            "quantized in a form that is not served",
        ),
        (
            {
                "model_type": "llama",
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "int-quantized",
                    "config_groups": {"group_0": {"weights": {"type": ["int"], "num_bits": 8}}},
                },
            },
            "fields of another type",
        ),
    ],
    ids=str,
)
def test_config_that_is_not_served_is_refused_by_its_field(fields: dict[str, Any], told: str) -> None:
    refusal = refusal_of_config(fields)
    assert refusal is not None
    assert told in refusal
