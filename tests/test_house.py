"""The layout's own promises."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("kernels", "adapters", "platform", "api", "demo")


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_no_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists(), "an importable `platform` shadows the standard library's"


def test_the_standard_librarys_platform_is_the_one_imported() -> None:
    assert (
        Path(importlib.import_module("platform").__file__).parent == Path(importlib.import_module("os").__file__).parent
    )


@pytest.mark.parametrize("module", ["loramux_api.app", "loramux_api.cli"])
def test_http_starts_without_triton_or_peft(module: str) -> None:
    code = f"import {module}, sys; assert not {{'peft', 'triton', 'matplotlib'}} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
