"""Multi-head latent attention over its compressed KV: what pages hold, activated LoRAs, and contexts in blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from activated_latents import ADAPTERS, ActivatedZoo, asked_of, check
from adapter_zoo import FAMILIES, ON_RANKS, Asked, Zoo, load, serve, to_request
from eager_drafts import draft_always
from preempting import preempting

from loramux.common.settings.serving import EngineSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.attention import KvLayout, LayerShape, probe_layers
from loramux.engine.execution.checkpoint import read_config
from loramux.engine.execution.memory_plan import plan_memory
from loramux.engine.execution.sharded_checkpoint import empty_model
from loramux_adapters import latent
from loramux_adapters.base import describe_base
from loramux_adapters.sharding import Sharding

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


@pytest.fixture(scope="module", params=LATENT)
def zoo(request, tmp_path_factory) -> ActivatedZoo:
    return ActivatedZoo(request.param, tmp_path_factory.mktemp(request.param))


def logprobs_of(zoo: Zoo, engine: Engine, asked: list[Asked]) -> dict[str, list[float]]:
    """Log probabilities of each request's tokens."""
    found: dict[str, list[float]] = {request.name: [] for request in asked}
    for request in asked:
        engine.submit(to_request(zoo, request, logprobs=0))
    while not engine.is_idle:
        report = engine.step()
        for event in report.events if report else []:
            assert event.finish_reason != "error", event.fault
            if event.token_id is not None:
                found[event.request_id].append(event.logprob)
    return found


@ON_RANKS
@pytest.mark.parametrize("budget", [9, 64])
def test_activated_lora_on_the_expansion_in_mixed_batches_answers_as_peft_does(
    zoo: ActivatedZoo, budget: int, ranks: int
) -> None:
    engine = zoo.engine(max_num_batched_tokens=budget, tensor_parallel_size=ranks)
    asked = asked_of((None, *ADAPTERS))
    check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))]))
    engine.close()


def test_activated_lora_on_the_expansion_reuses_the_bases_kv(zoo: ActivatedZoo) -> None:
    engine = zoo.engine(max_num_batched_tokens=64)
    serve(zoo, engine, asked_of([None]))
    before = engine.stats().cached_tokens
    asked = asked_of(["activated"])
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().cached_tokens - before == sum(n // 16 * 16 for n in (50, 9, 32, 0, 39))


def test_activated_lora_on_the_expansion_preempted_with_drafts_answers_as_peft_does(zoo: ActivatedZoo) -> None:
    asked = asked_of((None, *ADAPTERS), turn=3)
    answers = {request.name: zoo.answer(replace(request, name="")) for request in asked}
    engine = zoo.engine(max_num_batched_tokens=41)
    preempting(engine)
    draft_always(engine.scheduler, lambda own: answers[own.id])
    assert serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))]) == answers
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 5


def test_contexts_expanded_in_blocks_give_the_same_logprobs_as_absorbed_ones(zoo: ActivatedZoo, monkeypatch) -> None:
    """Chunks of 1 to 23 rows, blocks of 7 keys, and both forms in one step."""
    asked = asked_of((None, *ADAPTERS), turn=4)
    logprobs, blocks = [], []
    expanded = latent.LatentLinear._expanded

    def noting(self, latents, slot):
        blocks.append(len(latents))
        return expanded(self, latents, slot)

    monkeypatch.setattr(latent.LatentLinear, "_expanded", noting)
    monkeypatch.setattr(latent, "EXPANDED_KEYS", 7)
    for least_rows in (1 << 30, 3):
        monkeypatch.setattr(latent, "LEAST_EXPANDED_ROWS", least_rows)
        logprobs.append(logprobs_of(zoo, zoo.engine(max_num_batched_tokens=23, prefix_cache=False), asked))
        assert bool(blocks) == (least_rows == 3)
    assert max(blocks) == 7
    for name, mine in logprobs[0].items():
        assert mine == pytest.approx(logprobs[1][name], abs=2e-5), name


def test_memory_plan_counts_the_expansion_of_a_compressed_kv(zoo: ActivatedZoo) -> None:
    """The linear of each layer once more, and one block: 48 elements a token make 4 heads of 16 and of 12."""
    sharding = Sharding(read_config(zoo.base), 1)
    plan = plan_memory(zoo.base, describe_base(zoo.base), sharding, 4, 1 << 20, EngineSettings(block_size=16))
    inputs, outputs = 48, 4 * (16 + 12)
    assert plan.expansion_bytes == 4 * (3 * inputs * outputs + 512 * (inputs + 2 * outputs))
    assert plan.total_bytes == plan.weight_bytes + (1 << 20) + plan.expansion_bytes
