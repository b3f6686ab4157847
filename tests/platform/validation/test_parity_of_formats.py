"""Nothing that is served is refused by its own parity check: formats, and other kinds after their conversion."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from formats import FORMATS, FormatZoo
from other_kinds import KINDS, make_kind
from safetensors.torch import load_file, save_file

from loramux.settings import AdapterLimits
from loramux.validation import Report
from loramux.validation.conversion import convert
from loramux.validation.files import ConversionJob
from loramux.validation.parity.comparison import Comparison
from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux_adapters import WEIGHTS_NAME, Limits, describe_base


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    return FormatZoo("llama", tmp_path_factory.mktemp("formats"), [])


@pytest.fixture(scope="module")
def comparison(zoo: FormatZoo) -> Comparison:
    base = describe_base(zoo.base)
    return Comparison.over(
        ParitySetup(
            model_dir=str(zoo.base),
            base=base,
            adapters=AdapterLimits(),
            memory_bytes=1 << 30,
            whole_model_bytes=1 << 30,
        )
    )


def compared(comparison: Comparison, uploaded: Path, served: Path) -> Report:
    """As a job does it, which PEFT changes a model of its own for."""
    assert comparison.whole is not None
    whole = dataclasses.replace(comparison.whole, reference=copy.deepcopy(comparison.whole.reference))
    job = ParityJob(uploaded=str(uploaded), served=str(served), limits=Limits())
    return dataclasses.replace(comparison, whole=whole).report(job)


@pytest.mark.parametrize("name", ["dora", "ia3", "both", "saved", "head_tokens"])
def test_a_format_passes(comparison: Comparison, zoo: FormatZoo, name: str) -> None:
    folder = zoo.make_format(name, FORMATS[name], seed=1)
    report = compared(comparison, folder, folder)
    assert report.refusal is None
    assert report.checks[-1].outcome == "passed"
    assert report.checks[-1].figures["mean_divergence_from_base"] > 1e-3


@pytest.mark.parametrize("name", ["loha", "vera"])
def test_another_kind_passes_against_what_it_was(
    comparison: Comparison, zoo: FormatZoo, name: str, tmp_path: Path
) -> None:
    uploaded, served = tmp_path / "uploaded", tmp_path / "served"
    served.mkdir()
    make_kind(zoo.base, uploaded, KINDS[name])
    convert(ConversionJob(folder=str(uploaded), into=str(served), limits=Limits()), describe_base(zoo.base))
    report = compared(comparison, uploaded, served)
    assert report.refusal is None
    assert report.checks[-1].outcome == "passed"
    assert report.checks[-1].figures["mean_divergence_from_base"] > 1e-3


def test_a_copy_of_another_base_is_refused_before_it_is_served(comparison: Comparison, zoo: FormatZoo) -> None:
    folder = zoo.make_format("embedding", FORMATS["embedding"], seed=1)
    tensors = load_file(folder / WEIGHTS_NAME)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    tensors[key] = torch.nextafter(tensors[key], torch.tensor(torch.inf))
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    report = compared(comparison, folder, folder)
    assert report.refusal is not None
    assert (report.refusal.code, report.refusal.field) == ("base_differs", "model.embed_tokens.base_layer.weight")
    assert [check.outcome for check in report.checks] == ["failed"]
