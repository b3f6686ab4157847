"""Fused decoder layers compute what transformers' own modules compute, in every family that is served."""

from __future__ import annotations

import pytest
import torch
from adapter_zoo import HYBRIDS, SERVED, Zoo, load

from loramux.engine.execution.attention import KvLayout, probe_layers
from loramux.engine.execution.checkpoint import load_checkpoint
from loramux.engine.execution.fused_layers import FusedFeedForward, FusedLayer, FusedNorm, fuse_layers
from loramux.engine.execution.runner import Forward, StepInputs
from loramux_kernels import AttentionBatch

KEPT = (
    *("ministral", "ministral3", "glm", "glm4", "cohere", "cohere2", "exaone4", "ernie4_5", "hunyuan_v1_dense"),
    *("starcoder2", "apertus", "gpt_oss", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"),
    *("granitemoe", "granitemoeshared", "olmoe", "phimoe", "ernie4_5_moe"),
    *HYBRIDS,
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_images", "qwen3_5_moe_images"),
)
"""Families whose layers stay transformers' own."""
LENGTHS = (11, 1, 20)
BLOCK = 16


def packed_inputs() -> StepInputs:
    """Three prompts of a step, each in two pages of its own."""
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
        assert all(isinstance(layer, FusedLayer) for layer in model.get_decoder().layers)
        assert isinstance(model.get_decoder().norm, FusedNorm)
        # As near to the exact result as transformers' own modules are: rounding differs, nothing else.
        own_error, fused_error = ((x - wanted).norm() / wanted.norm() for x in (own, fused))
        assert fused_error <= slack * own_error + 1e-6, (dtype, fused_error, own_error)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "qwen3_moe"])
def test_fused_layers_replace_every_gated_network(tmp_path, family: str) -> None:
    """A mixture keeps its own; the second layer of this one is none."""
    loaded, _ = load(Zoo(family, tmp_path).base)
    layers = loaded.runner._forward.model.get_decoder().layers
    fused = [isinstance(layer.mlp, FusedFeedForward) for layer in layers]
    assert fused == ([False, True, False] if family == "qwen3_moe" else [True] * 3)


def test_layer_with_an_unknown_norm_is_left_alone(tmp_path) -> None:
    model = load_checkpoint(Zoo("llama", tmp_path).base, "float32", torch.device("cpu"))
    layout = KvLayout(probe_layers(model), BLOCK, model.dtype.itemsize)
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(64)
    assert fuse_layers(model, layout.layers) == 2
    assert not isinstance(model.model.layers[1], FusedLayer)
