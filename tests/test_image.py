"""The image is built from what passes .dockerignore, and every step of its build works on that alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_steps", ROOT / "deploy/try/image_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def context(steps: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build context, as `docker build` would send it."""
    return steps.copy_context(ROOT, tmp_path_factory.mktemp("context"))


def test_image_context_has_every_file_that_a_step_names(steps: ModuleType, context: Path) -> None:
    named = {source for stage in ("build", None) for source in steps.copied_into_image(stage)}
    for _, text in steps.instructions(steps.DOCKERFILE, "build"):
        named |= set(re.findall(r"(?<![\w/.])(?:\./)?[a-z_]+(?:/[\w.]+)*\.(?:py|toml|sh)\b|\./[a-z]+\b", text))
    assert {"tools/build_console.py", "./client", "configs/container.toml"} <= named
    assert [name for name in named if not (context / name).exists()] == []


def test_image_context_has_everything_that_the_wheel_is_made_of(context: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    hook = wheel["hooks"]["custom"]["path"]
    needed = [*wheel["only-include"], hook, project["project"]["readme"], *project["project"]["license-files"]]
    assert [name for name in (*needed, "console/package-lock.json") if not (context / name).exists()] == []


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "var/pepper",
        "loramux.sqlite3",
        "tests/test_image.py",
        "console/node_modules/vite/index.js",
        "api/loramux_api/__pycache__/app.cpython-311.pyc",
    ],
)
def test_image_context_leaves_out(steps: ModuleType, path: str) -> None:
    assert steps.is_left_out(path, steps.ignore_patterns((ROOT / ".dockerignore").read_text()))


def test_dockerignore_last_matching_pattern_decides(steps: ModuleType) -> None:
    patterns = steps.ignore_patterns("# all\n*\n!a\na/**/x?.tmp\n!a/b/xy.tmp\n")
    paths = ["c", "a/file", "a/x1.tmp", "a/b/c/x1.tmp", "a/b/xy.tmp", "a/b/x12.tmp"]
    assert [path for path in paths if steps.is_left_out(path, patterns)] == ["c", "a/x1.tmp", "a/b/c/x1.tmp"]


def test_image_runs_as_a_user_without_rights() -> None:
    assert "USER 10001:10001" in (ROOT / "deploy/Dockerfile").read_text()


@pytest.mark.slow
def test_every_build_step_of_the_image_works_on_its_context(steps: ModuleType, tmp_path: Path) -> None:
    """Two minutes: Node.js, npm's packages, both wheels, the native operators and the list of packages, without
    stubs."""
    made = steps.run_build_stage(tmp_path)
    look = (
        "import pathlib, loramux, loramux_api, loramux_kernels.native.prebuilt as prebuilt;"
        "api = pathlib.Path(loramux_api.__file__).parent;"
        "print((api / 'console/index.html').is_file(), len(list(prebuilt.ROOT.rglob('libloramux.so'))) > 0,"
        "(pathlib.Path(loramux.__file__).parent / 'configs/single-node.toml').is_file())"
    )
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    done = subprocess.run(
        [str(made / "bin/python"), "-P", "-c", look],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={"PYTHONPATH": str(Path(torch.origin).parents[1])},
    )
    assert done.stdout.split() == ["True", "True", "True"], done
    assert (tmp_path / "opt/sbom.json").stat().st_size > 1000
