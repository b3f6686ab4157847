"""`loramux serve` as a child process, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from click.testing import CliRunner
from running_server import free_port

from loramux_api.cli.main import main

LORAMUX = (sys.executable, "-m", "loramux_api")


@dataclass(frozen=True)
class Place:
    """A folder with settings and records, which outlives its servers."""

    folder: Path
    base: Path
    in_process: bool = False
    ranks: int = 1
    workers: int = 1
    lame_duck_seconds: float = 0
    max_wait_s: float | None = None
    """Seconds that a request waits for an engine; None: the product's default."""
    url: str | None = None
    """URL of the records; None: SQLite, in the folder."""
    tree: Path | None = None
    """The source of another release; None: this one's."""

    @property
    def config(self) -> Path:
        return self.folder / "loramux.toml"

    @property
    def environment(self) -> dict[str, str]:
        if self.tree is None:
            return dict(os.environ)
        parts = ("kernels", "adapters", "platform", "api", "demo")
        return os.environ | {"PYTHONPATH": ":".join(str(self.tree / part) for part in parts)}

    def prepare(self) -> Place:
        base = f'[model]\npath = "{self.base}"\nserved_model_name = "tiny"\n'
        if self.max_wait_s is not None:  # only a base of a list has settings of its engines
            wait = f"engines = {{ max_wait_s = {self.max_wait_s} }}"
            base = f'[[bases]]\nname = "tiny"\npath = "{self.base}"\n{wait}\n'
        self.config.write_text(
            f"{base}"
            "[engine]\npool_bytes = 16_777_216\nmax_num_batched_tokens = 64\nnum_threads = 1\n"
            f"in_process = {str(self.in_process).lower()}\ntensor_parallel_size = {self.ranks}\n"
            "[validation]\nparity = false\n"
            f"[server]\ndrain_seconds = 60\nlame_duck_seconds = {self.lame_duck_seconds}\n"
            + (f"workers = {self.workers}\n" if self.workers > 1 else "")
            + (f'[records]\nurl = "{self.url}"\n' if self.url else "")
        )
        return self

    def loramux(self, *arguments: str) -> Any:
        """Run a command; a command of another release runs in a separate process, which takes the time of a
        Python's start."""
        command = [*arguments, "--config", str(self.config), "--json"]
        if self.tree is None:
            ended = CliRunner().invoke(main, command, catch_exceptions=False)
            assert ended.exit_code == 0, ended.output
            return json.loads(ended.stdout)
        started = [*LORAMUX, *command]
        said = subprocess.run(started, check=True, capture_output=True, text=True, env=self.environment).stdout
        return json.loads(said)

    def key_of(self, tenant: str) -> str:
        self.loramux("tenant", "create", tenant)
        return self.loramux("key", "create", "--tenant", tenant)["key"]


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[str]
    url: str

    def openai(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def http(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def engine_pid(self) -> int:
        """The engine's process: the server's one child that is loramux's own (another is multiprocessing's tracker)."""
        return spawned_by(self.process.pid)[0]


def spawned_by(pid: int) -> list[int]:
    """The processes that multiprocessing has started from `pid`, from any of its threads."""
    spawned = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if any("spawn_main" in part for part in child.cmdline()):
                spawned.append(child.pid)
    return sorted(spawned)


@contextmanager
def served(place: Place) -> Iterator[Child]:
    """A server on `place`, until the block ends; then it is told to stop, if it has not ended already."""
    port = free_port()
    command = [*LORAMUX, "serve", "--config", str(place.config), "--port", str(port), "--json"]
    with (place.folder / "server.log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=place.environment
        )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said, (place.folder / "server.log").read_text()
        assert json.loads(said)["status"] == "serving"
        yield Child(process, f"http://127.0.0.1:{port}")
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            process.stdout.close()
