"""The parity check on quantized bases runs PEFT on the dequantized weights, and says so."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from formats import FormatZoo
from quantized_zoo import QuantizedZoo

from loramux.catalog.validation.jobs import ParityJob, ParitySetup
from loramux.catalog.validation.parity import ParityComparison
from loramux.common.settings.serving import AdapterLimits
from loramux_adapters.base import describe_base
from loramux_adapters.plan import PlanLimits


def comparison_on(base: Path, quantization: str = "none") -> ParityComparison:
    setup = ParitySetup(
        model_dir=str(base),
        base=describe_base(base),
        adapters=AdapterLimits(max_rank=64),
        memory_bytes=1 << 30,
        whole_model_bytes=1 << 30,
        quantization=quantization,
    )
    return ParityComparison.over(setup)


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "words"),
    [("gptq int4 act order", "none", "gptq-int4"), ("nf4 double", "none", "bitsandbytes-nf4"), (None, "nf4", "nf4")],
)
def test_adapter_on_a_quantized_base_passes_and_the_report_names_the_weights(
    tmp_path, checkpoint: str | None, quantization: str, words: str
) -> None:
    formats = ("plain", "dora")
    zoo = QuantizedZoo("llama", tmp_path, formats, checkpoint) if checkpoint else FormatZoo("llama", tmp_path, formats)
    zoo.make_adapters()
    comparison = comparison_on(zoo.quantized if isinstance(zoo, QuantizedZoo) else zoo.base, quantization)
    assert comparison.whole is not None
    whole = dataclasses.replace(comparison.whole, reference=copy.deepcopy(comparison.whole.reference))
    folder = str(zoo.adapters / "dora")
    report = dataclasses.replace(comparison, whole=whole).report(
        ParityJob(uploaded=folder, served=folder, limits=PlanLimits(max_rank=64))
    )
    assert {check.name: check.outcome for check in report.checks} == {
        "parity_of_layers": "passed",
        "parity_of_tokens": "passed",
    }
    assert all(f"dequantized from {words}" in (check.detail or "") for check in report.checks)


def test_size_of_a_quantized_base_is_that_of_its_weights_in_float32(tmp_path) -> None:
    zoo = QuantizedZoo("llama", tmp_path, (), "gptq int4")
    assert comparison_on(zoo.quantized).files.float32_bytes == comparison_on(zoo.base).files.float32_bytes


def test_parameters_of_a_quantized_base_are_its_twins(tmp_path) -> None:
    zoo = QuantizedZoo("llama", tmp_path, (), "fp8 blocks")
    files, twin = comparison_on(zoo.quantized).files, comparison_on(zoo.base).files
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        ours, theirs = files.parameter(name), twin.parameter(name)
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
