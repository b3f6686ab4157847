"""In the sandbox: the files themselves, against the base's description. Imports no torch, so that it is small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loramux.validation.report import Check, Found, Refusal, Report, Warned
from loramux_adapters import AdapterRejected, BaseDescription, Limits
from loramux_adapters.base import LinearShape, ParameterShape, whole_name
from loramux_adapters.config import HARMLESS, parse_document
from loramux_adapters.header import ITEM_BYTES
from loramux_adapters.refusals import is_converted, is_on
from loramux_adapters.validate import CHECKS, Examined, examine_adapter, read_config_file


class FilesSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every upload is held against."""

    base: BaseDescription
    base_names: tuple[str, ...]
    """What the base is called here, to be compared with what adapters say they were trained on."""
    serving: str
    """The dtype that weights are converted to when they are served: F32, F16 or BF16."""


class FilesJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder, by its absolute path."""

    folder: str
    limits: Limits


class ConversionSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What adapters of other kinds are converted for."""

    base: BaseDescription


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder, and an empty one for what it becomes, by their absolute paths."""

    folder: str
    into: str
    limits: Limits


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """What the fork server calls once."""
    served = msgspec.json.decode(setup, type=FilesSetup)
    return lambda job: msgspec.json.encode(examine(msgspec.json.decode(job, type=FilesJob), served))


def examine(job: FilesJob, served: FilesSetup) -> Report:
    """The report on one folder; a refusal is part of it."""
    folder, passed = Path(job.folder), list[str]()
    try:
        if is_converted(parse_document(read_config_file(folder))):
            return Report(checks=(), to_convert=True)
        examined = examine_adapter(folder, served.base, job.limits, served.serving, passed.append)
    except AdapterRejected as rejected:
        failed = Check(name=CHECKS[len(passed)], outcome="failed", detail=rejected.message)
        return Report(
            checks=(*_passed(passed), failed),
            refusal=Refusal(code=rejected.code, field=rejected.field, message=rejected.message),
        )
    document = parse_document(read_config_file(folder))
    return Report(
        checks=_passed(passed),
        found=_found(examined, document, served.base),
        warnings=tuple(_warnings(examined, served)),
    )


def _passed(names: list[str]) -> tuple[Check, ...]:
    return tuple(Check(name=name, outcome="passed") for name in names)


def _found(examined: Examined, document: Mapping[str, Any], base: BaseDescription) -> Found:
    plan, tensors = examined.plan, examined.header.tensors.values()
    modules = dict.fromkeys(whole_name(part.module) for part in plan.parts)
    places: dict[str, LinearShape | ParameterShape] = {**base.modules, **base.parameters}
    version = document.get("peft_version")
    return Found(
        peft_type=document["peft_type"],
        peft_version=version if isinstance(version, str) else None,
        base_model_name_or_path=examined.config.base_model_name_or_path,
        architecture=base.architecture,
        rank=plan.max_rank,
        ranks=dict(sorted(Counter(pair.rank for pair in plan.pairs).items())),
        targets=dict(Counter(module.rpartition(".")[2] for module in modules)),
        layers=len({places[module].layer for module in modules if module in places}),
        tensors=len(tensors),
        parameters=sum((tensor.end - tensor.start) // ITEM_BYTES[tensor.dtype] for tensor in tensors),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors)),
        weights_bytes=examined.header.file_bytes,
        ignored_fields={field: reason for field, reason in HARMLESS.items() if is_on(document.get(field))},
    )


def _warnings(examined: Examined, served: FilesSetup) -> Iterator[Warned]:
    claimed = examined.config.base_model_name_or_path
    if claimed and _last(claimed) not in map(_last, served.base_names):
        yield Warned(
            code="base_name_differs",
            field="base_model_name_or_path",
            message=(
                f"The adapter says it was trained on {claimed[:120]!r}; the base that is served is called "
                f"{' or '.join(served.base_names)}. Its modules fit; only you know whether it is the same base."
            ),
        )
    if any(dtype != served.serving for dtype in (tensor.dtype for tensor in examined.header.tensors.values())):
        yield Warned(
            code="dtype_converted",
            field=None,
            message=f"The weights are converted to {served.serving} when they are served.",
        )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
