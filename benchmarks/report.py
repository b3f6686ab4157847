"""The report of a comparison: Markdown tables and a plot, made from the lines that compare.py wrote.

python benchmarks/report.py benchmarks/results/NAME [CHART.png]     # the chart of tokens per second alone, too
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
from machine import Machine
from measurements import Agreement, Failure, Measurement, Spread, spread
from plot import draw, draw_throughput
from questions import answers

LINES, REPORT, PLOT = "results.jsonl", "report.md", "plot.png"
Line = Machine | Measurement | Agreement | Failure
QUIET_CORES = 0.3
"""Number of cores used by other processes above which a figure is marked."""


@dataclass
class Results:
    """The results of one run of compare.py."""

    machine: Machine | None = None
    measurements: list[Measurement] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def take(self, line: Line) -> None:
        """Add one line."""
        match line:
            case Machine():
                self.machine = line
            case Measurement():
                self.measurements.append(line)
            case Agreement():
                self.agreements.append(line)
            case Failure():
                self.failures.append(line)


def read(directory: Path) -> Results:
    """Return the results in a folder; empty if no system has been measured yet."""
    results = Results()
    decoder = msgspec.json.Decoder(Line)
    lines = directory / LINES
    for line in decoder.decode_lines(lines.read_bytes() if lines.exists() else b""):
        results.take(line)
    return results


def write(directory: Path) -> str:
    """Write the report and the plot next to the lines; return the report's text."""
    results = read(directory)
    sections = [_head(results), _answers(results), _measurements(results), _agreements(results), _failures(results)]
    if results.measurements:
        draw(results.measurements, directory / PLOT)
        sections.append(f"![tokens/s, first token and LoRA overhead]({PLOT})")
    text = "\n\n".join(section for section in sections if section) + "\n"
    (directory / REPORT).write_text(text)
    return text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(results: Results) -> str:
    if results.machine is None:
        return "# Comparison"
    m = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in m.packages.items())
    lines = [
        f"# Comparison of {m.date}",
        "",
        f"- commit {m.commit}",
        f"- {m.cpu}, {m.cores} cores ({', '.join(m.flags)}), {m.memory_bytes / 2**30:.0f} GiB, {m.system}",
        f"- Python {m.python}, {packages}",
        f"- memory read at {m.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
    ]
    if m.environment:
        lines.append(f"- environment: {' '.join(f'{k}={v}' for k, v in m.environment.items())}")
    return "\n".join(lines)


def _answers(results: Results) -> str:
    verdicts = {True: "yes", False: "**no**", None: ""}
    rows = [
        (a.cell.model, a.cell.dtype, a.cell.suite, a.question, str(a.measured), a.target, verdicts[a.met])
        for a in answers(results.measurements)
    ]
    header = ("model", "dtype", "suite", "question", "measured", "target", "met")
    return "## Ratios\n\n" + table(header, rows) if rows else ""


def _measurements(results: Results) -> str:
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for m in results.measurements:
        groups.setdefault((m.case.model, m.case.dtype, m.case.workload, m.case.system, m.case.mode), []).append(m)
    header = ("model", "dtype", "workload", "system", "mode", *(name for name, _ in COLUMNS))
    rows = [(*names, *(column(group) for _, column in COLUMNS)) for names, group in groups.items()]
    note = f"Medians of the repetitions. `*`: others used more than {QUIET_CORES} cores meanwhile; do not trust it."
    return f"## Measurements\n\n{note}\n\n{table(header, rows)}" if rows else ""


Group = Sequence[Measurement]
Column = Callable[[Group], str]


def _seconds(name: str) -> Column:
    return lambda group: _median(spread(group, lambda m: getattr(m.figures, name)), "{:.2f} s")


def _median(values: Spread | None, form: str) -> str:
    return "" if values is None else form.format(values.median)


def _throughput(group: Group) -> str:
    busy = any(m.resources.other_cores > QUIET_CORES for m in group)
    return f"{median(m.figures.output_tokens_per_s for m in group):.1f}{'*' if busy else ''}"


def _faults(group: Group) -> str:
    failed, wrong = sum(m.figures.failed for m in group), sum(m.figures.wrong_length for m in group)
    return f"{failed} failed, {wrong} of wrong length" if failed or wrong else "none"


COLUMNS: tuple[tuple[str, Column], ...] = (
    ("tokens/s", _throughput),
    ("first token p50", _seconds("ttft_p50_s")),
    ("p99", _seconds("ttft_p99_s")),
    ("total p50", _seconds("total_p50_s")),
    ("p99", _seconds("total_p99_s")),
    ("start", lambda g: f"{median(m.start_s for m in g):.0f} s"),
    ("peak memory", lambda g: f"{max(m.resources.peak_pss_bytes for m in g) / 2**30:.2f} GiB"),
    ("omega", lambda g: _median(spread(g, lambda m: m.floor.omega if m.floor else None), "{:.2f}")),
    ("of the memory floor", lambda g: _median(spread(g, lambda m: m.floor.share if m.floor else None), "{:.0%}")),
    ("of the arithmetic", lambda g: _median(spread(g, lambda m: m.floor.arithmetic if m.floor else None), "{:.0%}")),
    ("faults", _faults),
)


def _agreements(results: Results) -> str:
    sums: dict[tuple[str, ...], tuple[int, int]] = {}
    for a in results.agreements:
        key = (a.case.model, a.case.dtype, a.case.workload, a.case.system, a.case.mode)
        same, requests = sums.get(key, (0, 0))
        sums[key] = same + a.same, requests + a.requests
    rows = [(*key, f"{same} of {requests}") for key, (same, requests) in sums.items()]
    header = ("model", "dtype", "workload", "system", "mode", "answers equal to PEFT's, token for token")
    return "## Same answers\n\n" + table(header, rows) if rows else ""


def _failures(results: Results) -> str:
    rows = [(f.model, f.dtype, f.system, f.reason.splitlines()[0]) for f in results.failures]
    return "## Not measured\n\n" + table(("model", "dtype", "system", "reason"), rows) if rows else ""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(write(folder))
    for chart in sys.argv[2:]:
        draw_throughput(read(folder).measurements, Path(chart))
