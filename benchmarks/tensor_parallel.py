"""Decode throughput and memory of two ranks with one thread each, compared with one rank with two threads, in one run.

    python benchmarks/tensor_parallel.py

A random Llama of 0.4 GB in float32 decodes for 16 sequences. The two ways alternate, and the ratio is that of their
medians. Memory is each process's private memory (RssAnon) after loading, and its maximum during loading (VmHWM, with
the pages of mapped files).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
import transformers

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import build_engine
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import Request, SamplingParams

SEQUENCES, PROMPT, OUTPUT = 16, 16, 48
WAYS = {"one rank, two threads": (1, 2), "two ranks, one thread each": (2, 1)}


def make_base(folder: Path) -> None:
    """Save a random Llama of 8 layers."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=4, vocab_size=8192, max_position_embeddings=512)
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)


def memory_of(pid: int | str) -> dict[str, float]:
    """Return MB of the process's own pages now, and of all its pages at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {
        line.split(":")[0]: float(line.split()[1]) / 1e3 for line in lines if line.startswith(("RssAnon", "VmHWM"))
    }
    return {"own_mb": round(found["RssAnon"]), "peak_mb": round(found["VmHWM"])}


def measure(base: str, ranks: int, threads: int) -> dict[str, object]:
    """Run one way once, in this process."""
    before = memory_of("self")["own_mb"]
    engine_settings = EngineSettings(
        tensor_parallel_size=ranks, num_threads=threads, pool_bytes=256 << 20, max_num_batched_tokens=256, device="cpu"
    )
    model = ModelSettings(path=base, served_model_name="base", dtype="float32")
    settings = Settings(model=model, engine=engine_settings)
    loaded = load_model(settings)
    others = [] if loaded.team is None else [other.process.pid for other in loaded.team.others if other.process]
    memory = [memory_of(pid) for pid in ("self", *others)]
    with closing(build_engine(loaded, settings, wake=lambda: None)) as engine:
        for number in range(SEQUENCES):
            tokens = [(7 * number + place) % 8000 + 3 for place in range(PROMPT)]
            sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
            engine.submit(Request(id=str(number), tenant="t", prompt_token_ids=tokens, sampling=sampling))
        for _ in range(4):  # the prompts, and steps to warm up
            engine.step()
        began, tokens_out = time.perf_counter(), 0
        while not engine.is_idle:
            report = engine.step()
            tokens_out += sum(event.token_id is not None for event in report.events) if report else 0
        seconds = time.perf_counter() - began
    return {"tokens_per_s": tokens_out / seconds, "before_mb": before, "memory": memory}


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("BASE", "RANKS", "THREADS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(measure(asked.one[0], int(asked.one[1]), int(asked.one[2]))))
        return
    found: dict[str, list[dict[str, object]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder))
        torch.set_num_threads(1)
        for _ in range(asked.rounds):
            for way, (ranks, threads) in WAYS.items():
                command = [sys.executable, __file__, "--one", folder, str(ranks), str(threads)]
                # As in a server's engine, because threads that spin while they wait take cores from working threads.
                passive = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=passive).stdout
                found[way].append(json.loads(said.splitlines()[-1]))
    speeds = {way: [float(str(one["tokens_per_s"])) for one in runs] for way, runs in found.items()}
    medians = [statistics.median(of_way) for of_way in speeds.values()]
    result = {
        "tokens_per_s": {way: [round(speed, 1) for speed in of_way] for way, of_way in speeds.items()},
        "ratio": round(medians[1] / medians[0], 3),
        "memory": {way: runs[0]["memory"] for way, runs in found.items()},
        "before_loading_mb": found["one rank, two threads"][0]["before_mb"],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
