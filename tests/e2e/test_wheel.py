"""What is in the wheel is enough: migrations, settings and the demo's model among it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents, in a folder that Python looks at before the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("loramux-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_demo_runs_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    packages = "loramux, loramux_api, loramux_adapters, loramux_kernels, loramux_demo"
    where = run(installed, tmp_path, "-c", f"import {packages}; print(*(p.__file__ for p in ({packages})))")
    assert all(Path(file).is_relative_to(installed) for file in where.stdout.split()), where
    done = run(installed, tmp_path, "-m", "loramux_api", "demo", "--once", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sum(answer["ok"] for answer in report["answers"]) >= 0.9 * len(report["answers"]) >= 0.9 * 40
    assert report["max_distinct_adapters_in_a_step"] >= 5


def test_the_settings_to_start_from_are_in_the_wheel(installed: Path) -> None:
    shipped = {file.name for file in (ROOT / "configs").glob("*.toml")}
    assert {file.name for file in (installed / "loramux" / "configs").glob("*.toml")} == shipped
