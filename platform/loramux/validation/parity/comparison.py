"""Both comparisons of one adapter, as a report of their own."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.validation.parity.base_copies import check_base_copies
from loramux.validation.parity.checkpoint import float32_bytes
from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux.validation.parity.layers import compare_layers
from loramux.validation.parity.verdict import OUTPUTS_NOT_FINITE, PARITY_FAILED, Fault, NotRun, Verdict
from loramux.validation.parity.whole_model import WholeModel
from loramux.validation.report import Check, Refusal, Report, Warned
from loramux_adapters import AdapterRejected

_SENTENCES = {
    PARITY_FAILED: (
        "What would be served is not what PEFT computes: {}. That is this server's fault, not yours: nothing of it is "
        "served. Please report it to the operator."
    ),
    OUTPUTS_NOT_FINITE: "The weights are finite, and what they compute is not: {}. The training may have diverged.",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One base, ready to compare adapters on."""

    setup: ParitySetup
    whole: WholeModel | None

    @classmethod
    def over(cls, setup: ParitySetup) -> Comparison:
        """Load what is needed."""
        small = float32_bytes(setup.model_dir) <= setup.whole_model_bytes
        return cls(setup, WholeModel.load(setup) if small else None)

    def report(self, job: ParityJob) -> Report:
        """What came of one adapter."""
        try:
            check_base_copies(self.setup, job)
            return self._compare(job)
        except AdapterRejected as rejected:
            failed = Check(name="fits_the_base", outcome="failed", detail=rejected.message)
            refusal = Refusal(code=rejected.code, field=rejected.field, message=rejected.message)
            return Report(checks=(failed,), refusal=refusal)

    def _compare(self, job: ParityJob) -> Report:
        """The layers first, which are cheaper and more sensitive."""
        layers = compare_layers(self.setup, job)
        verdicts = {"parity_of_layers": layers}
        if not (isinstance(layers, Verdict) and layers.fault):
            verdicts["parity_of_tokens"] = (
                self.whole.compare(job) if self.whole else NotRun("the base is too large to be run whole in a check")
            )
        return Report(
            checks=tuple(_check(name, verdict) for name, verdict in verdicts.items()),
            warnings=_warnings(layers),
            refusal=next((_refusal(v.fault) for v in verdicts.values() if isinstance(v, Verdict) and v.fault), None),
        )


def _check(name: str, verdict: Verdict | NotRun) -> Check:
    if isinstance(verdict, NotRun):
        return Check(name=name, outcome="not_run", detail=verdict.reason)
    if verdict.fault is not None:
        return Check(name=name, outcome="failed", detail=verdict.fault.sentence, figures=verdict.figures)
    return Check(name=name, outcome="passed", detail=verdict.method, figures=verdict.figures)


def _refusal(fault: Fault) -> Refusal:
    return Refusal(code=fault.code, field=None, message=_SENTENCES[fault.code].format(fault.sentence))


def _warnings(layers: Verdict | NotRun) -> tuple[Warned, ...]:
    if isinstance(layers, Verdict) and layers.figures.get("largest_contribution") == 0:
        message = "The adapter changes nothing that the base computes: it may have been saved before it was trained."
        return (Warned(code="no_effect", field=None, message=message),)
    return ()
