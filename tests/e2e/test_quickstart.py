"""The tutorial of the quick start: its files are written and its commands run, in order, by a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from running_server import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs/quickstart.md").read_text().split("## From nothing to your own fine-tune")[1].split("\n## ")[0]
REPOSITORY = "models--HuggingFaceTB--SmolLM2-135M-Instruct"
COMMIT = "0" * 40
SECONDS = 1800


FILES = re.findall(r'^    ```python title="([\w.]+)"\n(.*?)^    ```$', TUTORIAL, re.DOTALL | re.MULTILINE)
COMMANDS = [
    textwrap.dedent(block) for block in re.findall(r"^    ```sh\n(.*?)^    ```$", TUTORIAL, re.DOTALL | re.MULTILINE)
]


@pytest.fixture
def environment(smollm2_dir: Path, tmp_path: Path) -> dict[str, str]:
    """Make a new user's environment: an empty data folder, the model in the hub's cache, a venv with loramux."""
    hub = tmp_path / "hub" / REPOSITORY
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text(COMMIT)
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / COMMIT).symlink_to(smollm2_dir)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text("\n".join(path for path in sys.path if path and Path(path).is_dir()))
    for name, module in (("pip", "pip"), ("loramux", "loramux_api")):
        script = venv / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {venv}/bin/python -m {module} "$@"\n')
        script.chmod(0o755)
    return os.environ | {
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "LORAMUX_DATA": str(tmp_path / "data"),
    }


@contextmanager
def in_another_terminal(command: str, environment: dict[str, str], url: str) -> Iterator[None]:
    """Run a server's command until the block ends, which begins once it is ready."""
    process = subprocess.Popen(shlex.split(command), env=environment)
    try:
        while not is_ready(url):
            assert process.poll() is None, "the server ended while it was starting"
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_tutorial_leads_from_nothing_to_a_fine_tune_that_answers(environment: dict[str, str], tmp_path: Path) -> None:
    work, port = tmp_path / "work", free_port()
    work.mkdir()
    (work / "configs").symlink_to(ROOT / "configs")
    for name, text in FILES:
        (work / name).write_text(textwrap.dedent(text))
    (serving,) = (number for number, command in enumerate(COMMANDS) if command.startswith("loramux serve "))

    def run(commands: list[str]) -> str:
        script = "set -euo pipefail\n" + "\n".join(commands).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        ran = subprocess.run(
            ["bash", "-c", script],
            cwd=work,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        return ran.stdout

    run(COMMANDS[:serving])
    with in_another_terminal(f"{COMMANDS[serving]} --port {port}", environment, f"http://127.0.0.1:{port}"):
        said = run(COMMANDS[serving + 1 :])
    answers = [json.loads(line) for line in said.splitlines() if line.startswith('{"id":')]
    texts = {answer["model"]: answer["choices"][0]["message"]["content"] for answer in answers}
    assert "45 days" in texts["acme/lamp-shop@1"]
    assert "Marta" in texts["acme/lamp-shop@2"]
    assert "45 days" not in texts["smollm2-135m-instruct"]
    used = [sum(answer["usage"][kind] for answer in answers) for kind in ("prompt_tokens", "completion_tokens")]
    assert re.search(rf"Input tokens +{used[0]} tokens ", said)
    assert re.search(rf"Output tokens +{used[1]} tokens ", said)
    assert "none altered; engines and ledger agree to the token" in said
