"""Progress of a run on stderr; stdout is for results."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESHES_PER_SECOND = 1
"""Number of refreshes per second. It is low because redrawing a terminal takes processor time from the measured
systems.
"""


def console() -> Console:
    """Return the console on the current stderr."""
    return Console(stderr=True, soft_wrap=True)


def say(line: str) -> None:
    """Print a line of progress."""
    console().print(line, highlight=False, markup=False)


def bar(unit: str) -> Progress:
    """A bar that counts `unit`; silent if stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console(),
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        disable=not console().is_terminal,
    )
