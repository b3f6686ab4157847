"""Rules for the files of the repository."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("kernels", "adapters", "platform", "api", "client", "demo")
PACKAGES = (
    "kernels/loramux_kernels",
    "adapters/loramux_adapters",
    "platform/loramux",
    "api/loramux_api",
    "client/loramux_client",
    "demo/loramux_demo",
)
THIRD_PARTY = re.compile(
    r"\.(whl|tar\.gz|tgz|tar\.xz|zip|jar|so|dll|dylib|min\.js|min\.css|egg)$|(^|/)(node_modules|site-packages|vendor)/"
)
MAX_BYTES = 1_000_000
MAY_BE_LARGE = re.compile(r"^(demo/loramux_demo/assets/|docs/[^/]+\.(png|svg)$)")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def forbidden(files: dict[str, int]) -> list[str]:
    """The names among `files` (name to bytes) that must not be in the repository."""
    return [
        name
        for name, size in files.items()
        if THIRD_PARTY.search(name) or (size > MAX_BYTES and not MAY_BE_LARGE.search(name))
    ]


def test_tracked_files_are_neither_third_party_nor_large() -> None:
    assert forbidden({name: (ROOT / name).stat().st_size for name in tracked_files()}) == []


def test_forbidden_files_are_recognized() -> None:
    wrong = {
        "torch-2.11-cp311.whl": 1,
        "api/static/htmx.min.js": 1,
        "web/node_modules/react/index.js": 1,
        "kernels/lib.so": 1,
        "tests/data/weights.safetensors": MAX_BYTES + 1,
    }
    fine = {"demo/loramux_demo/assets/base/model.safetensors": 4_000_000, "docs/simulator.png": 1, "README.md": 9_000}
    assert forbidden(wrong | fine) == list(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_not_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists(), "an importable `platform` shadows the standard library's"


def test_packages_have_no_faces() -> None:
    """Every import names the module that defines the thing; the client is a library, and has a face."""
    inits = [path for root in SOURCE_ROOTS if root != "client" for path in (ROOT / root).rglob("__init__.py")]
    faces = [str(path) for path in inits if len(ast.parse(path.read_text()).body) != 1]
    assert faces == []


def test_platform_is_the_standard_librarys() -> None:
    assert (
        Path(importlib.import_module("platform").__file__).parent == Path(importlib.import_module("os").__file__).parent
    )


@pytest.mark.parametrize("module", ["loramux_api.app", "loramux_api.cli.main"])
def test_http_starts_without_triton_peft_openai_or_matplotlib(module: str) -> None:
    heavy = {"peft", "triton", "matplotlib", "openai", "pyarrow", "fpdf"}
    code = f"import {module}, sys; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
