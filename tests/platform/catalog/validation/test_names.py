"""Uploads in other spellings, in the processes of a server: renamed, compared with PEFT, stored as PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import peft
import pytest
from formats import LORA, FormatZoo
from safetensors.torch import load_file, save_file

from loramux.catalog.validation.jobs import ValidationReport
from loramux.catalog.validation.validator import Validator
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux_adapters.base import describe_base
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    made = FormatZoo("gemma3", tmp_path_factory.mktemp("names"), [])
    made.make_format("plain", peft.LoraConfig(**LORA | {"target_modules": ["q_proj", "down_proj"]}), 1)
    return made


@pytest.fixture(scope="module")
def validator(zoo: FormatZoo) -> Iterator[Validator]:
    settings = Settings(model=ModelSettings(path=str(zoo.base), served_model_name="base"))
    with closing(Validator(settings, describe_base(zoo.base), "float32")) as validator:
        yield validator


def upload(zoo: FormatZoo, folder: Path, change: Callable[[str], str | None]) -> Path:
    folder.mkdir()
    tensors = load_file(zoo.adapters / "plain" / WEIGHTS_NAME)
    save_file({new: tensor for key, tensor in tensors.items() if (new := change(key))}, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_bytes((zoo.adapters / "plain" / CONFIG_NAME).read_bytes())
    return folder


def outcomes(report: ValidationReport) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


CHECKS = ("config", "header", "tensors", "values", "parity_of_layers", "parity_of_tokens")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_of_a_multimodal_checkpoint_are_renamed_and_pass(
    zoo: FormatZoo, validator: Validator, prefix: str, tmp_path: Path
) -> None:
    stem = "base_model.model."
    folder = upload(zoo, tmp_path / "upload", lambda key: key.replace(f"{stem}model.", f"{stem}{prefix}"))
    report = validator.examine(folder, PlanLimits(max_rank=64))
    assert report.refusal is None
    assert outcomes(report) == dict.fromkeys(("names", *CHECKS), "passed")
    assert report.converted is not None
    assert "12 tensors got the names that PEFT 0.21 writes" in report.converted
    assert load_file(folder / WEIGHTS_NAME).keys() == load_file(zoo.adapters / "plain" / WEIGHTS_NAME).keys()
    assert json.loads((folder / CONFIG_NAME).read_text())["use_rslora"] is False
    assert sorted(file.name for file in folder.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]


def test_names_that_cannot_be_renamed_are_refused(zoo: FormatZoo, validator: Validator, tmp_path: Path) -> None:
    folder = upload(
        zoo, tmp_path / "upload", lambda key: key.replace("lora_A.", "lora_A.default.").replace("q_pr", "x_pr")
    )
    report = validator.examine(folder, PlanLimits(max_rank=64))
    assert report.refusal is not None
    assert report.refusal.code == "tensors_unexpected"


def test_targets_without_tensors_pass_with_random_initialisation(
    zoo: FormatZoo, validator: Validator, tmp_path: Path
) -> None:
    folder = upload(zoo, tmp_path / "upload", lambda key: None if ".layers.1." in key else key)
    document = json.loads((folder / CONFIG_NAME).read_text()) | {"init_lora_weights": False}
    (folder / CONFIG_NAME).write_text(json.dumps(document))
    assert outcomes(validator.examine(folder, PlanLimits(max_rank=64))) == dict.fromkeys(CHECKS, "passed")


def test_targets_without_tensors_are_reported(zoo: FormatZoo, validator: Validator, tmp_path: Path) -> None:
    folder = upload(zoo, tmp_path / "upload", lambda key: None if ".layers.1." in key else key)
    report = validator.examine(folder, PlanLimits(max_rank=64))
    assert report.refusal is None
    assert outcomes(report) == dict.fromkeys(CHECKS, "passed")
    (warning,) = (warning for warning in report.warnings if warning.code == "modules_absent")
    assert warning.field == "target_modules"
    assert "2 of the 6 modules" in warning.message
    assert "'model.layers.1.self_attn.q_proj'" in warning.message
