"""Folders as trainers' own code saves them pass the checks of an upload, PEFT's tokens included.

Each trainer is installed at its newest version into a separate folder, next to this Python's packages, and run there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import trainers
import transformers
from tiny_base import byte_tokenizer, make_base

from loramux.catalog.validation.validator import Validator
from loramux.common.bundle import SOURCES, is_ignored, misplaced
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux_adapters.base import describe_base
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits

pytestmark = pytest.mark.slow
INSTALL_SECONDS, RUN_SECONDS = 1200, 600
FILES = (CONFIG_NAME, WEIGHTS_NAME)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """saved("trl", base): the folder that the trainer writes for `base`."""
    installed: dict[str, Path] = {}

    def get(trainer: str, base: Path) -> Path:
        if trainer not in installed:
            installed[trainer] = packages = tmp_path_factory.mktemp(trainer)
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
            subprocess.run([*command, *trainers.TRAINERS[trainer][1]], check=True, timeout=INSTALL_SECONDS)
        folder = tmp_path_factory.mktemp("saved") / trainer
        command = [sys.executable, trainers.__file__, trainer, str(base), str(folder)]
        environment = os.environ | {"PYTHONPATH": str(installed[trainer])}
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return folder

    return get


def tied_base(folder: Path) -> Path:
    config = transformers.LlamaConfig(
        **{"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"bos_token_id": 257, "eos_token_id": 256, "tie_word_embeddings": True},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_tied", [False, True], ids=["head of its own", "tied"])
@pytest.mark.parametrize("trainer", [name for name in trainers.TRAINERS if name != "mlx"])
def test_folder_of_a_trainer_passes_the_checks(saved, trainer: str, is_tied: bool, tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base") if is_tied else make_base(tmp_path / "base")
    folder = saved(trainer, base)
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert [name for name in names if name not in (*FILES, *SOURCES) and not is_ignored(name)] == []
    upload = tmp_path / "upload"
    upload.mkdir()
    for name in names & {*FILES, *SOURCES}:
        shutil.copy(folder / name, upload / name)
    settings = Settings(model=ModelSettings(path=str(base), served_model_name="base"))
    with closing(Validator(settings, describe_base(base), "float32")) as validator:
        report = validator.examine(upload, PlanLimits(max_rank=64))
    assert report.refusal is None, report.refusal
    assert {check.outcome for check in report.checks} == {"passed"}
    assert "parity_of_tokens" in {check.name for check in report.checks}


def test_folder_of_mlx_is_refused_by_name(saved, tmp_path: Path) -> None:
    folder = saved("mlx", make_base(tmp_path / "base"))
    reason = misplaced(sorted(file.name for file in folder.iterdir()))
    assert reason is not None
    assert "mlx-lm" in reason
