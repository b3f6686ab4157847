"""In the sandbox: an adapter of another kind becomes the LoRA that computes the same. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from loramux.validation.files import ConversionJob, ConversionSetup
from loramux.validation.report import Check, Refusal, Report
from loramux_adapters import AdapterRejected, BaseDescription
from loramux_adapters.convert import convert_adapter

CHECK = "conversion"


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """What the fork server calls once."""
    base = msgspec.json.decode(setup, type=ConversionSetup).base
    return lambda job: msgspec.json.encode(convert(msgspec.json.decode(job, type=ConversionJob), base))


def convert(job: ConversionJob, base: BaseDescription) -> Report:
    """What was converted; a refusal is part of it."""
    try:
        conversion = convert_adapter(Path(job.folder), Path(job.into), base, job.limits)
    except AdapterRejected as rejected:
        failed = Check(name=CHECK, outcome="failed", detail=rejected.message)
        refusal = Refusal(code=rejected.code, field=rejected.field, message=rejected.message)
        return Report(checks=(failed,), refusal=refusal)
    assert conversion is not None, "only what is of such a kind is sent here"
    how = (
        f"From {conversion.peft_type}, exactly: the LoRA that adds the same to every weight, of rank "
        f"{conversion.max_rank} at most, in float32."
    )
    return Report(checks=(Check(name=CHECK, outcome="passed"),), converted=how)
