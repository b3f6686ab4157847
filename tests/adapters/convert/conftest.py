from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from tiny_peft import FAMILIES

from loramux_adapters.base import BaseDescription, describe_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with weights."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"])).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def described(base: Path) -> BaseDescription:
    return describe_base(base)
