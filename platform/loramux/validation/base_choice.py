"""The choice's process: which of a server's bases an adapter's files are for. Small, because it imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from loramux.errors import Rejection
from loramux.validation.files import claimed_base, examine, is_name_of
from loramux.validation.jobs import ChoiceJob
from loramux.validation.report import Check, ValidationReport

CHECK = "base_model"


def prepare(_: bytes) -> Callable[[bytes], bytes]:
    """Return the function that does one job; the fork server calls this once."""
    return lambda job: msgspec.json.encode(choose(msgspec.json.decode(job, type=ChoiceJob)))


def choose(job: ChoiceJob) -> ValidationReport:
    """Report the one base that the files fit and, where they fit several, that they name; or refuse them.

    An adapter that is converted before it is checked can only be matched by the name that it states.
    """
    claimed, served = claimed_base(Path(job.files.folder)), job.bases
    named = [name for name, setup in served.items() if is_name_of(setup.base_names, claimed)]
    if len(named) == 1:
        return ValidationReport(checks=(), base_model=named[0])
    retired = None if named else next((base for base in job.retired if is_name_of(base.names, claimed)), None)
    if retired is not None:
        return _refused("base_model_retired", retired.message)
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
