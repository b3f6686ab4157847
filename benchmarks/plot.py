"""A plot of the comparison: tokens/s, first token, and LoRA's overhead next to its floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from measurements import Measurement, Spread, spread
from questions import OURS, Cell, answers, cells, omega, tokens_per_s

COLOURS = ("#1b6ca8", "#8fc1e3", "#d9822b", "#7a5195", "#bc5090", "#6b7280")


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """Draw a PNG with one column for each model, dtype and suite."""
    columns = cells(measurements)
    figure = Figure(figsize=(1 + 5.5 * len(columns), 11), layout="constrained")
    axes = figure.subplots(3, len(columns), squeeze=False)
    for column, cell in enumerate(columns):
        _throughput(axes[0][column], cell)
        _first_token(axes[1][column], cell)
        _overhead(axes[2][column], cell)
    figure.savefig(path, dpi=110)


def draw_throughput(measurements: Sequence[Measurement], path: Path) -> None:
    """Draw only tokens per second, wide and low: the chart of the README."""
    columns = cells(measurements)
    figure = Figure(figsize=(8 * len(columns), 3.2), layout="constrained")
    for axes, cell in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        _throughput(axes, cell)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=110)


def _ways(cell: Cell) -> list[tuple[str, str]]:
    """(system, mode) in order of appearance."""
    return list(dict.fromkeys((m.case.system, m.case.mode) for m in cell.measurements))


def _throughput(axes: Any, cell: Cell) -> None:
    axes.set_title(f"{cell.model}, {cell.dtype}, {cell.suite}")
    _bars(axes, cell, lambda way, share: spread(cell.of(way[0], share, way[1]), tokens_per_s))
    axes.set_ylabel("output tokens/s")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)


def _first_token(axes: Any, cell: Cell) -> None:
    """p50, with a whisker up to p99."""

    def both(way: tuple[str, str], share: str) -> Spread | None:
        found = cell.of(way[0], share, way[1])
        p50, p99 = spread(found, lambda m: m.figures.ttft_p50_s), spread(found, lambda m: m.figures.ttft_p99_s)
        return Spread((p50.median, p50.median, p99.median)) if p50 and p99 else None

    _bars(axes, cell, both)
    axes.set_yscale("log")
    axes.set_ylabel("first token: p50, whisker to p99 (s)")


def _bars(axes: Any, cell: Cell, value: Any) -> None:
    ways = _ways(cell)
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        found = [(i, s) for i, share in enumerate(cell.shares) if (s := value(way, share)) is not None]
        heights = [s.median for _, s in found]
        low = [s.median - min(s.values) for _, s in found]
        high = [max(s.values) - s.median for _, s in found]
        places = [i - 0.4 + width * (number + 0.5) for i, _ in found]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, heights, width, yerr=(low, high), label=f"{way[0]}, {way[1]}", color=colour, capsize=2)
    axes.set_xticks(range(len(cell.shares)), cell.shares)


def _overhead(axes: Any, cell: Cell) -> None:
    """Draw loramux's measured overhead as a bar, and omega as a line on the bar."""
    found = [a for a in answers(cell.measurements) if f"LoRA overhead of {OURS}" in a.question]
    shares = [a.question.partition(":")[0] for a in found]
    axes.bar(range(len(found)), [100 * a.measured.median for a in found], 0.5, color=COLOURS[0], label="measured")
    for i, share in enumerate(shares):
        floor = median(value for m in cell.of(OURS, share) if (value := omega(m)) is not None)
        axes.hlines(100 * floor, i - 0.3, i + 0.3, color="black", label="omega, the floor" if i == 0 else None)
    axes.set_xticks(range(len(found)), shares)
    axes.set_xlim(-0.7, len(found) - 0.3)
    axes.set_ylabel("LoRA overhead of loramux (%)")
    if found:
        axes.legend(fontsize=8)
