"""Progress of loading: nothing of what is short, a line that moves on a terminal, lines now and then in a log."""

from __future__ import annotations

import io
import logging

import pytest
from adapter_zoo import make_engine
from quantized_zoo import QuantizedZoo

from loramux.engine.execution import checkpoint
from loramux.engine.execution.checkpoint import LoadingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Runs by `step` seconds each time it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == checkpoint.__name__]


def walk(progress: LoadingProgress) -> None:
    with progress:
        assert list(progress.track("weights of 3.0 GB", range(40))) == list(range(40))


def test_log_has_a_line_every_few_seconds_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        walk(LoadingProgress("base", io.StringIO(), Clock(0.5)))
    first, *_, last = found = messages(caplog)
    assert first == "loading base: weights of 3.0 GB, 8%, 2 s"
    assert last == "loaded base in 20.5 s"
    assert len(found) == 2 + (20 - 2) // 5, "every five seconds"


def test_loading_within_two_seconds_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO):
        walk(LoadingProgress("base", stream, Clock(0.04)))
        walk(LoadingProgress.silent())
    assert messages(caplog) == []
    assert stream.getvalue() == ""


def test_terminal_has_one_line_that_moves_and_is_taken_away(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO):
        walk(LoadingProgress("base", stream, Clock(0.5)))
    assert messages(caplog) == ["loaded base in 20.5 s"]
    drawn = stream.getvalue().split("\r\x1b[K")
    assert drawn[1] == "loading base: weights of 3.0 GB, 8%, 2 s"
    assert len(drawn) > 20
    assert drawn[-1] == ""
    assert "\n" not in stream.getvalue()


def fail_half_way(progress: LoadingProgress) -> None:
    with progress:
        for number in progress.track("weights", range(40)):
            assert 1 / (30 - number)


def test_loading_that_fails_takes_its_line_away(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO), pytest.raises(ZeroDivisionError):
        fail_half_way(LoadingProgress("base", stream, Clock(0.5)))
    assert messages(caplog) == []
    assert stream.getvalue().endswith("\r\x1b[K")


def test_ranks_of_a_quantized_base_report_each_stage_once(
    tmp_path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FIRST_AFTER_S", 0.0)
    monkeypatch.setattr(checkpoint, "LOG_EVERY_S", 0.0)
    zoo = QuantizedZoo("llama", tmp_path, (), "awq")
    with caplog.at_level(logging.INFO):
        make_engine(zoo.quantized, tensor_parallel_size=2).close()
    found = messages(caplog)
    for stage in (r"weights of 0.0 GB", "quantized weights", "packing weights"):
        of_stage = [message for message in found if message.startswith(f"loading base: {stage}, ")]
        assert sum(", 0%, " in message for message in of_stage) == 1, stage
        assert len(of_stage) > 1, stage
