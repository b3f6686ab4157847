"""The report on an upload, accepted or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sandbox_jobs import JOBS
from tiny_peft import save_adapter, tiny_base

from loramux.catalog.validation.jobs import ValidationReport
from loramux.catalog.validation.validator import Validator
from loramux.common.sandbox.sandbox import Sandbox
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings, ValidationSettings
from loramux_adapters.base import BaseDescription, describe_base
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits

LIMITS = PlanLimits(max_rank=16)


def checked(**validation: Any) -> Settings:
    """Two names of the base, and no PEFT."""
    model = ModelSettings(path="/models/Tiny-1B", served_model_name="llama-tiny")
    return Settings(model=model, validation=ValidationSettings(parity=False, **validation))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseDescription:
    return describe_base(tiny_base("llama", tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def validator(base: BaseDescription) -> Iterator[Validator]:
    with closing(Validator(checked(), base, "float16")) as validator:
        yield validator


def outcomes(report: ValidationReport) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def test_report_summarises_the_files(validator: Validator, tmp_path: Path) -> None:
    save_adapter(
        "llama", tmp_path, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 4}, lora_dropout=0.1
    )
    report = validator.examine(tmp_path, LIMITS)
    assert report.refusal is None
    assert outcomes(report) == {"config": "passed", "header": "passed", "tensors": "passed", "values": "passed"}
    found = report.found
    assert found is not None
    assert (found.peft_type, found.rank, found.ranks) == ("LORA", 8, {4: 2, 8: 2})
    assert (found.targets, found.layers, found.tensors) == ({"q_proj": 2, "down_proj": 2}, 2, 8)
    assert found.dtypes == {"F32": 8}
    assert found.parameters == 2 * (8 * (64 + 64) + 4 * (96 + 64))
    assert found.weights_bytes == (tmp_path / WEIGHTS_NAME).stat().st_size
    assert found.architecture == "LlamaForCausalLM"
    assert found.ignored_fields["lora_dropout"] == "it is for training only"
    assert [warned.code for warned in report.warnings] == ["dtype_converted"]
    assert report.usage is not None
    assert 0 < report.usage.peak_bytes < 100 << 20
    assert msgspec.json.decode(msgspec.json.encode(report), type=ValidationReport) == report


@pytest.mark.parametrize(
    ("claimed", "warned"),
    [("org/tiny-1b", False), ("LLAMA-tiny/", False), ("org/Tiny-1B-Instruct", True), (None, False)],
)
def test_report_warns_of_another_base_name(
    claimed: str | None, warned: bool, validator: Validator, tmp_path: Path
) -> None:
    save_adapter("llama", tmp_path, target_modules=["q_proj"])
    config = json.loads((tmp_path / CONFIG_NAME).read_text()) | {"base_model_name_or_path": claimed}
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    report = validator.examine(tmp_path, LIMITS)
    assert report.refusal is None
    assert [w.field for w in report.warnings if w.code == "base_name_differs"] == ["base_model_name_or_path"] * warned


def test_report_of_a_refused_upload_lists_the_passed_checks(validator: Validator, tmp_path: Path) -> None:
    save_adapter("llama", tmp_path, target_modules=["q_proj"], r=32)
    report = validator.examine(tmp_path, LIMITS)
    assert outcomes(report) == {"config": "passed", "header": "passed", "tensors": "failed"}
    assert report.refusal is not None
    assert (report.refusal.code, report.refusal.field) == ("rank_too_large", "r")
    assert report.checks[-1].detail == report.refusal.message
    assert "rank 32" in report.refusal.message


def test_report_refuses_overflow_in_the_serving_dtype(validator: Validator, tmp_path: Path) -> None:
    model = save_adapter("llama", tmp_path, target_modules=["q_proj"])
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name)[0, 0] = -65_520.0
    model.save_pretrained(tmp_path)
    report = validator.examine(tmp_path, LIMITS)
    assert report.refusal is not None
    assert report.refusal.code == "weights_overflow"
    assert outcomes(report)["values"] == "failed"


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (["sleep", 600], "validation_timeout"),
        (["allocate", 1 << 28], "validation_out_of_memory"),
        (["raise", "x"], "validation_failed"),
    ],
)
def test_report_of_an_unfinished_check_refuses(
    job: list[object], code: str, base: BaseDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job[0] in JOBS
    with (
        closing(Validator(checked(memory_bytes=32 << 20, wall_seconds=0.5), base, "float32")) as validator,
        closing(Sandbox("sandbox_jobs", b"1")) as sandbox,
    ):
        monkeypatch.setattr(validator._files, "_sandbox", sandbox)
        run = sandbox.run
        monkeypatch.setattr(sandbox, "run", lambda _, limits: run(msgspec.json.encode(job), limits))
        report = validator.examine(tmp_path, LIMITS)
    assert report.refusal is not None
    assert report.refusal.code == code
    assert report.refusal.message.endswith(".")


def test_files_stage_imports_no_torch() -> None:
    """Every server has this process, so it must stay small."""
    heavy = {"torch", "transformers", "sqlalchemy"}
    code = f"import sys, loramux.catalog.validation.files; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
