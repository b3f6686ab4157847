"""The conversion stage's process: it turns an upload into the LoRA that is served. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from loramux.catalog.validation.checkpoint_files import BaseFiles
from loramux.catalog.validation.jobs import NAMES_CHECK, Check, ConversionJob, ConversionSetup, ValidationReport
from loramux.common.errors import Rejection
from loramux_adapters.base import BaseDescription
from loramux_adapters.convert.conversion import convert_adapter
from loramux_adapters.convert.renaming import rename_adapter
from loramux_adapters.errors import AdapterRejected

CONVERSION_CHECK = "conversion"


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. The fork server calls `prepare` once."""
    served = msgspec.json.decode(setup, type=ConversionSetup)
    files = BaseFiles.of(served.model_dir, served.base, served.quantization)
    return lambda job: msgspec.json.encode(convert(msgspec.json.decode(job, type=ConversionJob), served.base, files))


def convert(job: ConversionJob, base: BaseDescription, files: BaseFiles) -> ValidationReport:
    """Convert or rename the adapter in one folder and return a report. A refusal is part of the report."""
    folder, into, check = Path(job.folder), Path(job.into), NAMES_CHECK
    try:
        renaming = rename_adapter(folder, into, base, job.limits)
        if renaming is not None:
            left_out = f", {renaming.dropped} of parts without text input were left out" if renaming.dropped else ""
            how = (
                f"From other names, exactly: {renaming.renamed} tensors got the names that PEFT 0.21 writes{left_out}."
            )
            return ValidationReport(checks=(Check(name=check, outcome="passed"),), converted=how)
        check = CONVERSION_CHECK
        conversion = convert_adapter(folder, into, base, job.limits, lambda module: files.parameter(f"{module}.weight"))
    except AdapterRejected as rejected:
        failed = Check(name=check, outcome="failed", detail=rejected.message)
        refusal = Rejection(code=rejected.code, field=rejected.field, message=rejected.message)
        return ValidationReport(checks=(failed,), refusal=refusal)
    assert conversion is not None, "only adapters that are not served as they are come here"
    how = (
        f"From {conversion.peft_type}, exactly: the LoRA that adds the same to every weight, of rank "
        f"{conversion.max_rank} at most, in float32."
    )
    return ValidationReport(checks=(Check(name=check, outcome="passed"),), converted=how)
