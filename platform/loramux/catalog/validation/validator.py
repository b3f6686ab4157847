"""Validation of a folder for the registry, which returns a report. This process parses no uploaded byte."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from loramux.catalog.validation.jobs import (
    NAMES_CHECK,
    TOKENS_CHECK,
    BundleJob,
    BundleSetup,
    Check,
    CheckOutcome,
    ChoiceJob,
    ConversionJob,
    ConversionSetup,
    EngineAnswer,
    FilesJob,
    FilesSetup,
    ParityJob,
    ParitySetup,
    RetiredBase,
    ValidationReport,
)
from loramux.catalog.validation.rendering import TemplateRenderer, try_template
from loramux.common.bundle import MAX_BUNDLE_BYTES, NO_BUNDLE, SOURCES, read_bundle
from loramux.common.errors import Rejection
from loramux.common.sandbox.jail import landlock_abi, may_leave_network
from loramux.common.sandbox.sandbox import (
    JobCrashed,
    JobEnded,
    JobLimits,
    JobOutOfMemory,
    Sandbox,
    SandboxDied,
    SandboxUnusable,
)
from loramux.common.settings.file import Settings
from loramux_adapters.base import BaseDescription
from loramux_adapters.plan import PlanLimits

HEADER_ALLOWANCE = 8 << 20
"""Maximum bytes of those parts of the two files that are not matrices."""
TIMEOUT, OUT_OF_MEMORY = "validation_timeout", "validation_out_of_memory"
UNUSABLE = "validation_impossible"
"""Code of a refusal that a second upload cannot avoid: the operator must change the base's settings."""
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

logger = logging.getLogger(__name__)


class Unanswered(NamedTuple):
    """The reason why the serving engine has not answered, and the refusal if the adapter is the reason."""

    reason: str
    refusal: Rejection | None = None


AskEngine = Callable[[Path, Sequence[list[int]]], tuple[EngineAnswer, ...] | Unanswered]
"""A blocking function that answers the prompts with the adapter in the folder, and then the first prompt without the
adapter.
"""


class Validator:
    """Checks folders against one served base model. The methods of this class block, so call them from a thread."""

    def __init__(
        self, settings: Settings, base: BaseDescription, dtype: str, ask_engine: AskEngine | None = None
    ) -> None:
        """`dtype` is the serving dtype, by torch's name. `ask_engine` gets the answers if a base is too large to be
        copied.
        """
        self.files_setup = _files_setup(settings, base, dtype)
        """The base's description for the files stage."""
        self._files = _Stage("files", "loramux.catalog.validation.files", self.files_setup, _file_limits(settings))
        self._bundle = _bundle_stage(settings)
        self._renderer = TemplateRenderer()
        self._conversion = _conversion_stage(settings, base)
        self._ask_engine = ask_engine
        engine_bytes = settings.validation.parity_engine_bytes if ask_engine else 0
        self._parity = _parity_stage(settings, base, dtype, engine_bytes) if settings.validation.parity else None

    def examine(self, folder: Path, limits: PlanLimits) -> ValidationReport:
        """Report on the adapter in `folder`. Raises SandboxDied if no check can run now.

        An adapter of another kind, or with other names, is replaced in `folder` by an equivalent LoRA, which the report
        describes. The other files of a trainer are replaced by one BUNDLE_FILE, if they contain any setting.
        """
        folder = folder.resolve()
        with _aside(folder) as uploaded:
            report = self._check(folder, uploaded, limits)
            if report.refusal is not None or self._parity is None:
                return report
            is_original = report.converted is None or any(check.name == NAMES_CHECK for check in report.checks)
            original = folder if is_original else uploaded
            job = ParityJob(uploaded=str(original), served=str(folder), limits=limits)
            return report.followed_by(self._compare(self._parity, job))

    def check(self, folder: Path, limits: PlanLimits) -> ValidationReport:
        """Report on the adapter in `folder` as `examine` does, without a comparison with PEFT. Raises SandboxDied."""
        folder = folder.resolve()
        with _aside(folder) as uploaded:
            return self._check(folder, uploaded, limits)

    def compare(self, folder: Path, limits: PlanLimits) -> ValidationReport | None:
        """Compare the outputs of a checked adapter with PEFT's; None if the settings say not to. Raises SandboxDied."""
        if self._parity is None:
            return None
        folder = folder.resolve()
        return self._compare(self._parity, ParityJob(uploaded=str(folder), served=str(folder), limits=limits))

    def close(self) -> None:
        """Stop the warm processes."""
        for stage in (self._files, self._conversion, self._bundle, self._parity):
            if stage is not None:
                stage.close()
        self._renderer.close()

    def _compare(self, parity: _Stage, job: ParityJob) -> ValidationReport:
        """Compare with PEFT. The engine's answers are compared in a second job, which may end without a result."""
        readable = (Path(job.uploaded), Path(job.served))
        report = parity.report(job, readable=readable)
        if not report.to_answer or self._ask_engine is None:
            return report
        answers = self._ask_engine(Path(job.served), report.to_answer)
        report = msgspec.structs.replace(report, to_answer=())
        if isinstance(answers, Unanswered):
            return report.followed_by(_without_tokens(answers.reason, answers.refusal))
        tokens = parity.report(msgspec.structs.replace(job, answers=answers), readable=readable)
        if tokens.refusal is not None and tokens.refusal.code in (TIMEOUT, OUT_OF_MEMORY):
            tokens = msgspec.structs.replace(_without_tokens(tokens.refusal.message), usage=tokens.usage)
        return report.followed_by(tokens)

    def _check(self, folder: Path, aside: Path, limits: PlanLimits) -> ValidationReport:
        report = self._check_files(folder, aside, limits)
        return report if report.refusal is not None else report.followed_by(self._make_bundle(folder, report))

    def _check_files(self, folder: Path, aside: Path, limits: PlanLimits) -> ValidationReport:
        """Report on the files in the form that will be served. The originals of a converted adapter are moved to
        `aside`.
        """
        job = FilesJob(folder=str(folder), limits=limits)
        report = self._files.report(job, readable=(folder,))
        if not report.to_convert:
            return report
        conversion = self._convert(folder, aside, limits)
        if conversion.refusal is not None:
            return conversion
        return conversion.followed_by(self._files.report(job, readable=(folder,)))

    def _make_bundle(self, folder: Path, report: ValidationReport) -> ValidationReport:
        sources = [folder / name for name in SOURCES if (folder / name).exists()]
        found = report.found
        assert found is not None, "the files have passed"
        if not sources and found.task == "CAUSAL_LM":
            return ValidationReport(checks=())
        job = BundleJob(folder=str(folder), num_tokens=found.tokens, task=found.task, num_labels=found.labels)
        made = self._bundle.report(job, writable=(folder,), file_bytes=MAX_BUNDLE_BYTES)
        for source in sources:
            source.unlink()
            if source.parent != folder:
                source.parent.rmdir()
        bundle = read_bundle(folder) if made.refusal is None else NO_BUNDLE
        if bundle.chat_template is None:
            return made
        return made.followed_by(try_template(self._renderer, bundle.chat_template, bundle.special_tokens))

    def _convert(self, folder: Path, aside: Path, limits: PlanLimits) -> ValidationReport:
        with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as into:
            job = ConversionJob(folder=str(folder), into=into, limits=limits)
            largest = limits.max_bytes + HEADER_ALLOWANCE
            report = self._conversion.report(job, readable=(folder,), writable=(Path(into),), file_bytes=largest)
            if report.refusal is None:
                for file in Path(into).iterdir():
                    (folder / file.name).replace(aside / file.name)
                    file.replace(folder / file.name)
        return report


class BaseValidators:
    """The validators of a server's bases, and the choice among them for an upload that names no base.

    Uploads are examined on threads while bases are added and removed, so both mappings are replaced as a whole and
    never changed.
    """

    def __init__(self, settings: Settings, validators: Mapping[str, Validator]) -> None:
        """`validators` by the base's name in requests."""
        _warn_of_what_the_kernel_lacks()
        self._validators = validators
        self._retired: tuple[RetiredBase, ...] = ()
        self._choice = _Stage(
            "base_model", "loramux.catalog.validation.files:prepare_choice", None, _file_limits(settings)
        )

    def put(self, name: str, validator: Validator) -> None:
        """Accept uploads for one more base."""
        self._validators = {**self._validators, name: validator}

    def remove(self, name: str) -> None:
        """Accept no more uploads for a base, and end its processes. Running jobs raise SandboxDied."""
        validator = self._validators[name]
        self._validators = {other: one for other, one in self._validators.items() if other != name}
        validator.close()

    def set_retired(self, bases: Iterable[RetiredBase]) -> None:
        """Refuse uploads whose files name one of these bases."""
        self._retired = tuple(bases)

    def examine(self, folder: Path, limits: PlanLimits, base_model: str | None) -> ValidationReport:
        """Report on the adapter in `folder` and on the base that it was checked against. Raises SandboxDied."""
        return self._report(lambda one: one.examine(folder, limits), folder, limits, base_model)

    def check(self, folder: Path, limits: PlanLimits, base_model: str | None) -> ValidationReport:
        """Report as `examine` does, without a comparison with PEFT. Raises SandboxDied."""
        return self._report(lambda one: one.check(folder, limits), folder, limits, base_model)

    def compare(self, folder: Path, limits: PlanLimits, base_model: str) -> ValidationReport | None:
        """Compare the outputs of a checked adapter with PEFT's; None if the base's settings say not to, or the base was
        unloaded. Raises SandboxDied.
        """
        validator = self._validators.get(base_model)
        return None if validator is None else validator.compare(folder, limits)

    def _report(
        self,
        examine: Callable[[Validator], ValidationReport],
        folder: Path,
        limits: PlanLimits,
        base_model: str | None,
    ) -> ValidationReport:
        validators, retired = self._validators, self._retired
        if base_model is None and len(validators) == 1 and not retired:
            base_model = next(iter(validators))
        if base_model is None:
            folder = folder.resolve()
            bases = {name: one.files_setup for name, one in validators.items()}
            job = ChoiceJob(files=FilesJob(folder=str(folder), limits=limits), bases=bases, retired=retired)
            choice = self._choice.report(job, readable=(folder,))
            if choice.base_model is None:
                return choice
            base_model = choice.base_model
        if base_model not in validators:
            raise SandboxDied(f"the base model {base_model} has been unloaded")
        report = examine(validators[base_model])
        return msgspec.structs.replace(report, base_model=base_model)

    def close(self) -> None:
        """Stop the warm processes."""
        self._choice.close()
        for validator in self._validators.values():
            validator.close()


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`. The originals of converted files are moved there."""
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as name:
        yield Path(name)


def _warn_of_what_the_kernel_lacks() -> None:
    if landlock_abi() == 0:
        logger.warning(
            "the kernel has no Landlock (Linux 5.13, and `landlock` among its security modules): processes that check "
            "uploads and render templates can open every file that the server can. Run the server in a container."
        )
    if not may_leave_network():
        logger.warning(
            "the kernel allows no network namespace: processes that check uploads and render templates run with the "
            "server's network. Run the server where it does (CAP_SYS_ADMIN or user namespaces), or without a route out."
        )


def _without_tokens(reason: str, refusal: Rejection | None = None) -> ValidationReport:
    outcome: CheckOutcome = "not_run" if refusal is None else "failed"
    return ValidationReport(checks=(Check(name=TOKENS_CHECK, outcome=outcome, detail=reason),), refusal=refusal)


class _Stage:
    """One stage: its sandbox, the limits of its jobs, and a report for every end of a job."""

    def __init__(self, name: str, module: str, setup: msgspec.Struct | None, limits: JobLimits) -> None:
        """`module` answers jobs with reports. Without a `setup`, each job contains all information."""
        self._name = name
        self._sandbox = Sandbox(module, b"" if setup is None else msgspec.json.encode(setup))
        self._limits = limits

    def report(
        self,
        job: msgspec.Struct,
        *,
        readable: tuple[Path, ...] = (),
        writable: tuple[Path, ...] = (),
        file_bytes: int = 0,
    ) -> ValidationReport:
        """Run one job, which may write files of up to `file_bytes`, and return its report. Raises SandboxDied."""
        limits = msgspec.structs.replace(
            self._limits,
            file_bytes=file_bytes,
            readable=(*self._limits.readable, *map(str, readable)),
            writable=tuple(map(str, writable)),
        )
        try:
            ended = self._sandbox.run(msgspec.json.encode(job), limits)
        except JobEnded:
            limit = f"{limits.cpu_seconds} s of processor time, or {limits.wall_seconds:g} s in all"
            return self._unfinished(TIMEOUT, f"took more than {limit}, and was stopped")
        except JobOutOfMemory:
            limit = f"{limits.memory_bytes} bytes of memory"
            return self._unfinished(OUT_OF_MEMORY, f"took more than {limit}, and was stopped")
        except SandboxUnusable as error:
            logger.error("the %s check cannot run on this base: %s", self._name, error)
            return self._failed(
                UNUSABLE,
                f"The {self._name} check cannot run with this server's base and settings: {error} The files may be "
                "sound. Report it to the operator, and upload them again after that was changed.",
            )
        except JobCrashed as error:
            logger.error("the %s check of an upload crashed: %s", self._name, error)
            return self._unfinished("validation_failed", "itself failed on these files")
        return msgspec.structs.replace(msgspec.json.decode(ended.value, type=ValidationReport), usage=ended.usage)

    def close(self) -> None:
        """Stop the warm process."""
        self._sandbox.close()

    def _unfinished(self, code: str, reason: str) -> ValidationReport:
        return self._failed(
            code,
            f"The {self._name} check {reason}; the adapter is not served. If PEFT loads these files, please report it "
            "to the operator.",
        )

    def _failed(self, code: str, message: str) -> ValidationReport:
        check = Check(name=self._name, outcome="failed", detail=message)
        return ValidationReport(checks=(check,), refusal=Rejection(code=code, field=None, message=message))


def _files_setup(settings: Settings, base: BaseDescription, dtype: str) -> FilesSetup:
    names = (settings.model.served_model_name, Path(settings.model.path).name)
    return FilesSetup(base=base, base_names=names, serving=SAFETENSORS_NAMES[dtype])


def _file_limits(settings: Settings) -> JobLimits:
    allowed = settings.validation
    return JobLimits(allowed.memory_bytes, allowed.cpu_seconds, allowed.wall_seconds)


def _conversion_stage(settings: Settings, base: BaseDescription) -> _Stage:
    allowed = settings.validation
    setup = ConversionSetup(model_dir=settings.model.path, base=base, quantization=settings.model.quantization)
    limits = JobLimits(
        allowed.conversion_memory_bytes,
        allowed.conversion_cpu_seconds,
        allowed.wall_seconds,
        readable=_model_folders(settings),
    )
    return _Stage("conversion", "loramux.catalog.validation.conversion", setup, limits)


def _bundle_stage(settings: Settings) -> _Stage:
    allowed = settings.validation
    limits = JobLimits(
        allowed.bundle_memory_bytes, allowed.cpu_seconds, allowed.wall_seconds, readable=_model_folders(settings)
    )
    return _Stage("bundle", "loramux.catalog.validation.bundle", BundleSetup(model_dir=settings.model.path), limits)


def _parity_stage(settings: Settings, base: BaseDescription, dtype: str, engine_bytes: int) -> _Stage:
    allowed = settings.validation
    setup = ParitySetup(
        model_dir=settings.model.path,
        base=base,
        adapters=settings.adapters,
        memory_bytes=allowed.parity_memory_bytes,
        whole_model_bytes=allowed.parity_model_bytes,
        engine_bytes=engine_bytes,
        serving=dtype,
        block_size=settings.engine.block_size,
        quantization=settings.model.quantization,
    )
    limits = JobLimits(
        allowed.parity_memory_bytes,
        allowed.parity_cpu_seconds,
        allowed.wall_seconds,
        readable=_model_folders(settings),
    )
    return _Stage("parity", "loramux.catalog.validation.parity", setup, limits)


def _model_folders(settings: Settings) -> tuple[str, ...]:
    """Return the base's folder, and the folders of its files if these are links, as in a hub's cache."""
    folder = Path(settings.model.path).resolve()
    return tuple(sorted({str(folder), *(str(file.resolve().parent) for file in folder.glob("*"))}))
