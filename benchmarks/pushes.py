"""A trainer's pushes: the time to the first token with new weights, and a thousand updates.

    python benchmarks/pushes.py first-token [--megabytes 100] [--pushes 12]
    python benchmarks/pushes.py updates [--updates 1000]

Each starts the real server with its own engine on a CPU. `first-token` pushes an adapter of that size from a
folder on /dev/shm, as a trainer of this machine does, and then in a body; each push is followed by a request for one
token, and the time runs from the push's first byte to the answer. `updates` pushes a small adapter again and again, and
asks each version for one token. It compares the first and the last tenth: times, memory of the server's processes,
bytes on the disk, and rows of the tables that do not grow with requests.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import sqlalchemy as sa
import torch
from models import build_tokenizer
from progress import say
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.data.records.database import parse_url
from loramux.data.records.schema import METADATA
from loramux_demo.server import free_port

TENANT, NAME = "lab", "policy"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
GROWING = {"requests", "ledger_entries", "usage_segments", "idempotency_claims"}
"""Tables that have rows for requests."""
START_SECONDS = 300.0


@dataclass(frozen=True)
class Trainer:
    """A client with a trainer's key, and the shape of its adapters."""

    http: httpx.Client
    shapes: dict[str, tuple[int, int]]
    """Inputs and outputs of each adapted linear, by its name in a checkpoint."""
    rank: int
    dtype: torch.dtype

    def config(self) -> bytes:
        targets = sorted({name.rpartition(".")[2] for name in self.shapes})
        document = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": self.rank}
        return json.dumps(document | {"target_modules": targets}).encode()

    def weights(self, seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (inputs, outputs) in self.shapes.items():
            stem = f"base_model.model.{name}"
            for part, shape in (("A", (self.rank, inputs)), ("B", (outputs, self.rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{stem}.lora_{part}.weight"] = values.to(self.dtype)
        return save(tensors, metadata={"format": "pt"})

    def push(self, data: bytes) -> str:
        """Push the weights in the body; return the version."""
        files = {CONFIG: (CONFIG, self.config()), WEIGHTS: (WEIGHTS, data)}
        fields = {"lora_name": NAME, "load_inplace": "true"}
        pushed = self.http.post("/v1/load_lora_adapter", data=fields, files=files)
        return str(pushed.raise_for_status().headers["x-loramux-version"])

    def push_folder(self, folder: Path) -> str:
        body = {"lora_name": NAME, "lora_path": str(folder), "load_inplace": True}
        return str(self.http.post("/v1/load_lora_adapter", json=body).raise_for_status().headers["x-loramux-version"])

    def ask(self, version: str) -> None:
        body = {"model": NAME, "prompt": [1, 2, 3, 4], "max_tokens": 1, "logprobs": 0}
        answered = self.http.post("/v1/completions", json=body).raise_for_status().json()["model"]
        assert answered == version, f"{answered} answered, and {version} is the newest"


@dataclass(frozen=True)
class Server:
    """A server of the benchmark's own, in a folder."""

    folder: Path
    process: subprocess.Popen[str]
    trainer: Trainer

    def memory(self) -> int:
        """Return the resident bytes of the server and its engine, without pages that they share."""
        pids, found = [self.process.pid], 0
        while pids:
            pid = pids.pop()
            for file in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, file.read_text().split())
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                found += 1024 * int(line.split()[1]) if line.startswith("Private_") else 0
        return found

    def disk(self) -> int:
        """Return the bytes of stored and cached adapters. A file with several links counts once."""
        files = [file.stat() for place in ("blobs", "cache") for file in self.folder.rglob(f"{place}/**/*")]
        return sum({one.st_ino: one.st_size for one in files}.values())

    def rows(self) -> int:
        """Return the rows of all tables that have no rows for requests."""
        engine = sa.create_engine(parse_url(f"sqlite:///{next(self.folder.rglob('*.sqlite3'))}"))
        with engine.connect() as connection:
            tables = [table for table in METADATA.sorted_tables if table.name not in GROWING]
            return sum(connection.execute(sa.select(sa.func.count()).select_from(one)).scalar_one() for one in tables)


def shapes_of(base: Path) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linears of a Llama's layers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(base))
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    known = set(itertools.chain(*TARGETS.values()))
    return {n: (one.in_features, one.out_features) for n, one in linears.items() if n.rpartition(".")[2] in known}


def make_base(folder: Path, hidden: int, layers: int) -> Path:
    """Write a base with random weights: Llama, in bfloat16."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rank_for(shapes: dict[str, tuple[int, int]], size: int, dtype: torch.dtype) -> int:
    """Return the rank of an adapter with about `size` bytes."""
    return max(1, round(size / dtype.itemsize / sum(inputs + outputs for inputs, outputs in shapes.values())))


@contextmanager
def serving(folder: Path, base: Path, megabytes: float) -> Iterator[Server]:
    """Run a server with a tenant and a trainer's key."""
    shapes, dtype = shapes_of(base), torch.bfloat16
    rank = rank_for(shapes, round(megabytes * 1e6), dtype)
    pushes = Path("/dev/shm", f"loramux-{os.getpid()}")
    (pushes / TENANT).mkdir(parents=True)
    config = folder / "loramux.toml"
    config.write_text(
        f'[model]\npath = "{base}"\nserved_model_name = "base"\n[adapters]\nmax_rank = {max(rank, 8)}\n'
        f'[engine]\npool_bytes = {1 << 30}\n[validation]\nparity = false\n[pushes]\nroot = "{pushes}"\nkeep = 4\n'
        "[records]\ncache_bytes = 8_000_000_000\n"
    )
    loramux = [sys.executable, "-m", "loramux_api"]
    options = ["--config", str(config), "--json"]
    subprocess.run([*loramux, "tenant", "create", TENANT, *options], check=True, capture_output=True)
    scopes = ["--scope", "push", "--scope", "inference"]
    made = subprocess.run(
        [*loramux, "key", "create", "--tenant", TENANT, *scopes, *options], check=True, capture_output=True, text=True
    )
    command = [*loramux, "serve", "--port", str(free_port(None)), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        headers = {"Authorization": f"Bearer {json.loads(made.stdout)['key']}"}
        with httpx.Client(base_url=url, headers=headers, timeout=START_SECONDS) as http:
            yield Server(folder, process, Trainer(http, shapes, rank, dtype))
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(pushes)


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum in milliseconds."""
    ordered = sorted(1000 * one for one in seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"median_ms": round(statistics.median(ordered), 1), "p99_ms": round(p99, 1), "max_ms": round(ordered[-1], 1)}


def first_tokens(trainer: Trainer, pushes: int, folder: Path | None) -> dict[str, Any]:
    """Push, and ask for one token; from the folder, or in the body."""
    pushed, answered = [], []
    for number in range(pushes + 1):
        data = trainer.weights(number + (0 if folder is None else 10**6))
        if folder is not None:
            folder.mkdir(exist_ok=True)
            (folder / WEIGHTS).write_bytes(data)
            (folder / CONFIG).write_bytes(trainer.config())
        began = time.perf_counter()
        version = trainer.push(data) if folder is None else trainer.push_folder(folder)
        loaded = time.perf_counter()
        trainer.ask(version)
        if number:  # the first push starts the processes that check files
            pushed.append(loaded - began)
            answered.append(time.perf_counter() - began)
    return {"bytes": len(data), "push": summary(pushed), "first_token": summary(answered)}


@click.group()
def main() -> None:
    """Measure a trainer's pushes."""


@main.command("first-token")
@click.option("--megabytes", default=100.0)
@click.option("--pushes", default=12)
def first_token(megabytes: float, pushes: int) -> None:
    """Measure the time from the begin of a push to the first token of its weights."""
    with tempfile.TemporaryDirectory(prefix="pushes-") as name:
        folder = Path(name)
        with serving(folder, make_base(folder / "base", 512, 10), megabytes) as server:
            own = Path("/dev/shm", f"loramux-{os.getpid()}", TENANT, "run")
            found = {"folder": first_tokens(server.trainer, pushes, own)}
            found["body"] = first_tokens(server.trainer, pushes, None)
            click.echo(json.dumps(found | {"rank": server.trainer.rank}, indent=2))


@main.command("updates")
@click.option("--updates", default=1000)
def updates(updates: int) -> None:
    """Push again and again, and compare the first tenth with the last."""
    with tempfile.TemporaryDirectory(prefix="pushes-") as name:
        folder = Path(name)
        with serving(folder, make_base(folder / "base", 64, 2), 0.05) as server:
            tenth, seconds, samples = max(updates // 10, 1), list[float](), list[dict[str, int]]()
            for number in range(1, updates + 1):
                data = server.trainer.weights(number)
                began = time.perf_counter()
                server.trainer.ask(server.trainer.push(data))
                seconds.append(time.perf_counter() - began)
                if number % tenth == 0:
                    sample = {
                        "updates": number,
                        "memory": server.memory(),
                        "disk": server.disk(),
                        "rows": server.rows(),
                    }
                    samples.append(sample)
                    say(f"{samples[-1]}")
            first, last = summary(seconds[:tenth]), summary(seconds[-tenth:])
            click.echo(json.dumps({"first_tenth": first, "last_tenth": last, "samples": samples}, indent=2))


if __name__ == "__main__":
    main()
