"""Conversion in a separate process, and its report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import peft
import pytest
from other_kinds import make_kind
from tiny_peft import tiny_model

from loramux.catalog.validation.validator import Validator
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux_adapters.base import describe_base
from loramux_adapters.config import UNSUPPORTED_KINDS
from loramux_adapters.plan import CONFIG_NAME, PlanLimits

LIMITS = PlanLimits(max_rank=16)


@pytest.fixture(scope="module")
def loha(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter of rank 3."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("loha")
    tiny_model("llama").save_pretrained(base)
    make_kind(base, folder, peft.LoHaConfig(r=3, target_modules=["q_proj"]))
    return base, folder


@pytest.fixture(scope="module")
def validator(loha: tuple[Path, Path]) -> Iterator[Validator]:
    described = describe_base(loha[0])
    settings = Settings(model=ModelSettings(path=str(loha[0]), served_model_name="tiny"))
    with closing(Validator(settings, described, "float32")) as validator:
        yield validator


def test_conversion_stores_the_lora_and_reports_the_original(validator, loha, tmp_path: Path) -> None:
    shutil.copytree(loha[1], tmp_path / "upload")
    report = validator.examine(tmp_path / "upload", LIMITS)
    assert report.refusal is None
    assert [check.name for check in report.checks] == [
        "conversion",
        "config",
        "header",
        "tensors",
        "values",
        "parity_of_layers",
        "parity_of_tokens",
    ]
    assert "LOHA" in str(report.converted)
    assert report.found is not None
    assert (report.found.peft_type, report.found.rank, report.found.targets) == ("LORA", 9, {"q_proj": 2})
    assert json.loads((tmp_path / "upload" / CONFIG_NAME).read_text())["peft_type"] == "LORA"
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


def test_conversion_refused_leaves_the_files_unchanged(validator, loha, tmp_path: Path) -> None:
    shutil.copytree(loha[1], tmp_path / "upload")
    before = {path.name: path.read_bytes() for path in (tmp_path / "upload").iterdir()}
    report = validator.examine(tmp_path / "upload", PlanLimits(max_rank=8))
    assert report.refusal is not None
    assert report.refusal.code == "rank_too_large"
    assert {path.name: path.read_bytes() for path in (tmp_path / "upload").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


def test_conversion_of_an_unsupported_kind_is_refused_by_name(validator, tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"peft_type": "ROAD"}))
    refusal = validator.examine(tmp_path, LIMITS).refusal
    assert (refusal.code, refusal.field) == ("peft_type_unsupported", "peft_type")
    assert all(part in refusal.message for part in UNSUPPORTED_KINDS["ROAD"])
