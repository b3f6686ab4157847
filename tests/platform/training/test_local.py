"""The trainer that a server starts on its own machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from loramux.training import local
from loramux.training.local import LocalTrainer, watch_busy

pytestmark = pytest.mark.anyio


@dataclass(eq=False)
class Request:
    is_background: bool = False


class Requests:
    """The requests of a server, as far as their observers see them."""

    def __init__(self, *running: Request) -> None:
        self._running = set(running)
        self._observers: list[Callable[[Any], None]] = []
        self.on_begun = self.on_ended = self._observers.append

    @property
    def num_observers(self) -> int:
        return len(self._observers)

    def others_running(self) -> bool:
        return any(not one.is_background for one in self._running)

    def change(self, request: Request) -> None:
        """Begin a request, or end it if it runs."""
        self._running ^= {request}
        for observer in self._observers:
            observer(request)


def trainer_that_notes_its_start(log: Path, then: str, *running: Request) -> LocalTrainer:
    source = f"import sys, time; sys.stdin.readline(); open({str(log)!r}, 'a').write('x'); {then}"
    return LocalTrainer((sys.executable, "-c", source), b"{}", cast(Any, Requests(*running)))


async def test_trainer_that_fails_at_its_start_is_not_started_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "starts"
    trainer = trainer_that_notes_its_start(log, "sys.exit(1)")
    for _ in range(3):
        await trainer.ensure_runs()
        assert trainer.process is not None
        await trainer.process.wait()
    assert log.read_text() == "x"
    monkeypatch.setattr(local, "RESTART_SECONDS", 0.0)
    await trainer.ensure_runs()
    await trainer.process.wait()
    assert log.read_text() == "xx"


async def test_running_trainer_is_not_started_again_and_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTART_SECONDS", 0.0)
    trainer = trainer_that_notes_its_start(tmp_path / "starts", "time.sleep(600)")
    await trainer.ensure_runs()
    first = trainer.process
    await trainer.ensure_runs()
    assert trainer.process is first
    await trainer.stop()
    assert first is not None
    assert first.returncode is not None


async def test_trainer_is_in_the_servers_session_and_not_in_its_process_group(tmp_path: Path) -> None:
    """Linux divides processors between sessions before it looks at priorities; Ctrl-C ends a process group."""
    trainer = trainer_that_notes_its_start(tmp_path / "starts", "time.sleep(600)")
    await trainer.ensure_runs()
    assert trainer.process is not None
    pid = trainer.process.pid
    assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)
    await trainer.stop()


async def test_trainer_is_told_if_requests_run_at_its_start_and_at_every_change(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    trainer = trainer_that_notes_its_start(log, f"open({str(log)!r}, 'a').write(sys.stdin.read(4))")
    trainer.note_busy(True)
    await trainer.ensure_runs()
    for is_busy in (True, False, False, True, False):
        trainer.note_busy(is_busy)
    assert trainer.process is not None
    await trainer.process.wait()
    assert log.read_text() == "x1010"


async def test_trainer_is_told_that_requests_run_until_the_last_worker_has_none(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    trainer = trainer_that_notes_its_start(log, f"open({str(log)!r}, 'a').write(sys.stdin.read())")
    await trainer.ensure_runs()
    for worker, is_busy in ((2, True), (0, True), (2, False), (1, True), (0, False), (1, False), (0, True), (0, False)):
        trainer.note_busy(is_busy, worker)
    assert trainer.process is not None
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()
    await trainer.process.wait()
    assert log.read_text() == "x01010"


def test_busy_is_noted_at_every_change_and_at_the_start_and_not_for_lines_of_batches() -> None:
    first, second, line = Request(), Request(), Request(is_background=True)
    requests, notes = Requests(first), list[bool]()
    watch_busy(cast(Any, requests), notes.append)
    assert notes == [True]
    for one in (second, first, line, second, line, first):
        requests.change(one)
    assert notes == [True, False, True]
    idle = list[bool]()
    watch_busy(cast(Any, Requests(line)), idle.append)
    assert idle == []


async def test_requests_are_watched_from_the_first_start_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTART_SECONDS", 0.0)
    log, first = tmp_path / "starts", Request()
    trainer = trainer_that_notes_its_start(log, f"open({str(log)!r}, 'a').write(sys.stdin.read(2))", first)
    requests = cast(Requests, trainer._completions)
    assert requests.num_observers == 0
    for _ in range(2):
        await trainer.ensure_runs()
        requests.change(first)
        requests.change(first)
        assert trainer.process is not None
        await trainer.process.wait()
    assert (log.read_text(), requests.num_observers) == ("x10x10", 2)
