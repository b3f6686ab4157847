"""The trainer that a server starts on its own machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loramux.training import local
from loramux.training.local import LocalTrainer

pytestmark = pytest.mark.anyio


def trainer_that_notes_its_start(log: Path, then: str, is_busy: Callable[[], bool] = lambda: False) -> LocalTrainer:
    source = f"import sys, time; sys.stdin.readline(); open({str(log)!r}, 'a').write('x'); {then}"
    return LocalTrainer((sys.executable, "-c", source), b"{}", is_busy)


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
    states = iter((True, True, False, False, True, False))
    then = f"open({str(log)!r}, 'a').write(sys.stdin.read(4))"
    trainer = trainer_that_notes_its_start(log, then, lambda: next(states))
    trainer.note()
    await trainer.ensure_runs()
    for _ in range(5):
        trainer.note()
    assert trainer.process is not None
    await trainer.process.wait()
    assert log.read_text() == "x1010"
