"""Results as a Markdown table a section, with the machine and the commit that they belong to."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path

import torch

Row = dict[str, str | float | int | None]


@dataclass
class Report:
    """Sections of rows; every section's rows have the same columns."""

    facts: dict[str, str]
    sections: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, section: str, **row: str | float | int | None) -> None:
        """Add a line, and print it immediately."""
        self.sections.setdefault(section, []).append(row)
        print(f"{section}: " + "  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)

    def markdown(self) -> str:
        """The whole report."""
        lines = ["# GPU benchmark", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
        for title, rows in self.sections.items():
            lines += ["", f"## {title}", "", *_table(rows)]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """`results.md` and `results.json` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.md").write_text(self.markdown())
        (folder / "results.json").write_text(json.dumps({"facts": self.facts, "sections": self.sections}, indent=1))


def _table(rows: list[Row]) -> list[str]:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(_shown(row.get(column)) for column in columns) + " |" for row in rows]


def _shown(value: str | float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine_facts(device: torch.device) -> dict[str, str]:
    """The card, the versions and the commit of the figures."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: the figures say nothing"
    return {
        "card": card,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not in a git checkout"


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def geometric_mean(ratios: list[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return exp(sum(map(log, ratios)) / len(ratios))
