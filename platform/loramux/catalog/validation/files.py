"""The processes of the files stage and of the choice of a base. Both processes are small, because they do not import
torch.

The files stage checks both files of an adapter against the base's description (`prepare`). If a server has several
bases and an upload names none, the choice uses the same checks to find the base that the files fit (`prepare_choice`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loramux.catalog.validation.jobs import (
    AdapterSummary,
    Check,
    ChoiceJob,
    FilesJob,
    FilesSetup,
    ReportWarning,
    ValidationReport,
)
from loramux.common.errors import Rejection
from loramux_adapters.base import BaseDescription, LinearShape, ParameterShape, parameter_of
from loramux_adapters.config import HARMLESS, OTHER_TOOLS, converted_kind, is_on, parse_document
from loramux_adapters.errors import AdapterRejected, WeightsFileRejected, shown
from loramux_adapters.names import TensorNames
from loramux_adapters.plan import CHECKS, WEIGHTS_NAME, ExaminedAdapter, examine_adapter, read_config_file, task_of
from loramux_adapters.weights_file import ITEM_BYTES, read_header

CHECK = "base_model"


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. The fork server calls `prepare` once."""
    served = msgspec.json.decode(setup, type=FilesSetup)
    return lambda job: msgspec.json.encode(examine(msgspec.json.decode(job, type=FilesJob), served))


def examine(job: FilesJob, served: FilesSetup) -> ValidationReport:
    """Check one folder and return a report. A refusal is part of the report."""
    folder, passed = Path(job.folder), list[str]()
    try:
        if _is_converted_first(folder, served.base):
            return ValidationReport(checks=(), to_convert=True)
        examined = examine_adapter(folder, served.base, job.limits, served.serving, passed.append)
    except AdapterRejected as rejected:
        failed = Check(name=CHECKS[len(passed)], outcome="failed", detail=rejected.message)
        return ValidationReport(
            checks=(*_passed(passed), failed),
            refusal=Rejection(code=rejected.code, field=rejected.field, message=rejected.message),
        )
    document = parse_document(read_config_file(folder))
    return ValidationReport(
        checks=_passed(passed),
        found=_found(examined, document, served.base),
        warnings=tuple(_warnings(examined, served)),
    )


def _is_converted_first(folder: Path, base: BaseDescription) -> bool:
    document = parse_document(read_config_file(folder))
    if converted_kind(document) is not None:
        return True
    if document.get("peft_type") != "LORA":
        return False
    try:
        header = read_header(folder / WEIGHTS_NAME)
    except WeightsFileRejected:
        return False  # the checks report the fault in their order
    return TensorNames(base).are_other(header.tensors)


def _passed(names: list[str]) -> tuple[Check, ...]:
    return tuple(Check(name=name, outcome="passed") for name in names)


def _found(examined: ExaminedAdapter, document: Mapping[str, Any], base: BaseDescription) -> AdapterSummary:
    plan, tensors = examined.plan, examined.header.tensors.values()
    modules = dict.fromkeys(parameter_of(part.module) for part in plan.components)
    places: dict[str, LinearShape | ParameterShape] = {**base.modules, **base.parameters}
    version = document.get("peft_version")
    return AdapterSummary(
        peft_type=document["peft_type"],
        peft_version=version if isinstance(version, str) else None,
        base_model_name_or_path=examined.config.base_model_name_or_path,
        task=task_of(examined.config, base),
        labels=0 if plan.classifier is None else plan.classifier.num_labels,
        architecture=base.architecture,
        rank=plan.max_rank,
        ranks=dict(sorted(Counter(pair.rank for pair in plan.pairs).items())),
        targets=dict(Counter(module.rpartition(".")[2] for module in modules)),
        layers=len({places[module].layer for module in modules if module in places}),
        tensors=len(tensors),
        parameters=sum((tensor.end - tensor.start) // ITEM_BYTES[tensor.dtype] for tensor in tensors),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors)),
        weights_bytes=examined.header.file_bytes,
        tokens=plan.num_tokens or (base.vocab_size if base.vocabulary is None else base.vocabulary.num_tokens),
        ignored_fields={
            field: reason for field, reason in {**HARMLESS, **OTHER_TOOLS}.items() if is_on(document.get(field))
        },
    )


def _warnings(examined: ExaminedAdapter, served: FilesSetup) -> Iterator[ReportWarning]:
    claimed = examined.config.base_model_name_or_path
    if claimed and not is_copy_of(served.base_names, claimed):
        yield ReportWarning(
            code="base_name_differs",
            field="base_model_name_or_path",
            message=(
                f"The adapter says it was trained on {claimed[:120]!r}; the base that is served is called "
                f"{' or '.join(served.base_names)}. Its modules fit; only you know whether it is the same base."
            ),
        )
    if (reason := examined.plan.images_refused) is not None:
        yield ReportWarning(code="images_refused", field=None, message=reason)
    if absent := examined.plan.absent:
        targeted = {part.module for part in examined.plan.components} | set(absent)
        yield ReportWarning(
            code="modules_absent",
            field="target_modules",
            message=(
                f"The file has no tensors for {len(absent)} of the {len(targeted)} modules that the configuration "
                f"targets: {shown(absent)}. They keep the base's result, as in PEFT."
            ),
        )
    if any(dtype != served.serving for dtype in (tensor.dtype for tensor in examined.header.tensors.values())):
        yield ReportWarning(
            code="dtype_converted",
            field=None,
            message=f"The weights are converted to {served.serving} when they are served.",
        )


def claimed_base(folder: Path) -> str | None:
    """Return the base that the adapter's configuration names; None if the configuration cannot be read."""
    try:
        claimed = parse_document(read_config_file(folder)).get("base_model_name_or_path")
    except AdapterRejected:
        return None
    return claimed if isinstance(claimed, str) else None


def is_name_of(names: Iterable[str], claimed: str | None) -> bool:
    """Return whether `claimed` is one of these names of a base, with any folder or organisation before the name."""
    return claimed is not None and _last(claimed) in map(_last, names)


def is_copy_of(names: Iterable[str], claimed: str | None) -> bool:
    """Return whether `claimed` is one of these names, or both name copies of one base that differ in quantization."""
    return claimed is not None and _unquantized(claimed) in map(_unquantized, names)


_CACHED = re.compile(r".*(?:^|/)models--(?:[^/]+?--)?(?P<name>[^/]+)/snapshots/[^/]+")
"""The Hugging Face cache's folder of a model: `models--Qwen--Qwen3-0.6B/snapshots/COMMIT`."""
_QUANTIZED = re.compile(
    r"([-_.](unsloth|bnb|quantized)){0,2}"
    r"([-_.](awq|gptq|gptqmodel|hqq|autoround|dwq|bnb|(int)?[2-8]-?bits?|int[2-8]|[fn]f4|fp[48]|nvfp4(a16)?|mxfp[48]|bf16"
    r"|w[2-8]a(16|8))){1,4}"
    r"([-_.](dynamic|block))?\Z"
)
"""Ends of the names of copies in another format: unsloth trains on its own ones, `Qwen3-8B-unsloth-bnb-4bit` for
Qwen3-8B; others are `-AWQ-INT4`, `-quantized.w4a16`, `-FP8-dynamic`, `-NVFP4`, and gpt-oss-20b-BF16."""


def _last(name: str) -> str:
    path = name.replace("\\", "/").rstrip("/")  # of Windows too
    cached = _CACHED.fullmatch(path)
    last = path.rpartition("/")[2] if cached is None else cached["name"]
    return last.replace("___", ".").lower()  # ModelScope's cache writes Qwen2.5 as Qwen2___5


def _unquantized(name: str) -> str:
    return _QUANTIZED.sub("", _last(name))


def prepare_choice(_: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. The fork server calls `prepare` once."""
    return lambda job: msgspec.json.encode(choose(msgspec.json.decode(job, type=ChoiceJob)))


def choose(job: ChoiceJob) -> ValidationReport:
    """Report the base that the files fit, or refuse the files. If several bases fit, the files' own claim decides.

    An adapter that must be converted before the check can only be matched by the base's name in its files.
    """
    claimed, served = claimed_base(Path(job.files.folder)), job.bases
    named = [name for name, setup in served.items() if is_name_of(setup.base_names, claimed)]
    retired = None if named else next((base for base in job.retired if is_name_of(base.names, claimed)), None)
    if retired is not None:
        return _refused("base_model_retired", retired.message)
    named = named or [name for name, setup in served.items() if is_copy_of(setup.base_names, claimed)]
    if len(named) == 1:
        return ValidationReport(checks=(), base_model=named[0])
    reports = {name: examine(job.files, served[name]) for name in named or served}
    fitting = [name for name, report in reports.items() if report.refusal is None]
    if len(fitting) == 1:
        return ValidationReport(checks=(), base_model=fitting[0])
    if fitting:
        return _refused(
            "base_ambiguous",
            f"The adapter fits more than one base model of this server: {', '.join(fitting)}. Name its own in "
            "'base_model'.",
        )
    reasons = "; ".join(f"{name}: {report.refusal.message}" for name, report in reports.items() if report.refusal)
    return _refused("base_not_found", f"The adapter fits no base model of this server. {reasons}")


def _refused(code: str, message: str) -> ValidationReport:
    check = Check(name=CHECK, outcome="failed", detail=message)
    return ValidationReport(checks=(check,), refusal=Rejection(code=code, field="base_model", message=message))
