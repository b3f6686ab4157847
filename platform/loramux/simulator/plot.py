"""A picture of how a simulation went. matplotlib is optional: it comes with the extra `bench`."""

from __future__ import annotations

from pathlib import Path

from loramux.simulator.course import Course
from loramux.simulator.scenario import ScenarioError


def plot_report(course: Course, title: str, path: Path) -> None:
    """Tokens by tenant, requests and the pool over time, as a picture file.

    Raises ScenarioError where matplotlib is missing or the file's kind is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ScenarioError("--plot needs matplotlib: pip install 'loramux[bench]'") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    service, requests, pool = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1])
    seconds = [moment.seconds for moment in course.moments]
    tenants = sorted({tenant for moment in course.moments for tenant in moment.tokens})
    for tenant in tenants:
        service.plot(seconds, [moment.tokens.get(tenant, 0) for moment in course.moments], label=tenant)
    service.set_ylabel("tokens generated")
    service.legend(loc="upper left", fontsize="small")
    requests.plot(seconds, [moment.waiting for moment in course.moments], label="waiting")
    requests.plot(seconds, [moment.running for moment in course.moments], label="running")
    requests.set_ylabel("requests")
    requests.legend(loc="upper left", fontsize="small")
    pool.fill_between(seconds, [100 * moment.pool_use for moment in course.moments], alpha=0.5)
    pool.set_ylabel("pool in use, %")
    pool.set_ylim(0, 100)
    pool.set_xlabel("seconds")
    service.set_title(title)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ScenarioError(f"cannot write the plot {path}: {error}") from None
