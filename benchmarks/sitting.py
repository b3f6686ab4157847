"""One run of measurements: systems are measured one after the other on one machine, and every figure is written
immediately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import report
from figures import same_answers, summarise
from machine import Machine
from measurements import Agreement, Case, Drive, Failure, Measurement, context_tokens, floor_of
from peers.peft_static import PeftStatic
from peers.serving import SystemFailed
from progress import say
from specs import Setup
from systems import System
from workloads import Item

_T = TypeVar("_T")

EXACT_DTYPE = "float32"
"""The dtype in which greedy answers can be compared token by token. In bfloat16 the answers of any two systems differ
after some tokens.
"""


@dataclass(frozen=True)
class Sitting:
    """The workloads to measure, and the folder for the results."""

    directory: Path
    machine: Machine
    systems: tuple[System, ...]
    workloads: dict[str, list[Item]]
    reps: int

    def run(self, setup: Setup) -> None:
        """Measure one model in one dtype. Every other repetition has the reverse order, because a machine's speed
        drifts within minutes.
        """
        for rep in range(self.reps):
            drives: list[tuple[Case, Drive]] = []
            for system in _in_turn(self.systems, rep):
                drives += self._try(system, setup, rep)
            for agreement in agreements(drives) if setup.dtype == EXACT_DTYPE else ():
                self.record(agreement)

    def _try(self, system: System, setup: Setup, rep: int) -> Iterator[tuple[Case, Drive]]:
        """Measure one system. If it fails, only its own figures are missing."""
        try:
            yield from self._measure(system, setup, rep)
        except SystemFailed as error:
            say(f"  not measured: {error}")
            self.record(
                Failure(system=system.label, model=setup.spec.name, dtype=setup.dtype, rep=rep, reason=f"{error}")
            )

    def _measure(self, system: System, setup: Setup, rep: int) -> Iterator[tuple[Case, Drive]]:
        cases = self._cases(system, setup, rep)
        if not cases:
            return
        runs = [(case.mode, self.workloads[case.workload]) for case in cases]
        say(f"{setup.spec.name} {setup.dtype}, repetition {rep + 1} of {self.reps}: {system.label}, {len(runs)} runs")
        for case, drive in zip(cases, system.drives(setup, runs), strict=True):
            measurement = self._figures(setup, case, drive)
            self.record(measurement)
            say(f"  {case.workload} {case.mode}: {measurement.figures.output_tokens_per_s:.1f} tokens/s")
            yield case, drive

    def _cases(self, system: System, setup: Setup, rep: int) -> list[Case]:
        """Return the measurements that the folder does not hold yet, those of one mode next to each other."""
        cases = [
            Case(system=system.label, model=setup.spec.name, dtype=setup.dtype, workload=name, mode=mode, rep=rep)
            for name, items in self.workloads.items()
            for mode in system.modes(items)
        ]
        by_mode = sorted(cases, key=lambda case: case.mode)
        return [case for case in _in_turn(by_mode, rep) if case not in self._measured_before]

    @cached_property
    def _measured_before(self) -> frozenset[Case]:
        return frozenset(m.case for m in report.read(self.directory).measurements)

    def _figures(self, setup: Setup, case: Case, drive: Drive) -> Measurement:
        items = self.workloads[case.workload]
        kv_bytes = setup.spec.kv_bytes_per_token(setup.dtype) * context_tokens(items)
        bandwidth, rate = self.machine.bandwidth_bytes_per_s, self.machine.operations_per_s.get(setup.dtype)
        prompts, outputs = sum(len(i.prompt_token_ids) for i in items), sum(i.max_tokens for i in items)
        multiplying_s = setup.spec.operations(prompts, outputs) / rate if rate else None
        counters, wall_s = drive.counters, drive.wall_s
        return Measurement(
            case=case,
            figures=summarise(items, drive.outcomes, drive.wall_s),
            resources=drive.resources,
            start_s=drive.start_s,
            floor=floor_of(counters, kv_bytes, wall_s, bandwidth, multiplying_s) if counters else None,
        )

    def record(self, line: report.Line) -> None:
        """Append a line to the results, so that an interrupted run keeps its results."""
        with (self.directory / report.LINES).open("ab") as lines:
            lines.write(msgspec.json.encode(line) + b"\n")


def _in_turn(order: Sequence[_T], rep: int) -> Sequence[_T]:
    return order if rep % 2 == 0 else order[::-1]


def agreements(drives: Sequence[tuple[Case, Drive]]) -> Iterator[Agreement]:
    """Compare every drive's answers with PEFT's to the same workload, if they have token ids."""
    references = {case.workload: drive for case, drive in drives if case.system == PeftStatic().label}
    for case, drive in drives:
        has_ids = any(outcome.token_ids for outcome in drive.outcomes)
        if has_ids and case.system != PeftStatic().label and case.workload in references:
            same = same_answers(references[case.workload].outcomes, drive.outcomes)
            yield Agreement(case=case, reference=PeftStatic().label, same=same, requests=len(drive.outcomes))
