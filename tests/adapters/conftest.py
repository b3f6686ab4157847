from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tiny_peft import save_adapter, tiny_base

from loramux_adapters.base import BaseDescription, describe_base


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory):
    """base_of("llama"): described once a session."""
    described: dict[str, BaseDescription] = {}

    def get(family: str) -> BaseDescription:
        if family not in described:
            described[family] = describe_base(tiny_base(family, tmp_path_factory.mktemp(family)))
        return described[family]

    return get


@pytest.fixture(scope="session")
def llama(base_of) -> BaseDescription:
    return base_of("llama")


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for the tiny Llama on q_proj and down_proj, rank 8, saved by PEFT."""
    directory = tmp_path_factory.mktemp("good")
    save_adapter("llama", directory, target_modules=["q_proj", "down_proj"])
    return directory


@pytest.fixture
def good_config(good_folder: Path) -> dict[str, Any]:
    return json.loads((good_folder / "adapter_config.json").read_text())


@pytest.fixture
def good_tensors(good_folder: Path) -> dict[str, torch.Tensor]:
    return load((good_folder / "adapter_model.safetensors").read_bytes())
