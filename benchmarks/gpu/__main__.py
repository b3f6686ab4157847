"""Measurements on one GPU: first correctness, then speed, compared with the GPU's own limits and with other systems.

    PYTHONPATH=kernels:adapters:platform python benchmarks/gpu [--peer vllm=PATH] [--peer sglang=PATH]
    PYTHONPATH=kernels:adapters:platform python benchmarks/gpu --device cpu --quick

Needs torch, triton, transformers, peft, safetensors and msgspec; no network. The second command runs all steps at tiny
shapes on any machine; with TRITON_INTERPRET=1 it uses the kernels themselves. Its figures have no meaning. Results go
to `benchmarks/results/gpu-DATE-TIME/`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from grid import FULL, QUICK
from kernel_times import Bench, WrongResult, measure_kernels
from peer_kernels import PeerKernels, load_peer
from serving_model import ServingModel
from step_times import measure_peft, measure_steps
from tables import Report, machine_facts
from throughput import measure_throughput
from timing import clock_for, measure_ceilings

RESULTS = Path(__file__).resolve().parents[1] / "results"
SECTIONS = ("kernels", "steps", "throughput", "peft")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, which is 1 if a result is wrong."""
    options = _options(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here; `--device cpu --quick` runs the flow without one", file=sys.stderr)
        return 2
    # The interpreter multiplies bfloat16 matrices wrongly.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peers = dict(options.peer)
    clock = clock_for(device)
    report = Report(machine_facts(device))
    ceilings = measure_ceilings(device, clock)
    report.add("Ceilings", memory_GB_per_s=ceilings.bytes_per_ms / 1e6, bf16_TFLOPs=ceilings.flops_per_ms / 1e9)
    bench = Bench(QUICK if options.quick else FULL, torch.empty(0, dtype=dtype, device=device), clock, ceilings, report)
    try:
        _run(bench, options.only or SECTIONS, peers)
    except WrongResult as error:
        print(f"wrong: {error}", file=sys.stderr)
        return 1
    finally:
        report.write(options.out)
        print(f"written to {options.out}")
    return 0


@torch.inference_mode()
def _run(bench: Bench, sections: Sequence[str], peers: dict[str, PeerKernels]) -> None:
    device, dtype = bench.like.device, bench.like.dtype
    if "kernels" in sections:
        measure_kernels(bench, peers)
    if "peft" in sections:
        measure_peft(bench, device, dtype)
        gc.collect()  # the pool that is made next takes the free memory
        torch.cuda.empty_cache()
    if {"steps", "throughput"} & set(sections):
        serving = ServingModel(bench.grid, device, dtype)
        if "steps" in sections:
            measure_steps(bench, serving)
        if "throughput" in sections:
            serving.drop_adapters()
            measure_throughput(bench, serving)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a part of it; repeatable")
    parser.add_argument("--peer", action="append", default=[], type=_peer, metavar="NAME=PATH", help="vllm or sglang")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gpu-{datetime.now(UTC):%Y-%m-%d-%H%M}")
    return parser.parse_args(arguments)


def _peer(argument: str) -> tuple[str, PeerKernels]:
    try:
        return load_peer(argument)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
