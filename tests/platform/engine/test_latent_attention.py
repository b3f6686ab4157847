"""Multi-head latent attention over its compressed KV: what pages hold, and which adapters cannot be served so."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from adapter_zoo import FAMILIES, SMALL, Asked, Zoo, load, serve

from loramux.engine.engine import build_engine
from loramux.engine.execution.attention import KvLayout, LayerShape, probe_layers
from loramux.engine.execution.sharded_checkpoint import empty_model
from loramux_adapters.base import describe_model
from loramux_adapters.config import parse_adapter_config
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.families import FAMILIES as ROWS
from loramux_adapters.plan import PlanLimits, plan_adapter
from loramux_adapters.sharding import Sharding
from loramux_adapters.weights_file import SafetensorsHeader

LATENT = [name for name, (make, fields) in FAMILIES.items() if "kv_lora_rank" in fields]
GIB = 1 << 30


def deepseek_v2_lite() -> transformers.DeepseekV2Config:
    """The published config of DeepSeek-V2-Lite."""
    return transformers.DeepseekV2Config(
        vocab_size=102_400, hidden_size=2048, intermediate_size=10_944, moe_intermediate_size=1408,
        num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64,
        num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=None, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163_840,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepseek_v2_lite_holds_nine_times_the_context_in_a_gib(ranks: int) -> None:
    """Every rank holds the whole compressed KV."""
    layers = probe_layers(empty_model(Sharding(deepseek_v2_lite(), ranks)).to(torch.bfloat16))
    assert len(layers) == 27
    for layer in layers:
        assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (1, 576, 512)
        assert layer.has_values_in_keys
    compressed, whole = (KvLayout(shapes, 16, 2) for shapes in (layers, (LayerShape(16, 192, 128),) * 27))
    assert GIB // compressed.token_bytes == 34_521
    assert GIB // whole.token_bytes == 3_883
    assert compressed.page_bytes == 16 * 27 * 576 * 2
    in_fp8 = KvLayout(layers, 16, 2, is_fp8=True)
    assert in_fp8.page_bytes == compressed.page_bytes // 2 + 112, "a scale for each layer"


@pytest.mark.parametrize("family", LATENT)
def test_page_holds_the_vectors_that_transformers_caches(tmp_path, family: str) -> None:
    zoo, prompt = Zoo(family, tmp_path), tuple(range(5, 30))
    loaded, settings = load(zoo.base, prefix_cache=False)
    serve(zoo, build_engine(loaded, settings, wake=lambda: None), [Asked("alone", None, prompt, 1)])
    model, cache = zoo.auto.from_pretrained(zoo.base, dtype=torch.float32), transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prompt]), cache=cache)
    for mine, theirs in zip(loaded.runner._forward.layers, cache.layers, strict=True):
        wanted = torch.cat((theirs.keys, theirs.values), dim=-1)[0, 0]
        rows = mine.key.flatten(0, 2)
        places = torch.cdist(wanted, rows).argmin(dim=1)
        torch.testing.assert_close(rows[places], wanted, rtol=1e-4, atol=1e-5)
        assert mine.value.data_ptr() == mine.key.data_ptr()


@pytest.mark.parametrize("family", LATENT)
def test_activated_lora_on_the_expansion_is_refused_by_name(family: str) -> None:
    make, fields = FAMILIES[family]
    with torch.device("meta"):
        base = describe_model(transformers.AutoModelForCausalLM.from_config(make(**SMALL | fields)))
    assert ROWS[base.model_type].compresses_kv
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    on_all = parse_adapter_config(json.dumps(config | {"alora_invocation_tokens": [7]}).encode())
    with pytest.raises(ConfigRejected, match=r"kv_b_proj, which is one product .* Leave kv_b_proj out") as caught:
        plan_adapter(on_all, SafetensorsHeader({}, {}, 8), base, PlanLimits(max_rank=64))
    assert (caught.value.code, caught.value.field) == ("field_unsupported", "alora_invocation_tokens")
