"""Validation as the registry sees it: a folder goes in, a report comes out, and nothing hostile was read here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from loramux.settings import ValidationSettings
from loramux.validation.protocol import JobLimits
from loramux.validation.report import Check, Refusal, Report, refused
from loramux.validation.sandbox import JobCrashed, JobEnded, JobOutOfMemory, Sandbox

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription, Limits

logger = logging.getLogger(__name__)

ROOM_FOR_HEADERS = 8 << 20
"""Beside an adapter's matrices in its files."""
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Validator:
    """Holds folders against one base model, as it is served. Blocks: call it from a thread."""

    def __init__(
        self, base: BaseDescription, base_names: Sequence[str], dtype: str, settings: ValidationSettings
    ) -> None:
        """`base_names` are what the base is called here; `dtype` is the served model's, as torch calls it."""
        from loramux.validation.files import FilesSetup

        self._settings = settings
        setup = FilesSetup(base=base, base_names=tuple(base_names), serving=SAFETENSORS_NAMES[dtype])
        self._files = Sandbox("loramux.validation.files", msgspec.json.encode(setup))
        self._conversion = Sandbox("loramux.validation.conversion", msgspec.json.encode(base))

    def examine(self, folder: Path, limits: Limits) -> Report:
        """The report on the adapter in `folder`. Raises SandboxDied where nothing can be checked at present.

        One of another kind is replaced there by the LoRA that computes the same, and that is what the report is on.
        """
        report = self._examine_files(folder, limits)
        if not report.to_convert:
            return report
        conversion = self._convert(folder, limits)
        if conversion.refusal is not None:
            return conversion
        report = self._examine_files(folder, limits)
        return msgspec.structs.replace(
            report, checks=(*conversion.checks, *report.checks), converted=conversion.converted
        )

    def _examine_files(self, folder: Path, limits: Limits) -> Report:
        from loramux.validation.files import FilesJob

        job = FilesJob(folder=str(folder.resolve()), limits=limits)
        return self._run(self._files, "files", msgspec.json.encode(job), self._limits)

    def _convert(self, folder: Path, limits: Limits) -> Report:
        from loramux.validation.files import ConversionJob

        with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as into:
            job = ConversionJob(folder=str(folder.resolve()), into=str(Path(into).resolve()), limits=limits)
            usable = msgspec.structs.replace(
                self._limits,
                memory_bytes=self._settings.conversion_memory_bytes,
                file_bytes=limits.max_bytes + ROOM_FOR_HEADERS,
            )
            report = self._run(self._conversion, "conversion", msgspec.json.encode(job), usable)
            if report.refusal is None:
                for file in Path(into).iterdir():
                    file.replace(folder / file.name)
        return report

    def close(self) -> None:
        """Stop the warm processes."""
        self._files.close()
        self._conversion.close()

    @property
    def _limits(self) -> JobLimits:
        settings = self._settings
        return JobLimits(settings.memory_bytes, settings.cpu_seconds, settings.wall_seconds)

    def _run(self, sandbox: Sandbox, name: str, job: bytes, limits: JobLimits) -> Report:
        try:
            answer = sandbox.run(job, limits)
        except JobEnded:
            return _unfinished(
                name,
                "validation_timeout",
                f"The checks took more than {limits.cpu_seconds} s of processor time, or {limits.wall_seconds:g} s "
                "in all, and were stopped",
            )
        except JobOutOfMemory:
            return _unfinished(
                name,
                "validation_out_of_memory",
                f"The checks took more than {limits.memory_bytes} bytes of memory, and were stopped",
            )
        except JobCrashed as error:
            logger.error("a check of an upload crashed: %s", error)
            return _unfinished(name, "validation_failed", "The checks themselves failed on these files")
        report = msgspec.json.decode(answer.result, type=Report)
        return msgspec.structs.replace(report, usage=answer.usage)


def _unfinished(name: str, code: str, what: str) -> Report:
    message = f"{what}; nothing was stored. If PEFT loads these files, please report it to the operator."
    check = Check(name=name, outcome="failed", detail=message)
    return refused((check,), Refusal(code=code, field=None, message=message))
