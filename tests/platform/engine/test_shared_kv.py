"""Layers that read the keys and values of an earlier layer, and layers that read separate rows of each token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from adapter_zoo import RECIPES, Asked, Zoo, serve
from safetensors.torch import load_file, save_file

from loramux.engine.execution.attention import KvLayout, probe_layers
from loramux.engine.execution.checkpoint import load_checkpoint
from loramux_adapters.base import describe_base
from loramux_adapters.convert.renaming import rename_adapter
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits, validate_adapter

LIMITS = PlanLimits(max_rank=64)
PREFIX = "base_model.model."
ASKED = Asked("alone", "plain", tuple(range(5, 40)), 8)
SHARING = "gemma4_e2b"
"""Its layers 0 and 1 keep KV, of a window and of the whole context. Layers 2 to 4 read it."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    zoo = Zoo(SHARING, tmp_path_factory.mktemp("shared"))
    zoo.make_adapter("plain", RECIPES["plain"], 1)
    return zoo


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """The keys of its last layer are its values too."""
    zoo = Zoo("gemma4_26b_a4b", tmp_path_factory.mktemp("mixture"))
    recipe = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj"], "target_parameters": [
        "experts.gate_up_proj", "experts.down_proj"]}  # fmt: skip
    zoo.make_adapter("experts", recipe, 2)
    return zoo


def copied(zoo: Zoo, name: str, into: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = Path(shutil.copytree(zoo.adapters / name, into / name))
    return folder, load_file(folder / WEIGHTS_NAME)


def test_layer_that_shares_kv_keeps_none_and_reads_its_sources_pages(shared: Zoo) -> None:
    model = load_checkpoint(shared.base, "float32", torch.device("cpu"))
    layers = probe_layers(model)
    assert [layer.source for layer in layers] == [None, None, 0, 1, 1]
    assert [layer.elements for layer in layers] == [2 * 2 * 24, 2 * 2 * 40, 0, 0, 0]
    assert [layer.options.sliding_window for layer in layers] == [7, None, 7, None, None]
    for is_fp8 in (False, True):
        layout = KvLayout(layers, 16, 4, is_fp8)
        pool = torch.zeros(3 * layout.page_elements)
        views = layout.views(pool)
        assert [view.is_read_only for view in views] == [False, False, True, True, True]
        assert [view.key.data_ptr() for view in views[2:]] == [views[i].key.data_ptr() for i in (0, 1, 1)]
        if not is_fp8:
            assert layout.page_elements == 16 * sum(layer.elements for layer in layers)


def test_published_checkpoint_with_unused_keys_and_values_of_sharing_layers_is_served(shared: Zoo, tmp_path) -> None:
    """The published files hold these tensors, and transformers leaves them out."""
    base = Path(shutil.copytree(shared.base, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    own = {
        key: tensor for key, tensor in tensors.items() if ".layers.1.self_attn.k_" in key or ".1.self_attn.v_" in key
    }
    assert len(own) == 3
    unused = {key.replace(".layers.1.", f".layers.{layer}."): own[key] + 1 for layer in (3, 4) for key in own}
    save_file(tensors | unused, base / "model.safetensors", {"format": "pt"})
    zoo = Zoo.__new__(Zoo)
    zoo.__dict__.update(shared.__dict__ | {"base": base})
    assert serve(zoo, zoo.engine(), [ASKED])["alone"] == shared.answer(ASKED)


def test_text_of_a_whole_models_checkpoint_is_served_without_its_other_parts(tmp_path: Path) -> None:
    """The text's own model is made of a folder as it is published: with parts for images and sound, and their names."""
    zoo = Zoo("gemma3n", tmp_path)
    zoo.make_adapter("plain", RECIPES["plain"], 1)
    tensors = load_file(zoo.base / "model.safetensors")
    renamed = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
    others = (
        "vision_tower.timm_model.a",
        "audio_tower.conformer.0.b",
        "embed_vision.embedding",
        "embed_audio.embedding",
    )
    renamed |= {f"model.{name}.weight": torch.ones(3) for name in others}
    whole = transformers.Gemma3nConfig(text_config=json.loads((zoo.base / "config.json").read_text()))
    whole.save_pretrained(zoo.base)
    save_file(renamed, zoo.base / "model.safetensors", {"format": "pt"})
    folder, pairs = copied(zoo, "plain", tmp_path)
    pairs = {key.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."): pair for key, pair in pairs.items()}
    save_file(pairs, folder / WEIGHTS_NAME)
    shutil.rmtree(zoo.adapters / "plain")
    (zoo.adapters / "plain").mkdir()
    assert rename_adapter(folder, zoo.adapters / "plain", describe_base(zoo.base), LIMITS) is not None
    base = Asked("base", None, ASKED.prompt, 8)
    assert serve(zoo, zoo.engine(), [ASKED, base]) == {one.name: zoo.answer(one) for one in (ASKED, base)}


def test_cutoff_of_sparse_gates_is_transformers_to_the_bit(tmp_path: Path) -> None:
    zoo = Zoo("gemma3n", tmp_path)
    layer = transformers.Gemma3nForCausalLM.from_pretrained(zoo.base).bfloat16().model.layers[0].mlp
    ours = load_checkpoint(zoo.base, "bfloat16", torch.device("cpu")).model.layers[0].mlp
    gates = torch.randn(1, 5, 96, dtype=torch.bfloat16)
    assert layer.activation_sparsity == 0.9
    assert torch.equal(ours._gaussian_topk(gates), layer._gaussian_topk(gates))


def test_adapter_on_unused_keys_of_sharing_layers_is_served_without_them(shared: Zoo, tmp_path: Path) -> None:
    """Older versions of transformers make these linears and never call them, so trainers saved pairs for them."""
    folder, tensors = copied(shared, "plain", tmp_path)
    for layer in (2, 4):
        for linear in ("k_proj", "v_proj"):
            stem = f"{PREFIX}model.layers.{layer}.self_attn.{linear}"
            tensors |= {f"{stem}.lora_A.weight": torch.randn(8, 64), f"{stem}.lora_B.weight": torch.zeros(48, 8)}
    save_file(tensors, folder / WEIGHTS_NAME)
    into = tmp_path / "renamed"
    into.mkdir()
    renaming = rename_adapter(folder, into, describe_base(shared.base), LIMITS)
    assert renaming is not None
    assert (renaming.renamed, renaming.dropped) == (0, 8)
    expected = load_file(shared.adapters / "plain" / WEIGHTS_NAME)
    assert load_file(into / WEIGHTS_NAME).keys() == expected.keys()
    validate_adapter(into, describe_base(shared.base), LIMITS)


def test_adapter_on_values_that_are_the_keys_is_refused_by_name(mixture: Zoo, tmp_path: Path) -> None:
    folder, tensors = copied(mixture, "experts", tmp_path)
    stem = f"{PREFIX}model.layers.2.self_attn.v_proj"
    tensors |= {f"{stem}.lora_A.weight": torch.randn(3, 64), f"{stem}.lora_B.weight": torch.randn(40, 3)}
    save_file(tensors, folder / WEIGHTS_NAME)
    assert rename_adapter(folder, tmp_path, describe_base(mixture.base), LIMITS) is None
    with pytest.raises(AdapterRejected, match=r"layers\.2\.self_attn\.v_proj"):
        validate_adapter(folder, describe_base(mixture.base), LIMITS)


@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model."])
def test_adapter_trained_on_the_whole_model_answers_the_same_on_its_text(
    mixture: Zoo, tmp_path: Path, wrapper: str
) -> None:
    """Names of PEFT, unsloth and LLaMA-Factory: stacked experts, and a part for images that has no effect."""
    folder, tensors = copied(mixture, "experts", tmp_path)
    renamed = {key.replace(f"{PREFIX}model.", f"{PREFIX}{wrapper}"): tensor for key, tensor in tensors.items()}
    for part in (
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
        "model.embed_vision.embedding_projection",
    ):
        renamed |= {f"{PREFIX}{part}.lora_{x}.weight": torch.randn(3, 3) for x in "AB"}
    save_file(renamed, folder / WEIGHTS_NAME)
    fields = json.loads((folder / CONFIG_NAME).read_text())
    target = r".*language_model.*\.(q_proj|k_proj)|.*(linear|embedding_projection)"
    (folder / CONFIG_NAME).write_text(json.dumps(fields | {"target_modules": target}))
    into = mixture.adapters / wrapper
    into.mkdir()
    assert rename_adapter(folder, into, describe_base(mixture.base), LIMITS) is not None
    asked = [Asked(name, name, tuple(range(5, 30)), 8) for name in ("experts", wrapper)]
    got = serve(mixture, mixture.engine(), asked)
    assert got[wrapper] == got["experts"] == mixture.answer(asked[0])


def test_adapter_that_adds_tokens_is_refused_if_layers_have_inputs_by_token(shared: Zoo, tmp_path: Path) -> None:
    folder, tensors = copied(shared, "plain", tmp_path)
    tensors |= {f"{PREFIX}model.embed_tokens.weight": torch.randn(100, 64)}
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterRejected, match="adds 3 tokens to the vocabulary"):
        validate_adapter(folder, describe_base(shared.base), LIMITS)
