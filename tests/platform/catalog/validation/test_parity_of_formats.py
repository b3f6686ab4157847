"""Parity checks of formats other than plain LoRA, and of other kinds after their conversion."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import peft
import pytest
import torch
from format_matrix import SERVED
from formats import FORMATS, LORA, FormatZoo
from other_kinds import make_kind
from safetensors.torch import load_file, save_file

from loramux.catalog.validation.checkpoint_files import BaseFiles
from loramux.catalog.validation.conversion import convert
from loramux.catalog.validation.jobs import ConversionJob, ParityJob, ParitySetup, ValidationReport
from loramux.catalog.validation.parity import ParityComparison
from loramux.common.settings.serving import AdapterLimits
from loramux_adapters.base import describe_base
from loramux_adapters.plan import WEIGHTS_NAME, PlanLimits


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    return FormatZoo("llama", tmp_path_factory.mktemp("formats"), [])


@pytest.fixture(scope="module")
def comparison(zoo: FormatZoo) -> ParityComparison:
    base = describe_base(zoo.base)
    return ParityComparison.over(
        ParitySetup(
            model_dir=str(zoo.base),
            base=base,
            adapters=AdapterLimits(),
            memory_bytes=1 << 30,
            whole_model_bytes=1 << 30,
        )
    )


def compared(comparison: ParityComparison, uploaded: Path, served: Path) -> ValidationReport:
    """Compare as a job does: PEFT modifies a copy of the reference model."""
    assert comparison.whole is not None
    whole = dataclasses.replace(comparison.whole, reference=copy.deepcopy(comparison.whole.reference))
    job = ParityJob(uploaded=str(uploaded), served=str(served), limits=PlanLimits())
    return dataclasses.replace(comparison, whole=whole).report(job)


@pytest.mark.parametrize("name", ["dora", "ia3", "both", "saved", "saved_norms", "head_tokens"])
def test_parity_of_every_format_passes(comparison: ParityComparison, zoo: FormatZoo, name: str) -> None:
    folder = zoo.make_format(name, FORMATS[name], seed=1)
    report = compared(comparison, folder, folder)
    assert report.refusal is None
    assert report.checks[-1].outcome == "passed"
    assert report.checks[-1].figures["mean_divergence_from_base"] > 1e-3


@pytest.mark.parametrize("size", [105, 90])
def test_parity_of_a_resized_embedding_passes(
    comparison: ParityComparison, zoo: FormatZoo, size: int, tmp_path: Path
) -> None:
    model = zoo._base()
    model.resize_token_embeddings(size)
    config = peft.LoraConfig(**LORA | {"target_modules": ["q_proj"]}, modules_to_save=["embed_tokens"])
    trained = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in (one for one in trained.parameters() if one.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    trained.save_pretrained(tmp_path / "resized")
    report = compared(comparison, tmp_path / "resized", tmp_path / "resized")
    assert report.refusal is None, report.refusal
    assert report.checks[-1].outcome == "passed"


@pytest.mark.parametrize("name", ["loha", "vera", "pissa", "oft", "boft", "hra"])
def test_parity_of_a_converted_kind_passes_against_the_original(
    comparison: ParityComparison, zoo: FormatZoo, name: str, tmp_path: Path
) -> None:
    uploaded, served = tmp_path / "uploaded", tmp_path / "served"
    served.mkdir()
    make_kind(zoo.base, uploaded, SERVED[name])
    job = ConversionJob(folder=str(uploaded), into=str(served), limits=PlanLimits())
    base = describe_base(zoo.base)
    convert(job, base, BaseFiles.of(str(zoo.base), base))
    report = compared(comparison, uploaded, served)
    assert report.refusal is None
    assert report.checks[-1].outcome == "passed"
    assert report.checks[-1].figures["mean_divergence_from_base"] > 1e-3


def test_parity_copy_of_a_base_that_was_loaded_in_bfloat16_passes(comparison: ParityComparison, zoo: FormatZoo) -> None:
    folder = zoo.make_format("embedding", FORMATS["embedding"], seed=1)
    tensors = load_file(folder / WEIGHTS_NAME)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    rounded = tensors[key].to(torch.bfloat16)
    assert not torch.equal(rounded.float(), tensors[key])
    save_file(tensors | {key: rounded}, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    assert compared(comparison, folder, folder).refusal is None


def test_parity_copy_of_another_base_is_refused(comparison: ParityComparison, zoo: FormatZoo) -> None:
    folder = zoo.make_format("embedding", FORMATS["embedding"], seed=1)
    tensors = load_file(folder / WEIGHTS_NAME)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    tensors[key] = torch.nextafter(tensors[key], torch.tensor(torch.inf))
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    report = compared(comparison, folder, folder)
    assert report.refusal is not None
    assert (report.refusal.code, report.refusal.field) == ("base_differs", "model.embed_tokens.base_layer.weight")
    assert [check.outcome for check in report.checks] == ["failed"]
