"""Weights as int8: adapters on top of it answer as PEFT does on the matrices that are multiplied by."""

from __future__ import annotations

import pytest
import torch
from adapter_zoo import Asked, load, serve
from formats import FormatZoo
from transformers import AutoModelForCausalLM

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.loader import assemble
from loramux_kernels.linear_formats import Int8

FORMATS = ("plain", "dora", "lora_bias", "ia3")


class RoundedZoo(FormatZoo):
    """A base whose linears are what int8 makes of them, so that int8 loses nothing of it."""

    def round_base(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and name != "lm_head":
                    module.weight.copy_(Int8.as_multiplied(module.weight))
        model.save_pretrained(self.base)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_int8_adapters_answer_as_peft_does_on_the_rounded_base(tmp_path, family: str) -> None:
    zoo = RoundedZoo(family, tmp_path, FORMATS)
    zoo.round_base()
    zoo.make_adapters()
    asked = [Asked(f"{a} {i}", a, (5 + i, 40, *range(3, 3 + 5 * i)), 6) for i, a in enumerate([*zoo.formats, None])]
    engine = zoo.engine(quantization="int8", max_num_batched_tokens=13)
    got = serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


def test_int8_says_how_many_bytes_a_step_reads(tmp_path) -> None:
    zoo = FormatZoo("llama", tmp_path, ())
    exact, _ = load(zoo.base)
    rounded, _ = load(zoo.base, "int8")
    assert rounded.weight_bytes < 0.6 * exact.weight_bytes
    assert exact.weight_bytes == sum(
        p.numel() * 4
        for name, p in AutoModelForCausalLM.from_pretrained(zoo.base).named_parameters()
        if "embed_tokens" not in name
    )


def test_int8_on_a_gpu_is_refused(tmp_path) -> None:
    zoo = FormatZoo("llama", tmp_path, ())
    loaded, settings = load(zoo.base, "int8")
    model = AutoModelForCausalLM.from_pretrained(zoo.base).to("meta")
    with pytest.raises(UnsupportedModel, match="on CPUs only"):
        assemble(model, loaded.base, settings)
