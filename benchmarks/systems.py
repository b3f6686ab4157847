"""Systems to measure. A system runs workloads one after the other and returns drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec
from loadgen import Plan, Target, at_once, drive_with_bar, in_waves
from machine import Watch
from measurements import Counters, Drive
from peers.serving import Serving, SystemFailed
from specs import Setup
from workloads import Item

WARM_UP_TOKENS = 8

Run = tuple[str, Sequence[Item]]
"""A mode and a workload."""


class System(Protocol):
    """One way to answer requests."""

    @property
    def label(self) -> str:
        """Name of the system in the results."""
        ...

    def modes(self, items: Sequence[Item]) -> tuple[str, ...]:
        """The modes in which the system runs this workload; empty if it cannot run it."""
        ...

    def drives(self, setup: Setup, runs: Sequence[Run]) -> Iterator[Drive]:
        """One drive for each run, in order; the system runs from the first drive to the last."""
        ...


class Server(Protocol):
    """A server that can be started."""

    @property
    def label(self) -> str: ...

    @property
    def serves_adapters(self) -> bool: ...

    @property
    def modes(self) -> tuple[str, ...]: ...

    def serving(self, setup: Setup) -> AbstractContextManager[Serving]: ...

    def counters(self, serving: Serving) -> Counters | None: ...


@dataclass(frozen=True)
class Served:
    """A server, driven over HTTP."""

    server: Server

    @property
    def label(self) -> str:
        """The server's."""
        return self.server.label

    def modes(self, items: Sequence[Item]) -> tuple[str, ...]:
        """The server's modes; empty if the workload has adapters that the server does not support."""
        wants_adapters = any(item.adapter for item in items)
        return self.server.modes if self.server.serves_adapters or not wants_adapters else ()

    def drives(self, setup: Setup, runs: Sequence[Run]) -> Iterator[Drive]:
        """Start, warm up with every adapter of the runs, drive, stop."""
        with self.server.serving(setup) as serving:
            _warm_up(serving.target, [item for _, items in runs for item in items])
            for mode, items in runs:
                yield self._drive(serving, in_waves(items, setup.max_num_seqs) if mode == "static" else at_once(items))

    def _drive(self, serving: Serving, plan: Plan) -> Drive:
        before = self.server.counters(serving)
        with Watch(serving.pid) as watch:
            outcomes, wall_s = drive_with_bar(serving.target, plan)
        return Drive(
            outcomes=outcomes,
            wall_s=wall_s,
            resources=watch.resources,
            start_s=serving.start_s,
            counters=_difference(before, self.server.counters(serving)),
        )


def _warm_up(target: Target, items: Sequence[Item]) -> None:
    """A few tokens from every adapter, so that no run pays for first loads and first calls."""
    one_each = {item.adapter: msgspec.structs.replace(item, max_tokens=WARM_UP_TOKENS) for item in items}
    outcomes, _ = drive_with_bar(target, at_once(list(one_each.values())))
    errors = [o.error for o in outcomes if o.error is not None]
    if errors:
        raise SystemFailed(f"{len(errors)} of {len(outcomes)} warm-up requests failed, the first with {errors[0]}")


def _difference(before: Counters | None, after: Counters | None) -> Counters | None:
    if before is None or after is None:
        return None
    return Counters(
        steps=after.steps - before.steps,
        adapter_bytes_read=after.adapter_bytes_read - before.adapter_bytes_read,
        weight_bytes=after.weight_bytes,
    )
