"""Validation as the registry sees it: a folder goes in, a report comes out, and nothing hostile was read here."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from loramux.settings import Settings
from loramux.validation.protocol import JobLimits
from loramux.validation.report import Report
from loramux.validation.stage import Stage

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription, Limits

ROOM_FOR_HEADERS = 8 << 20
"""Beside an adapter's matrices in its files."""
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Validator:
    """Holds folders against one base model, as it is served. Blocks: call it from a thread."""

    def __init__(self, settings: Settings, base: BaseDescription, dtype: str) -> None:
        """`dtype` is the one that is served, as torch calls it."""
        self._files = _files_stage(settings, base, dtype)
        self._conversion = _conversion_stage(settings, base)
        self._parity = _parity_stage(settings, base) if settings.validation.parity else None

    def examine(self, folder: Path, limits: Limits) -> Report:
        """The report on the adapter in `folder`. Raises SandboxDied where nothing can be checked at present.

        One of another kind is replaced there by the LoRA that computes the same, and that is what the report is on.
        """
        folder = folder.resolve()
        with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as uploaded:
            report = self._files_report(folder, Path(uploaded), limits)
            if report.refusal is not None or self._parity is None:
                return report
            original = folder if report.converted is None else Path(uploaded)
            return report.followed_by(self._parity_report(self._parity, original, folder, limits))

    def close(self) -> None:
        """Stop the warm processes."""
        for stage in (self._files, self._conversion, self._parity):
            if stage is not None:
                stage.close()

    def _files_report(self, folder: Path, aside: Path, limits: Limits) -> Report:
        """On the files as they will be served; those that were converted are put `aside`."""
        from loramux.validation.files import FilesJob

        job = FilesJob(folder=str(folder), limits=limits)
        report = self._files.report(job)
        if not report.to_convert:
            return report
        conversion = self._convert(folder, aside, limits)
        return conversion if conversion.refusal is not None else conversion.followed_by(self._files.report(job))

    def _convert(self, folder: Path, aside: Path, limits: Limits) -> Report:
        from loramux.validation.files import ConversionJob

        with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as into:
            job = ConversionJob(folder=str(folder), into=into, limits=limits)
            report = self._conversion.report(job, limits.max_bytes + ROOM_FOR_HEADERS)
            if report.refusal is None:
                for file in Path(into).iterdir():
                    (folder / file.name).replace(aside / file.name)
                    file.replace(folder / file.name)
        return report

    def _parity_report(self, stage: Stage, uploaded: Path, served: Path, limits: Limits) -> Report:
        from loramux.validation.parity.jobs import ParityJob

        return stage.report(ParityJob(uploaded=str(uploaded), served=str(served), limits=limits))


def _files_stage(settings: Settings, base: BaseDescription, dtype: str) -> Stage:
    from loramux.validation.files import FilesSetup

    names = (settings.model.served_model_name, Path(settings.model.path).name)
    setup = FilesSetup(base=base, base_names=names, serving=SAFETENSORS_NAMES[dtype])
    allowed = settings.validation
    limits = JobLimits(allowed.memory_bytes, allowed.cpu_seconds, allowed.wall_seconds)
    return Stage("files", "loramux.validation.files", setup, limits)


def _conversion_stage(settings: Settings, base: BaseDescription) -> Stage:
    from loramux.validation.files import ConversionSetup

    allowed = settings.validation
    limits = JobLimits(allowed.conversion_memory_bytes, allowed.cpu_seconds, allowed.wall_seconds)
    return Stage("conversion", "loramux.validation.conversion", ConversionSetup(base=base), limits)


def _parity_stage(settings: Settings, base: BaseDescription) -> Stage:
    from loramux.validation.parity.jobs import ParitySetup

    allowed = settings.validation
    setup = ParitySetup(
        model_dir=settings.model.path,
        base=base,
        adapters=settings.adapters,
        memory_bytes=allowed.parity_memory_bytes,
        whole_model_bytes=allowed.parity_model_bytes,
    )
    limits = JobLimits(allowed.parity_memory_bytes, allowed.parity_cpu_seconds, allowed.wall_seconds)
    return Stage("parity", "loramux.validation.parity.worker", setup, limits)
