"""Measure loramux and other systems on the same machine, in the same run, with the same workload. The results are
ratios, tables and a plot.

    python benchmarks/compare.py
    python benchmarks/compare.py --quick
    python benchmarks/compare.py --reps 3 --peer vllm=/path/to/its/venv --peer llama.cpp=/path/to/llama.cpp/build

The report goes to stdout and to a folder, together with the measured lines and the plot. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import report
from machine import describe
from peers.llama_cpp import LlamaCpp
from peers.loramux_server import Loramux
from peers.peft_static import PeftStatic
from peers.vllm_server import Vllm
from progress import say
from sitting import Sitting
from specs import BENCHMARKS, ITEM_SIZES, MODELS, Setup
from systems import Served, System
from workloads import comparison

FULL = {"models": "20m,0.5b", "dtypes": "bfloat16,float32", "workloads": "w64-base,w64-one,w64-mix"}
QUICK = {"models": "20m", "dtypes": "bfloat16", "workloads": "w24-base,w24-one,w24-mix"}
PEERS: dict[str, tuple[str, Callable[[Path], tuple[System, ...]]]] = {
    "vllm": ("bin/python", lambda venv: (Served(Vllm(venv, lora=False)), Served(Vllm(venv, lora=True)))),
    "llama.cpp": ("bin/llama-server", lambda build: (Served(LlamaCpp(build)),)),
}
"""For each peer: the program that its folder must hold, and its systems."""


def _peer(text: str) -> tuple[System, ...]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not vllm=/path/to/a/virtual/environment or llama.cpp=/path/to/its/build"
        )
    program, systems = PEERS[name]
    folder = Path(path).expanduser()
    if not (folder / program).exists():
        raise argparse.ArgumentTypeError(f"{folder} has no {program}: make it first, see docs/benchmarks.md")
    return systems(folder)


def _of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not known; there are {', '.join(known)}")
        return text.split(",")

    return parse


def _workloads(text: str) -> list[str]:
    names = text.split(",")
    try:
        for name in names:
            comparison(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure loramux beside its peers, in one run, with ratios.")
    parser.add_argument("--quick", action="store_true", help="the small model, bfloat16, 24 requests: some minutes")
    parser.add_argument("--models", type=_of(list(MODELS)), help="default 20m,0.5b")
    parser.add_argument("--dtypes", type=_of(list(ITEM_SIZES)), help="default bfloat16,float32")
    parser.add_argument("--workloads", type=_workloads, help="default w64-base,w64-one,w64-mix; w64-zipf and w24-*")
    parser.add_argument("--reps", type=int, default=1, help="repetitions of everything (default 1)")
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        help="vllm=VENV or llama.cpp=BUILD, measured in the same run; repeatable",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every system")
    parser.add_argument(
        "--systems", type=lambda text: text.split(","), help="only these, of loramux, peft and the peers' systems"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder (default benchmarks/results/DATE-TIME); one that holds results is gone on with",
    )
    arguments = parser.parse_args()
    defaults = QUICK if arguments.quick else FULL
    parser.set_defaults(**defaults)
    return parser.parse_args()


def _sitting(arguments: argparse.Namespace, directory: Path) -> Sitting:
    systems = _chosen((Served(Loramux()), PeftStatic(), *chain.from_iterable(arguments.peer)), arguments.systems)
    say("measuring the machine")
    return Sitting(
        directory=directory,
        machine=describe(arguments.threads),
        systems=systems,
        workloads={name: comparison(name) for name in arguments.workloads},
        reps=arguments.reps,
    )


def _chosen(systems: tuple[System, ...], names: Sequence[str] | None) -> tuple[System, ...]:
    labels = [system.label for system in systems]
    if unknown := set(names or ()) - set(labels):
        sys.exit(f"compare: --systems: {', '.join(sorted(unknown))} not known; there are {', '.join(labels)}")
    return tuple(system for system in systems if names is None or system.label in names)


def _directory(arguments: argparse.Namespace) -> Path:
    directory: Path = arguments.out or BENCHMARKS / "results" / datetime.now(UTC).strftime("%Y-%m-%d-%H%M")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def main() -> int:
    """The command line; 1 when a system could not be measured."""
    arguments = _parse_arguments()
    # SIGTERM becomes an exception, so that the servers are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("compare: stopped by SIGTERM"))
    # Every system uses its own default for waiting threads. loramux chooses PASSIVE for its engine. With PASSIVE, vLLM
    # is about 6% slower, and PEFT takes up to 50% longer.
    os.environ.pop("OMP_WAIT_POLICY", None)
    directory = _directory(arguments)
    subprocess.run([sys.executable, str(BENCHMARKS / "models.py"), *arguments.models], check=True)
    sitting = _sitting(arguments, directory)
    sitting.record(sitting.machine)
    try:
        for model in arguments.models:
            for dtype in arguments.dtypes:
                sitting.run(Setup(MODELS[model], dtype, arguments.threads))
    finally:
        print(report.write(directory))
        say(f"written to {directory}")
    return 1 if report.read(directory).failures else 0


if __name__ == "__main__":
    sys.exit(main())
