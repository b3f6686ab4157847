"""What crosses between a server and its sandboxes, as JSON: never pickles, for what comes back may lie."""

from __future__ import annotations

import msgspec

from loramux.validation.report import Usage

MAX_ANSWER_BYTES = 16 << 20


class JobLimits(msgspec.Struct, frozen=True):
    """What one job's process may use; the kernel holds it to that."""

    memory_bytes: int
    """Beyond what the warm process has."""
    cpu_seconds: int
    wall_seconds: float
    file_bytes: int = 0
    """The largest file that it may write."""


class Job(msgspec.Struct, frozen=True):
    """One thing to do."""

    limits: JobLimits
    payload: msgspec.Raw


class Answer(msgspec.Struct, frozen=True):
    """Exactly one of `result` and `fault`: out_of_memory, or crashed. A process that was ended answers nothing."""

    usage: Usage
    result: msgspec.Raw = msgspec.Raw(b"null")
    fault: str | None = None
    trace: str = ""
    """Where a crash was raised."""
