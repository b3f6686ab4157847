"""The models and adapters made from configs: whole, the same each time, and what PEFT itself would have saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import models
import pytest
import specs
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from real_model import PackagesUnreachable, smollm2
from safetensors.torch import load_file
from specs import ADAPTERS, MODELS, VOCAB_SIZE, ModelSpec, rank_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

MICRO = MODELS["micro"]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    """The smallest model, in a separate folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs, "WORK", tmp_path_factory.mktemp("work"))
        models.ensure(MICRO)
        yield MICRO


def test_the_shapes_have_the_sizes_they_are_named_after() -> None:
    def parameters(spec: ModelSpec) -> int:
        with torch.device("meta"):
            return models.LlamaForCausalLM(models.llama_config(spec)).num_parameters()

    assert 15e6 < parameters(MODELS["20m"]) < 25e6
    assert 0.45e9 < parameters(MODELS["0.5b"]) < 0.55e9


def test_what_exists_is_left_alone(micro: ModelSpec) -> None:
    before = (micro.model_path / "model.safetensors").stat().st_mtime_ns
    models.ensure(micro)
    assert (micro.model_path / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_that_was_cut_short_is_made_again(micro: ModelSpec) -> None:
    whole = load_file(micro.adapter_path("ad00") / "adapter_model.safetensors")
    (micro.adapter_path("ad00") / "adapter_model.safetensors").unlink()
    micro.adapter_path("ad00").rename(micro.adapter_path("ad00.partial"))
    models.ensure(micro)
    again = load_file(micro.adapter_path("ad00") / "adapter_model.safetensors")
    assert all(torch.equal(whole[key], again[key]) for key in whole)


def test_an_adapter_holds_the_tensors_that_peft_would_save(micro: ModelSpec) -> None:
    for number in range(5):
        path = micro.adapter_path(ADAPTERS[number])
        saved = load_file(path / "adapter_model.safetensors")
        base = AutoModelForCausalLM.from_pretrained(micro.model_path)
        fresh = get_peft_model(base, PeftConfig.from_pretrained(path))
        wanted = {
            name.replace(".default", ""): tuple(p.shape) for name, p in fresh.named_parameters() if ".lora_" in name
        }
        assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == wanted
        assert json.loads((path / "adapter_config.json").read_text())["r"] == rank_of(number)


def test_adapters_change_what_the_model_says(micro: ModelSpec) -> None:
    base = AutoModelForCausalLM.from_pretrained(micro.model_path, dtype=torch.float32)
    prompt = torch.arange(3, 43)[None]
    logits = [base(prompt).logits]
    for adapter in ADAPTERS[:2]:
        model = AutoModelForCausalLM.from_pretrained(micro.model_path, dtype=torch.float32)
        logits.append(PeftModel.from_pretrained(model, micro.adapter_path(adapter))(prompt).logits)
    for i in range(3):
        assert (logits[i] - logits[i - 1]).abs().mean() > 0.05 * logits[0].std()


def test_the_tokenizer_covers_the_vocabulary_and_any_text(micro: ModelSpec) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro.model_path)
    assert len(tokenizer) == VOCAB_SIZE
    text = "def main(): return 'grüße, 世界' # 42\n\tthe end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    words = [tokenizer.decode([i]) for i in range(3, VOCAB_SIZE)]
    assert sum("\ufffd" in word for word in words) <= 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).endswith("assistant:")


def test_sizes_of_another_spec_make_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "WORK", tmp_path)
    wide = replace(MICRO, name="wide", hidden_size=96)
    models.ensure(wide)
    assert AutoModelForCausalLM.from_pretrained(wide.model_path).config.hidden_size == 96


def test_spec_of_the_pretrained_model_has_its_shape_and_scale() -> None:
    try:
        folder = smollm2("bfloat16")
    except PackagesUnreachable as error:
        pytest.skip(str(error))
    spec, config = MODELS["smollm2"], AutoConfig.from_pretrained(folder)
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields = (*shape, "head_dim", "vocab_size")
    assert {field: getattr(spec, field) for field in fields} == {field: getattr(config, field) for field in fields}
    assert len(AutoTokenizer.from_pretrained(folder)) == spec.vocab_size >= VOCAB_SIZE
    weights = load_file(folder / "model.safetensors")
    scales = [float(w.float().std()) for name, w in weights.items() if name.split(".")[-2] in specs.TARGET_MODULES]
    assert len(scales) == 7 * spec.num_hidden_layers
    assert sum(scales) / len(scales) == pytest.approx(spec.initializer_range, abs=0.01)
