"""Questions of a comparison: ratios within one run, with the targets that they must reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from measurements import Measurement, Spread, paired, spread

OURS, PEFT, VLLM, VLLM_WITHOUT_LORA, LLAMA_CPP = "loramux", "peft", "vllm", "vllm-without-lora", "llama.cpp"
OVERHEAD_ALLOWANCE = 0.05
"""Limit of measured LoRA overhead above omega."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question about one model. `met` is None if there is no target."""

    cell: Cell
    question: str
    measured: Spread
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Cell:
    """The measurements of one model in one dtype with one suite of workloads, from which questions select."""

    model: str
    dtype: str
    suite: str
    measurements: tuple[Measurement, ...]

    def of(self, system: str, share: str, mode: str = "continuous") -> list[Measurement]:
        """Return one system's measurements of a workload, one per repetition."""
        workload = f"{self.suite}-{share}"
        return [
            m for m in self.measurements if (m.case.system, m.case.workload, m.case.mode) == (system, workload, mode)
        ]

    @property
    def shares(self) -> list[str]:
        """The workloads of the suite that were measured, in order of appearance."""
        return list(dict.fromkeys(m.case.workload.partition("-")[2] for m in self.measurements))


def tokens_per_s(measurement: Measurement) -> float:
    """Output tokens per second."""
    return measurement.figures.output_tokens_per_s


def peak_memory(measurement: Measurement) -> float:
    """Bytes."""
    return float(measurement.resources.peak_pss_bytes)


def omega(measurement: Measurement) -> float | None:
    """LoRA's decode floor, if the engine reports it."""
    return measurement.floor.omega if measurement.floor else None


def cells(measurements: Sequence[Measurement]) -> list[Cell]:
    """The measurements by model, dtype and suite, in order of appearance."""

    def key(m: Measurement) -> tuple[str, str, str]:
        return m.case.model, m.case.dtype, m.case.workload.partition("-")[0]

    order = list(dict.fromkeys(map(key, measurements)))
    grouped = groupby(sorted(measurements, key=lambda m: order.index(key(m))), key)
    return [Cell(*names, tuple(group)) for names, group in grouped]


def answers(measurements: Sequence[Measurement]) -> list[Answer]:
    """Every question that the measurements can answer."""
    return [answer for cell in cells(measurements) for answer in _answers(cell)]


def _answers(cell: Cell) -> Iterator[Answer]:
    for share in cell.shares:
        yield from _throughput(cell, share)
    for system in (OURS, PEFT, VLLM, LLAMA_CPP):
        yield from _lora_overhead(cell, system)
    yield from _peak_memory(cell)


def _throughput(cell: Cell, share: str) -> Iterator[Answer]:
    ours = cell.of(OURS, share)
    rivals = {
        PEFT: cell.of(PEFT, share, "static"),
        VLLM: cell.of(VLLM, share),
        VLLM_WITHOUT_LORA: cell.of(VLLM_WITHOUT_LORA, share),
        LLAMA_CPP: cell.of(LLAMA_CPP, share),
        "our own static batching": cell.of(OURS, share, "static"),
    }
    least = {("mix", PEFT): 8.0, ("mix", VLLM): 6.0, ("base", VLLM_WITHOUT_LORA): 1.3}
    for rival, theirs in rivals.items():
        ratio = paired(ours, theirs, tokens_per_s)
        if ratio:
            yield _at_least(cell, f"{share}: tokens/s over {rival}", ratio, least.get((share, rival)))


def _lora_overhead(cell: Cell, system: str) -> Iterator[Answer]:
    mode = "static" if system == PEFT else "continuous"
    base = cell.of(system, "base", mode)
    for share in cell.shares:
        ratio = paired(base, cell.of(system, share, mode), tokens_per_s)
        if share == "base" or ratio is None:
            continue
        overhead = Spread(tuple(value - 1 for value in ratio.values))
        question = f"{share}: LoRA overhead of {system} (base tokens/s over these, - 1)"
        floor = spread(cell.of(system, share, mode), omega)
        if floor is None:
            yield Answer(cell, question, overhead)
        else:
            most = floor.median + OVERHEAD_ALLOWANCE
            target = f"<= {most:.2f} (omega {floor.median:.2f} + {OVERHEAD_ALLOWANCE})"
            yield Answer(cell, question, overhead, target, overhead.median <= most)


def _peak_memory(cell: Cell) -> Iterator[Answer]:
    for share, rival in (("mix", VLLM), ("base", VLLM_WITHOUT_LORA)):
        ratio = paired(cell.of(OURS, share), cell.of(rival, share), peak_memory)
        if ratio:
            yield Answer(cell, f"{share}: peak memory over {rival}", ratio, "< 1", ratio.median < 1)
    ratio = paired(cell.of(OURS, "mix"), cell.of(PEFT, "mix", "static"), peak_memory)
    if ratio:
        yield Answer(cell, f"mix: peak memory over {PEFT}", ratio)


def _at_least(cell: Cell, question: str, ratio: Spread, least: float | None) -> Answer:
    if least is None:
        return Answer(cell, question, ratio)
    return Answer(cell, question, ratio, f">= {least:g}", ratio.median >= least)
