"""Description of the base, made without reading a weight."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from tiny_base import make_base
from tiny_peft import FAMILIES, tiny_base, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from loramux_adapters.base import LinearShape, VocabularyShape, describe_base
from loramux_adapters.errors import BaseUnusable


@pytest.mark.parametrize("family", FAMILIES)
def test_base_every_linear_but_the_head_is_described(family: str, base_of) -> None:
    base = base_of(family)
    real = {
        name: tuple(module.weight.shape) if isinstance(module, Conv1D) else tuple(module.weight.shape)[::-1]
        for name, module in tiny_model(family).named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name != "lm_head"
    }
    assert {name: (shape.in_features, shape.out_features) for name, shape in base.modules.items()} == real
    assert list(base.modules) == list(real)
    embedding = "transformer.wte" if family == "gpt2" else "model.embed_tokens"
    assert base.vocabulary == VocabularyShape(embedding, "lm_head", 97, 64, tied=FAMILIES[family].tie_word_embeddings)
    assert (base.num_layers, base.hidden_size, base.vocab_size) == (2, 64, 97)
    assert {shape.layer for shape in base.modules.values()} == {0, 1}


def test_base_every_module_has_a_name(base_of) -> None:
    names = [name for name, _ in tiny_model("gemma3").named_modules() if name]
    assert sorted(base_of("gemma3").names) == sorted(names)


def test_base_gpt2_weights_are_transposed(base_of) -> None:
    assert base_of("gpt2").modules["transformer.h.0.attn.c_attn"] == LinearShape(64, 192, layer=0, transposed=True)


def test_base_phi3_projections_are_joined(base_of) -> None:
    assert base_of("phi3").modules["model.layers.1.mlp.gate_up_proj"] == LinearShape(64, 192, layer=1)


def test_base_fingerprint_is_equal_where_the_same_adapters_fit(base_of) -> None:
    assert base_of("llama").fingerprint == base_of("mistral").fingerprint
    families = ("llama", "llama_tied", "qwen3", "phi3", "gpt2")
    assert len({base_of(family).fingerprint for family in families}) == len(families)


def test_base_description_crosses_processes(llama) -> None:
    assert pickle.loads(pickle.dumps(llama)) == llama


def test_base_of_many_gigabytes_is_described_without_its_memory(tmp_path: Path) -> None:
    config = FAMILIES["llama"].to_dict() | {
        "hidden_size": 65536,
        "num_attention_heads": 64,
        "intermediate_size": 262144,
    }
    type(FAMILIES["llama"]).from_dict(config).save_pretrained(tmp_path)
    assert describe_base(tmp_path).modules["model.layers.0.mlp.up_proj"] == LinearShape(65536, 262144, layer=0)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"model_type": "no-such-model"}', '{"model_type": "vit"}'])
def test_base_folder_that_is_no_causal_model_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BaseUnusable, match=tmp_path.name):
        describe_base(tmp_path)


def test_base_remote_code_is_never_run(tmp_path: Path) -> None:
    tiny_base("llama", tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "evil"')
    text = text.replace("{", '{"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},', 1)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(BaseUnusable):
        describe_base(tmp_path)


def test_models_are_made_one_at_a_time_because_torchs_default_dtype_is_the_process_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is made at the same time as one in half precision would get its dtype."""
    folder = make_base(tmp_path / "base")
    made, seen = transformers.AutoModelForCausalLM.from_config, []
    both = threading.Barrier(2)

    def slow(config: transformers.PretrainedConfig, **arguments: object) -> object:
        torch.set_default_dtype(torch.float16)
        try:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # a second one would be here by then
            return made(config, **arguments)
        finally:
            seen.append(both.broken)
            torch.set_default_dtype(torch.float32)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", slow)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(describe_base, [folder, folder]))
    assert seen == [True, True], "neither met the other"
    assert torch.get_default_dtype() == torch.float32
