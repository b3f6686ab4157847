"""The two wheels are complete: the server with migrations, settings and the demo's model, and the client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of both wheels, in a folder that Python searches before the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for project in (ROOT, ROOT / "client"):
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(project)]
        subprocess.run(command, check=True, capture_output=True)
    wheels = sorted(folder.glob("*.whl"))
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["loramux", "loramux_client"]
    for wheel in wheels:
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


def test_demo_runs_from_the_wheels(installed: Path, tmp_path: Path) -> None:
    packages = "loramux, loramux_api, loramux_adapters, loramux_kernels, loramux_client, loramux_demo"
    where = run(installed, tmp_path, "-c", f"import {packages}; print(*(p.__file__ for p in ({packages})))")
    assert all(Path(file).is_relative_to(installed) for file in where.stdout.split()), where
    done = run(installed, tmp_path, "-m", "loramux_api", "demo", "--once", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sum(answer["ok"] for answer in report["answers"]) >= 0.9 * len(report["answers"]) >= 0.9 * 40
    assert report["max_distinct_adapters_in_a_step"] >= 5


def test_example_settings_are_in_the_wheel(installed: Path) -> None:
    shipped = {file.name for file in (ROOT / "configs").glob("*.toml")}
    assert {file.name for file in (installed / "loramux" / "configs").glob("*.toml")} == shipped


def test_client_wheel_depends_on_httpx_and_msgspec_only(installed: Path) -> None:
    (metadata,) = installed.glob("loramux_client-*.dist-info/METADATA")
    needed = [line.split()[1] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist:")]
    assert [re.match(r"[a-z]+", name)[0] for name in needed] == ["httpx", "msgspec"]


def test_packages_in_the_wheels_are_typed(installed: Path) -> None:
    packages = [folder for folder in installed.iterdir() if folder.is_dir() and not folder.name.endswith(".dist-info")]
    assert len(packages) == 6
    assert [folder.name for folder in packages if not (folder / "py.typed").is_file()] == []
