"""PEFT with static batches as a measured system. Every drive has a separate process, so that its memory is measured
separately.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from measurements import Drive
from peers.serving import SystemFailed
from specs import BENCHMARKS, Setup
from workloads import Item, dump


@dataclass(frozen=True)
class PeftStatic:
    """transformers and PEFT, unchanged, in this environment."""

    label: str = "peft"

    def modes(self, workload: Sequence[Item]) -> tuple[str, ...]:
        """The only mode of this system."""
        del workload
        return ("static",)

    def drives(self, setup: Setup, runs: Sequence[tuple[str, Sequence[Item]]]) -> Iterator[Drive]:
        """One drive for each (mode, workload)."""
        return (self._drive(setup, items) for _, items in runs)

    def _drive(self, setup: Setup, items: Sequence[Item]) -> Drive:
        setup.scratch.mkdir(parents=True, exist_ok=True)
        workload, answers = setup.scratch / "peft-workload.jsonl", setup.scratch / "peft-drive.json"
        workload.write_bytes(dump(items))
        command = [sys.executable, "-m", "peers.peft_worker", setup.spec.name, setup.dtype]
        command += ["--threads", str(setup.threads), "--batch-size", str(setup.max_num_seqs)]
        environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
        done = subprocess.run([*command, str(workload), str(answers)], env=environment, check=False)
        if done.returncode:
            raise SystemFailed(f"PEFT's process ended with {done.returncode}; its own words are above")
        return msgspec.json.decode(answers.read_bytes(), type=Drive)
