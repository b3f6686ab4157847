"""One sandbox with what its jobs may use; whatever ends a job becomes a report that says so."""

from __future__ import annotations

import logging

import msgspec

from loramux.validation.protocol import JobLimits
from loramux.validation.report import Check, Refusal, Report
from loramux.validation.sandbox import JobCrashed, JobEnded, JobOutOfMemory, Sandbox

logger = logging.getLogger(__name__)


class Stage:
    """One of the checks that an upload goes through; `module` answers its jobs with reports."""

    def __init__(self, name: str, module: str, setup: msgspec.Struct, limits: JobLimits) -> None:
        self._name = name
        self._sandbox = Sandbox(module, msgspec.json.encode(setup))
        self._limits = limits

    def report(self, job: msgspec.Struct, file_bytes: int = 0) -> Report:
        """What came of one job, which may write files of up to `file_bytes`. Raises SandboxDied."""
        limits = msgspec.structs.replace(self._limits, file_bytes=file_bytes)
        try:
            answer = self._sandbox.run(msgspec.json.encode(job), limits)
        except JobEnded:
            took = f"{limits.cpu_seconds} s of processor time, or {limits.wall_seconds:g} s in all"
            return self._unfinished("validation_timeout", f"took more than {took}, and was stopped")
        except JobOutOfMemory:
            took = f"{limits.memory_bytes} bytes of memory"
            return self._unfinished("validation_out_of_memory", f"took more than {took}, and was stopped")
        except JobCrashed as error:
            logger.error("the %s check of an upload crashed: %s", self._name, error)
            return self._unfinished("validation_failed", "itself failed on these files")
        return msgspec.structs.replace(msgspec.json.decode(answer.result, type=Report), usage=answer.usage)

    def close(self) -> None:
        """Stop the warm process."""
        self._sandbox.close()

    def _unfinished(self, code: str, what: str) -> Report:
        message = (
            f"The {self._name} check {what}; nothing of them is served. If PEFT loads these files, please report it to "
            "the operator."
        )
        check = Check(name=self._name, outcome="failed", detail=message)
        return Report(checks=(check,), refusal=Refusal(code=code, field=None, message=message))
