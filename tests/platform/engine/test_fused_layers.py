"""Fused decoder layers compute what transformers' own modules compute, in every family that is served."""

from __future__ import annotations

import pytest
import torch
from adapter_zoo import FAMILIES, HYBRIDS, RECIPES, SERVED, SMALL, Asked, Zoo, load, serve

from loramux.engine.engine import build_engine
from loramux.engine.execution.attention import KvLayout, probe_layers
from loramux.engine.execution.checkpoint import load_checkpoint
from loramux.engine.execution.fused_layers import FusedFeedForward, FusedLayer, FusedNorm, FusedStack, fuse_layers
from loramux.engine.execution.runner import Forward, StepInputs
from loramux_adapters.families import family_of
from loramux_kernels.native.loader import native_library
from loramux_kernels.packed_linear import Panels, choose_format
from loramux_kernels.tables import AttentionBatch

KEPT = (
    *("ministral", "ministral3", "glm", "glm4", "cohere", "cohere2", "exaone4", "ernie4_5", "hunyuan_v1_dense"),
    *(
        "starcoder2",
        "apertus",
        "gemma4",
        "gemma4_e2b",
        "gemma4_26b_a4b",
        "gemma4_images",
        "gemma3n",
        "gpt_oss",
        "glm4_moe_lite",
        "deepseek_v2",
        "deepseek_v3",
    ),
    *("exaone_moe", "granitemoe_swa", "cohere2_moe", "granite4_micro"),
    *("granitemoe", "granitemoeshared", "olmoe", "phimoe", "ernie4_5_moe"),
    *HYBRIDS,
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_images", "qwen3_5_moe_images"),
)
"""Families whose layers stay transformers' own."""
MIXTURES = tuple(family for family in SERVED if family_of(FAMILIES[family][0](**SMALL | FAMILIES[family][1])).experts)
"""Families whose layers have experts, which no one call computes."""
NEVER_IN_ONE_CALL = ("olmo2", "olmo3", "arcee")
"""Families whose queries and keys are normalised over all heads, or whose network has no gate."""
TURNS_BY_LAYER = ("gemma3", "gemma3_images", "granite_swa")
"""Families in which each layer is a separate call."""
LENGTHS = (11, 1, 20)
BLOCK = 16


def packed_inputs() -> StepInputs:
    """Three prompts of a step, each in its own two pages."""
    torch.manual_seed(3)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    ends = torch.tensor(LENGTHS).cumsum(0)
    table = torch.tensor([[4, 1], [0, 3], [5, 2]], dtype=torch.int32)
    slots = table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    cu_seqlens = torch.cat((torch.zeros(1), ends)).int()
    batch = AttentionBatch(cu_seqlens, torch.tensor(LENGTHS, dtype=torch.int32), table, slots)
    return StepInputs(torch.randint(3, 97, (sum(LENGTHS),)), positions, batch, torch.arange(sum(LENGTHS)))


class NoAdapters:
    """Stands in for a bank: nothing is resident."""

    pool = torch.empty(0)

    def serving(self, segments, extras, kv_slots):
        return torch.inference_mode()


def logits(model, layout: KvLayout, inputs: StepInputs) -> torch.Tensor:
    pool = torch.full((6 * layout.page_elements,), float("nan"), dtype=model.dtype)
    return Forward(model, layout.views(pool), NoAdapters())(inputs, None).float()


@pytest.mark.parametrize("family", KEPT)
def test_layers_of_another_make_stay_as_they_are(tmp_path, family: str) -> None:
    model = load_checkpoint(Zoo(family, tmp_path).base, "float32", torch.device("cpu"))
    norm = getattr(model.get_decoder(), "norm", None)
    assert fuse_layers(model, probe_layers(model)) == 0
    assert getattr(model.get_decoder(), "norm", None) is norm


@pytest.mark.parametrize("family", [family for family in SERVED if family not in KEPT])
def test_fused_layers_compute_the_logits_of_transformers(tmp_path, family: str) -> None:
    zoo = Zoo(family, tmp_path)
    inputs = packed_inputs()
    exact = zoo.auto.from_pretrained(zoo.base, dtype=torch.float32).eval()
    with torch.inference_mode():
        alone = (exact(input_ids=tokens[None]).logits[0] for tokens in inputs.input_ids.split(LENGTHS))
        wanted = torch.cat(list(alone))
    for dtype, slack in ((torch.float32, 4.0), (torch.bfloat16, 1.5)):
        model = load_checkpoint(zoo.base, str(dtype).removeprefix("torch."), torch.device("cpu")).eval()
        model.requires_grad_(False)
        layout = KvLayout(probe_layers(model), BLOCK, model.dtype.itemsize)
        own = logits(model, layout, inputs)
        assert fuse_layers(model, layout.layers) == len(layout.layers)
        fused = logits(model, layout, inputs)
        replaced = [module for module in model.get_decoder().layers.modules() if isinstance(module, FusedLayer)]
        assert len(replaced) == len(layout.layers)
        assert isinstance(model.get_decoder().norm, FusedNorm)
        # As near to the exact result as transformers' own modules are: rounding differs, nothing else.
        own_error, fused_error = ((x - wanted).norm() / wanted.norm() for x in (own, fused))
        assert fused_error <= slack * own_error + 1e-6, (dtype, fused_error, own_error)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "qwen3_moe"])
def test_fused_layers_replace_every_gated_network(tmp_path, family: str) -> None:
    """A mixture keeps its own; the second layer of this one is none."""
    loaded, _ = load(Zoo(family, tmp_path).base)
    modules = loaded.runner._forward.model.get_decoder().layers.modules()
    fused = [isinstance(module.mlp, FusedFeedForward) for module in modules if isinstance(module, FusedLayer)]
    assert fused == ([False, True, False] if family == "qwen3_moe" else [True] * 3)


def test_layer_with_an_unknown_norm_is_left_alone(tmp_path) -> None:
    model = load_checkpoint(Zoo("llama", tmp_path).base, "float32", torch.device("cpu"))
    layout = KvLayout(probe_layers(model), BLOCK, model.dtype.itemsize)
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(64)
    assert fuse_layers(model, layout.layers) == 2
    assert not isinstance(model.model.layers[1], FusedLayer)


def compute_twice(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have layers computed in one call and then by their modules; returns whether rows and KV were the same."""
    forward, in_one_call, same = FusedStack.forward, FusedStack.run_in_one_call, []

    def both(stack, hidden_states, *, position_embeddings, attention_step, **options):
        before = hidden_states.clone()
        slots = attention_step.batch.slot_mapping

        def results() -> list[torch.Tensor]:
            found = [hidden_states[0, attention_step.kept_rows if stack._is_last else slice(None)]]
            for layer in stack.layers:
                kv = attention_step.layers[layer.self_attn.layer_idx]
                pages, offsets = slots // kv.block_size, slots % kv.block_size
                found += [kv.key[pages, :, offsets], kv.value[pages, :, offsets]]
                found += [scale[pages] for scale in (kv.key_scale, kv.value_scale) if scale is not None]
            return found

        step = {"position_embeddings": position_embeddings, "attention_step": attention_step}
        if not in_one_call(stack, hidden_states[0], position_embeddings, attention_step):
            return forward(stack, hidden_states, **step)
        once = results()
        forward(stack, hidden_states.copy_(before), **step)
        same.append(all(map(torch.equal, once, results())))
        return hidden_states

    monkeypatch.setattr(FusedStack, "forward", both)
    monkeypatch.setattr(FusedStack, "run_in_one_call", lambda *_: False)
    return same


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in SERVED if family not in (*KEPT, *MIXTURES)),
        ("llama", {"saved_as": torch.bfloat16, "num_threads": 2}),
        ("llama", {"dtype": "bfloat16", "num_threads": 2}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("llama", {"quantization": "int8", "num_threads": 5}),
    ],
)
def test_layer_in_one_call_computes_what_its_modules_compute_to_the_bit(
    tmp_path, monkeypatch, family: str, options: dict
) -> None:
    if native_library() is None:
        pytest.skip("no C++ compiler")
    if "dtype" in options and choose_format(torch.zeros(4, 4, dtype=torch.bfloat16)) is not Panels:
        pytest.skip("this processor multiplies no pairs of bf16")
    options = dict(options)
    zoo = Zoo(family, tmp_path, options.pop("saved_as", torch.float32))
    zoo.make_adapters()
    # Its steps bring more than pairs on linears, and are computed by the modules.
    zoo.make_adapter("with a vector", {"r": 4, "target_modules": ["o_proj"], "use_dora": True}, 7)
    same = compute_twice(monkeypatch)
    loaded, settings = load(zoo.base, max_num_batched_tokens=29, **options)
    engine = build_engine(loaded, settings, wake=lambda: None)
    models = [None, *RECIPES, "with a vector"]
    asked = [Asked(f"r{i}", models[i % 7], tuple(range(5 + i, 20 + 5 * (i % 3))), 3 + i % 4) for i in range(9)]
    with_a_vector = asked.pop(6)
    serve(zoo, engine, asked, arrivals=[i // 3 for i in range(8)])
    # Its first two steps hold nothing else, and keep no row.
    serve(zoo, engine, [Asked("long", "plain", tuple(range(5, 75)), 3)])
    stacks, calls = len(loaded.runner._forward.model.get_decoder().layers), len(same)
    serve(zoo, engine, [with_a_vector])
    assert len(same) == calls
    engine.close()
    if family in NEVER_IN_ONE_CALL:
        assert not same
        return
    assert stacks == (3 if family in TURNS_BY_LAYER else 1)
    # 135 tokens of prompts by 29 a step, and two answers' tokens after the last of them.
    assert calls >= 7 * stacks
    assert all(same)
