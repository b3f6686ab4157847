"""Records of a server during a soak, and the verdict: the series that grew."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families

from loramux_demo.server import Workspace

MIB = 1 << 20
GAUGES = (
    "loramux_engine_pages_kv",
    "loramux_engine_pages_kv_cached",
    "loramux_engine_pages_adapters",
    "loramux_engine_pages_adapters_idle",
    "loramux_engine_pages_free",
    "loramux_engine_adapters_resident",
    "loramux_engine_adapters_pinned",
    "loramux_engine_adapters_host_bytes",
    "loramux_unsettled_requests",
    "loramux_ledger_drift_tokens",
)
COLOURS = ("#1b6ca8", "#d9822b", "#7a5195", "#3a7d44", "#bc5090", "#6b7280")


@dataclass(frozen=True)
class Bound:
    """Maximum growth of a series between the second and the last quarter of a run."""

    share: float
    beside: float
    """Allowed growth in the series' unit."""


FLAT = {
    "server_mib": Bound(0.05, 24),
    "engine_mib": Bound(0.05, 24),
    "server_files": Bound(0.0, 8),
    "engine_files": Bound(0.0, 4),
    "server_threads": Bound(0.0, 4),
    "engine_threads": Bound(0.0, 2),
    "processes": Bound(0.0, 2),
    "blobs_mib": Bound(0.1, 4),
    "cache_mib": Bound(0.1, 4),
    "loramux_unsettled_requests": Bound(0.0, 8),
}
"""Series that must not grow. The database and the log grow, because they have a row and a line for each request."""


class Watch:
    """Samples of one server, in memory and in samples.csv."""

    def __init__(self, workspace: Workspace, pid: int, out: Path, period: float) -> None:
        self.period = period
        self.out = out
        self.samples: list[dict[str, float]] = []
        self._workspace = workspace
        self._server = psutil.Process(pid)
        self._began = time.monotonic()

    def sample(self, counts: Mapping[str, int]) -> None:
        """Record one sample; `counts` are the counts of the clients."""
        folder = self._workspace.folder
        values: dict[str, float] = {"seconds": round(time.monotonic() - self._began, 1), **self._processes()}
        for name in ("blobs", "cache"):
            values[f"{name}_mib"] = _bytes_below(folder / name) / MIB
        values["database_mib"] = sum(file.stat().st_size for file in folder.glob("loramux.sqlite3*")) / MIB
        values["log_mib"] = self._workspace.log.stat().st_size / MIB
        found = metrics_of(self._workspace.url)
        values |= {name: found[name] for name in GAUGES}
        values |= {name: counts.get(name, 0) for name in ("answered", "checked", "left", "gone")}
        values["changes"] = sum(count for name, count in counts.items() if name.startswith("change: "))
        self.samples.append(values)
        with (self.out / "samples.csv").open("w" if len(self.samples) == 1 else "a", newline="") as file:
            writer = csv.DictWriter(file, values)
            if len(self.samples) == 1:
                writer.writeheader()
            writer.writerow({name: f"{value:.6g}" for name, value in values.items()})

    def _processes(self) -> dict[str, float]:
        """Return memory, descriptors and threads of the server and of its engine, and the number of all processes."""
        children = self._server.children(recursive=True)
        engine = next(one for one in children if any("spawn_main" in part for part in one.cmdline()))
        values = {"processes": 1.0 + len(children)}
        for name, process in (("server", self._server), ("engine", engine)):
            with process.oneshot():
                values[f"{name}_mib"] = process.memory_info().rss / MIB
                values[f"{name}_files"] = process.num_fds()
                values[f"{name}_threads"] = process.num_threads()
                times = process.cpu_times()
                values[f"{name}_cpu_s"] = times.user + times.system
        return values


def metrics_of(url: str) -> dict[str, float]:
    """Return every sample of /metrics, summed over its labels."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            sums[one.name] += one.value  # type: ignore[assignment]
    return dict(sums)


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files below a folder; a file may be deleted at the same time."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += 0 if file.is_dir() else file.stat().st_size
        except FileNotFoundError:
            continue
    return total


def growth(samples: Sequence[Mapping[str, float]], name: str) -> tuple[float, float]:
    """Return the medians of a series in the second and in the last quarter of a run."""
    quarter = max(1, len(samples) // 4)
    return (
        median(one[name] for one in samples[quarter : 2 * quarter]),
        median(one[name] for one in samples[-quarter:]),
    )


def grown(samples: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence for each series that grew beyond its bound."""
    found = []
    for name, bound in FLAT.items():
        before, after = growth(samples, name)
        if after > before * (1 + bound.share) + bound.beside:
            found.append(f"{name} grew from {before:.6g} to {after:.6g}")
    return found


def summary_of(watch: Watch, soaked: Any, at_rest: Mapping[str, float], ledger_entries: int) -> dict[str, Any]:
    """Return the verdict with its figures, write it, and draw the samples."""
    last = watch.samples[-1]
    faults = [*grown(watch.samples), *(f"{count} x {fault}" for fault, count in soaked.faults.items())]
    if soaked.wrong:
        faults.append(f"{len(soaked.wrong)} wrong answers, such as {soaked.wrong[0]}")
    if soaked.unchecked:
        faults.append(f"{len(soaked.unchecked)} answers of unknown revisions, such as {soaked.unchecked[0]}")
    held = {
        name: at_rest[name]
        for name in ("loramux_engine_pages_kv", "loramux_engine_pages_adapters", "loramux_ledger_drift_tokens")
    }
    faults += [f"{name} is {value:g} at rest" for name, value in held.items() if value]
    summary = {
        "faults": faults,
        "minutes": round(last["seconds"] / 60, 1),
        "requests": {name: soaked.counts[name] for name in ("answered", "checked", "left", "gone")},
        "changes": {name.removeprefix("change: "): n for name, n in soaked.counts.items() if name.startswith("change")},
        "second_and_last_quarter": {name: [round(value, 2) for value in growth(watch.samples, name)] for name in FLAT},
        "database_bytes_per_request": _per_request(watch.samples, "database_mib"),
        "log_bytes_per_request": _per_request(watch.samples, "log_mib"),
        "cpu_share": round((last["server_cpu_s"] + last["engine_cpu_s"]) / last["seconds"], 3),
        "ledger_entries_reconciled": ledger_entries,
    }
    (watch.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(watch.samples, watch.out / "soak.png")
    return summary


def _per_request(samples: Sequence[Mapping[str, float]], name: str) -> int:
    first, last = samples[len(samples) // 4], samples[-1]
    requests = sum(last[key] - first[key] for key in ("answered", "left"))
    return round((last[name] - first[name]) * MIB / max(1, requests))


def draw(samples: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw memory, descriptors and threads, pages, disk, and requests over the minutes; a PNG."""
    figure = Figure(figsize=(11, 13), layout="constrained")
    axes = figure.subplots(5, 1, sharex=True)
    minutes = [one["seconds"] / 60 for one in samples]
    rows: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("resident memory (MiB)", ("server_mib", "engine_mib")),
        ("open files and threads", ("server_files", "engine_files", "server_threads", "engine_threads", "processes")),
        ("pages", tuple(name for name in GAUGES if "_pages_" in name)),
        ("disk (MiB)", ("blobs_mib", "cache_mib", "database_mib", "log_mib")),
        ("requests and changes", ("answered", "left", "gone", "changes")),
    )
    for row, (title, names) in zip(axes, rows, strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            label = name.removeprefix("loramux_engine_").replace("_mib", "").replace("_", " ")
            row.plot(minutes, [one[name] for one in samples], label=label, color=colour, linewidth=1.2)
        row.set_title(title, loc="left", fontsize=10)
        row.set_ylim(bottom=0)
        row.grid(alpha=0.25)
        row.legend(fontsize=8, ncols=3, frameon=False)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=90)
