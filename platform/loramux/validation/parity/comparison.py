"""The parity stage's process: both comparisons of one adapter, layers and tokens, joined to a report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

import msgspec
import torch
import transformers
from msgspec.structs import replace
from peft.tuners.boft import layer as boft
from transformers.utils.logging import disable_progress_bar

from loramux.errors import Rejection
from loramux.validation.checkpoint_files import BaseFiles
from loramux.validation.jobs import TOKENS_CHECK, Check, ParityJob, ParitySetup, ReportWarning, ValidationReport
from loramux.validation.parity.layers import compare_layers
from loramux.validation.parity.tokens import StreamedModel, WholeModel, compare_answers, prompts_of, task_of
from loramux.validation.parity.verdict import OUTPUTS_NOT_FINITE, PARITY_FAILED, NotRun, ParityFault, Verdict
from loramux_adapters import (
    WEIGHTS_NAME,
    AdapterPlan,
    AdapterRejected,
    SafetensorsHeader,
    inspect_adapter,
    plan_adapter,
    read_header,
)
from loramux_adapters.base import VocabularyShape
from loramux_adapters.base_weights import BaseWeights, LocalMatrix, fit_to_base
from loramux_adapters.components import BaseCopy
from loramux_adapters.plan import read_config
from loramux_adapters.weights import read_weights
from loramux_kernels.native import native_library


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Load PEFT, and the base where it is small enough; return the function that does one job."""
    torch.set_num_threads(1)
    native_library()  # here, because a job may neither compile it nor open its cache
    warnings.simplefilter("ignore")  # advice for training does not belong in a server's log
    transformers.logging.set_verbosity_error()
    disable_progress_bar()
    # PEFT would build a CUDA extension here, for forms of BOFT that are refused. False: there is none.
    boft._FBD_CUDA = False
    comparison = Comparison.over(msgspec.json.decode(setup, type=ParitySetup))
    return lambda job: msgspec.json.encode(comparison.report(msgspec.json.decode(job, type=ParityJob)))


_SENTENCES = {
    PARITY_FAILED: (
        "What would be served is not what PEFT computes: {}. That is this server's fault, not yours: nothing of it is "
        "served. Please report it to the operator."
    ),
    OUTPUTS_NOT_FINITE: "The weights are finite, and what they compute is not: {}. The training may have diverged.",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A base, loaded and ready to compare adapters on."""

    setup: ParitySetup
    files: BaseFiles
    whole: WholeModel | None
    streamed: StreamedModel | None = None
    """Where the serving engine's answers are compared. It has no weights, so that a job's copy costs nothing."""

    @classmethod
    def over(cls, setup: ParitySetup) -> Comparison:
        """Load the base whole if it is small enough; layers are read from the checkpoint job by job."""
        files = BaseFiles.of(setup.model_dir, setup.base, setup.quantization)
        if (size := files.float32_bytes) <= setup.whole_model_bytes:
            return cls(setup, files, WholeModel.load(setup, files))
        is_read_whole = setup.quantization == "none" or not setup.base.parameters  # experts are read as they are
        streams = size <= setup.engine_bytes and is_read_whole
        return cls(setup, files, None, StreamedModel(setup, files) if streams else None)

    def report(self, job: ParityJob) -> ValidationReport:
        """Compare one adapter and report."""
        try:
            if job.answers and self.streamed is not None:
                return self._report({TOKENS_CHECK: compare_answers(self.streamed, self.setup, job)})
            check_base_copies(self.setup, self.files, job)
            return self._compare(job)
        except AdapterRejected as rejected:
            failed = Check(name="fits_the_base", outcome="failed", detail=rejected.message)
            refusal = Rejection(code=rejected.code, field=rejected.field, message=rejected.message)
            return ValidationReport(checks=(failed,), refusal=refusal)

    def _compare(self, job: ParityJob) -> ValidationReport:
        """Compare layers first: they are cheaper and more sensitive."""
        layers = compare_layers(self.setup, self.files, job)
        report = replace(self._report({"parity_of_layers": layers}), warnings=_warnings(layers))
        if report.refusal is not None:
            return report
        if self.whole is not None:
            return report.followed_by(self._report({TOKENS_CHECK: self.whole.compare(job)}))
        if (task := task_of(job)) != "CAUSAL_LM":
            reason = f"the base is too large to be run whole, and an adapter of task type {task} gives no tokens"
            return report.followed_by(self._report({TOKENS_CHECK: NotRun(reason)}))
        plan = inspect_adapter(Path(job.served), self.setup.base, job.limits)
        if self.streamed is not None and plan.num_tokens is None and self.setup.base.vocabulary is not None:
            return replace(report, to_answer=tuple(prompts_of(job, plan, self.setup.base.vocabulary.num_tokens)))
        reason = "the adapter adds tokens to" if self.streamed is not None else "no setting has tokens compared on"
        not_run = NotRun(f"{reason} a base that is too large to be run whole")
        return report.followed_by(self._report({TOKENS_CHECK: not_run}))

    def _report(self, verdicts: Mapping[str, Verdict | NotRun]) -> ValidationReport:
        return ValidationReport(
            checks=tuple(_check(name, verdict, self.files.precision) for name, verdict in verdicts.items()),
            refusal=next((_refusal(v.fault) for v in verdicts.values() if isinstance(v, Verdict) and v.fault), None),
        )


def _check(name: str, verdict: Verdict | NotRun, precision: str) -> Check:
    if isinstance(verdict, NotRun):
        return Check(name=name, outcome="not_run", detail=verdict.reason)
    if verdict.fault is not None:
        return Check(name=name, outcome="failed", detail=verdict.fault.sentence, figures=verdict.figures)
    return Check(name=name, outcome="passed", detail=f"{verdict.method}, {precision}", figures=verdict.figures)


def _refusal(fault: ParityFault) -> Rejection:
    return Rejection(code=fault.code, field=None, message=_SENTENCES[fault.code].format(fault.sentence))


def _warnings(layers: Verdict | NotRun) -> tuple[ReportWarning, ...]:
    if isinstance(layers, Verdict) and layers.figures.get("largest_contribution") == 0:
        message = "The adapter changes nothing that the base computes: it may have been saved before it was trained."
        return (ReportWarning(code="no_effect", field=None, message=message),)
    return ()


def check_base_copies(setup: ParitySetup, files: BaseFiles, job: ParityJob) -> None:
    """Raise AdapterRejected (`base_differs`, `copy_differs`) unless copies in the file equal their originals."""
    path = Path(job.served) / WEIGHTS_NAME
    header = read_header(path)
    plan = plan_adapter(read_config(Path(job.served)), header, setup.base, job.limits)
    _check_repeats(path, plan, header)
    for copy in plan.copies:
        own = _own(setup, files, copy)
        if own is None or copy.key not in header.tensors:
            continue
        only = replaced(header, tensors={copy.key: header.tensors[copy.key]})
        weights = read_weights(path, only, _alone(plan, copy), own.dtype)
        fit_to_base(weights, BaseWeights({}, {copy.module: LocalMatrix(own)}))


def _check_repeats(path: Path, plan: AdapterPlan, header: SafetensorsHeader) -> None:
    for key, original in plan.repeats:
        if key in header.tensors:
            tensors = {name: header.tensors[name] for name in (key, original)}
            rows = tuple(part for part in plan.rows if part.key == original)
            alone = replaced(plan.on(()), rows=rows, copies=(), repeats=((key, original),))
            read_weights(path, replaced(header, tensors=tensors), alone, torch.float32)


def _alone(plan: AdapterPlan, copy: BaseCopy) -> AdapterPlan:
    return replaced(plan.on(()), copies=(copy,), repeats=())


def _own(setup: ParitySetup, files: BaseFiles, copy: BaseCopy) -> torch.Tensor | None:
    """Read the checkpoint's matrix. A tied base may have saved it under either name."""
    vocabulary = setup.base.vocabulary
    assert isinstance(vocabulary, VocabularyShape), "a base without a vocabulary has no copies of it"
    names = (copy.module, vocabulary.embedding, vocabulary.head) if vocabulary.tied else (copy.module,)
    found = (files.parameter(f"{name}.weight") for name in names)
    return next((matrix for matrix in found if matrix is not None), None)
