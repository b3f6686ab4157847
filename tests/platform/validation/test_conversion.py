"""Adapters of other kinds become a LoRA in a process of their own, and the report says so."""

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

from loramux.settings import ModelSettings, Settings
from loramux.validation import Validator
from loramux_adapters import CONFIG_NAME, Limits, describe_base
from loramux_adapters.refusals import KINDS

LIMITS = Limits(max_rank=16)


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


def test_what_is_stored_is_the_lora_and_the_report_says_what_it_was(validator, loha, tmp_path: Path) -> None:
    shutil.copytree(loha[1], tmp_path / "upload")
    report = validator.examine(tmp_path / "upload", LIMITS)
    report.demand_sound()
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


def test_one_that_cannot_be_converted_stays_as_it_is(validator, loha, tmp_path: Path) -> None:
    shutil.copytree(loha[1], tmp_path / "upload")
    before = {path.name: path.read_bytes() for path in (tmp_path / "upload").iterdir()}
    report = validator.examine(tmp_path / "upload", Limits(max_rank=8))
    assert report.refusal is not None
    assert report.refusal.code == "rank_too_large"
    assert {path.name: path.read_bytes() for path in (tmp_path / "upload").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


def test_a_kind_that_is_not_served_is_refused_by_its_name(validator, tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"peft_type": "BOFT"}))
    refusal = validator.examine(tmp_path, LIMITS).refusal
    assert (refusal.code, refusal.field) == ("peft_type_unsupported", "peft_type")
    assert all(part in refusal.message for part in KINDS["BOFT"])
