"""The parity stage's process: the serving code must compute the same as PEFT, on the base's own weights.

`compare_layers` always runs: it compares PEFT's own linears with ours, in float32, on the same inputs and the
checkpoint's weights. The comparison uses the adapted linears of three sampled layers. Then a few greedy tokens are
compared (`parity_tokens`). The tokens come from a separate engine if memory can hold the base twice, otherwise from the
serving engine. `ParityComparison` joins both results in a report.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import peft
import torch
import transformers
from msgspec.structs import replace
from peft.tuners.boft import layer as boft
from torch import nn
from transformers.utils.logging import disable_progress_bar

from loramux.catalog.validation.checkpoint_files import BaseFiles
from loramux.catalog.validation.jobs import TOKENS_CHECK, Check, ParityJob, ParitySetup, ReportWarning, ValidationReport
from loramux.catalog.validation.parity_tokens import (
    OUTPUTS_NOT_FINITE,
    PARITY_FAILED,
    NotRun,
    ParityFault,
    StreamedModel,
    Verdict,
    WholeModel,
    compare_answers,
    compare_outputs,
    prompts_of,
    task_of_job,
)
from loramux.common.errors import Rejection
from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base import BaseDescription, VocabularyShape, input_of
from loramux_adapters.base_weights import BaseWeights, LocalMatrix, base_linear, fit_to_base
from loramux_adapters.components import PREFIX, AdapterPlan, BaseCopy
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.families import reads_other_inputs
from loramux_adapters.modules import install_linears
from loramux_adapters.plan import WEIGHTS_NAME, inspect_adapter, plan_adapter, read_config
from loramux_adapters.tower import changed_linears
from loramux_adapters.weights import AdapterWeights, lay_out, matrices_of, read_tensor, read_weights
from loramux_adapters.weights_file import SafetensorsHeader, read_header
from loramux_kernels.native.loader import native_library
from loramux_kernels.tables import RANK_TILE, Segments

ROWS = 5
BASE_ROWS = 2
"""Number of rows after the adapter's rows. The adapter must not change these rows."""
PAGE_TILES = 4
COPIES = 3
"""Number of copies of a linear that are in memory at the same time: as read, in the form of PEFT or the engine, and
packed for serving.
"""

_SENTENCES = {
    PARITY_FAILED: (
        "What would be served is not what PEFT computes: {}. That is this server's fault, not yours: nothing of it is "
        "served. Please report it to the operator."
    ),
    OUTPUTS_NOT_FINITE: "The weights are finite, and what they compute is not: {}. The training may have diverged.",
}


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Load PEFT, and the base if it is small enough. Return the function for one job."""
    torch.set_num_threads(1)
    native_library()  # compiled here, because a job may neither compile it nor open its cache
    warnings.simplefilter("ignore")  # advice for training does not belong in a server's log
    transformers.logging.set_verbosity_error()
    disable_progress_bar()
    # PEFT would build a CUDA extension here, but only forms of BOFT that are refused need it. False: the extension is
    # not available.
    boft._FBD_CUDA = False
    comparison = ParityComparison.over(msgspec.json.decode(setup, type=ParitySetup))
    return lambda job: msgspec.json.encode(comparison.report(msgspec.json.decode(job, type=ParityJob)))


@dataclass(frozen=True, slots=True)
class ParityComparison:
    """A base, loaded and ready to compare adapters on."""

    setup: ParitySetup
    files: BaseFiles
    whole: WholeModel | None
    streamed: StreamedModel | None = None
    """The model with which the serving engine's answers are compared. This model has no weights, so a copy for a job is
    small.
    """

    @classmethod
    def over(cls, setup: ParitySetup) -> ParityComparison:
        """Load the whole base if it is small enough. Each job reads its layers from the checkpoint."""
        files = BaseFiles.of(setup.model_dir, setup.base, setup.quantization)
        if (size := files.float32_bytes) <= setup.whole_model_bytes:
            return cls(setup, files, WholeModel.load(setup, files))
        is_read_whole = setup.quantization == "none" or not setup.base.parameters  # experts are read unchanged
        streams = size <= setup.engine_bytes and is_read_whole
        return cls(setup, files, None, StreamedModel(setup, files) if streams else None)

    def report(self, job: ParityJob) -> ValidationReport:
        """Compare one adapter and report."""
        try:
            if job.answers and self.streamed is not None:
                compared = self._report({TOKENS_CHECK: compare_answers(self.streamed, self.setup, job)})
            else:
                check_base_copies(self.setup, self.files, job)
                compared = self._compare(job)
            plan = inspect_adapter(Path(job.served), self.setup.base, job.limits)
            return _without_images(compared) if plan.changes_tower else compared
        except AdapterRejected as rejected:
            failed = Check(name="fits_the_base", outcome="failed", detail=rejected.message)
            refusal = Rejection(code=rejected.code, field=rejected.field, message=rejected.message)
            return ValidationReport(checks=(failed,), refusal=refusal)

    def _compare(self, job: ParityJob) -> ValidationReport:
        """Compare layers first, because this is cheaper and more sensitive."""
        layers = compare_layers(self.setup, self.files, job)
        report = replace(self._report({"parity_of_layers": layers}), warnings=_warnings(layers))
        if report.refusal is not None:
            return report
        if self.whole is not None:
            return report.followed_by(self._report({TOKENS_CHECK: self.whole.compare(job)}))
        if (task := task_of_job(job, self.setup.base)) != "CAUSAL_LM":
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


def _without_images(report: ValidationReport) -> ValidationReport:
    """Say that tokens were compared in prompts without images."""
    checks = (
        replace(check, detail=f"{check.detail}; no prompt has an image")
        if (check.name, check.outcome) == (TOKENS_CHECK, "passed")
        else check
        for check in report.checks
    )
    return replace(report, checks=tuple(checks))


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
        # In the serving dtype too: each load compares in it, and must not refuse what was accepted here.
        for dtype in dict.fromkeys((own.dtype, getattr(torch, setup.serving))):
            matrices = {copy.module: LocalMatrix(own.to(dtype))}
            fit_to_base(read_weights(path, only, _alone(plan, copy), dtype), BaseWeights({}, matrices))


def _check_repeats(path: Path, plan: AdapterPlan, header: SafetensorsHeader) -> None:
    for repeat in plan.repeats:
        if repeat.key in header.tensors:
            tensors = {name: header.tensors[name] for name in (repeat.key, repeat.original)}
            alone = replaced(plan.on(()), copies=(), repeats=(repeat,))
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


class Measured(NamedTuple):
    """Measured numbers of one linear. The first two numbers are in units of the allowed difference."""

    apart: float
    """Distance of PEFT's output from ours, in rows with the adapter."""
    beside: float
    """Distance of our output from the base's, in rows without the adapter."""
    contribution: float
    """The adapter's largest contribution, as a share of the base's largest output."""
    finite: bool


def compare_layers(setup: ParitySetup, files: BaseFiles, job: ParityJob) -> Verdict | NotRun:
    """Compare every adapted linear of the first, the middle and the last layer that the adapter touches. In the part
    that reads images, compare those of its first, middle and last layer too, and all that are in no layer (connectors).

    Memory: only linears that read the same input are held together.
    """
    header = read_header(Path(job.served) / WEIGHTS_NAME)
    plan = plan_adapter(read_config(Path(job.served)), header, setup.base, job.limits)
    sampled = _sampled(plan, setup.base)
    if not sampled:
        return NotRun("the adapter changes no linear of a layer")
    measured: dict[str, Measured] = {}
    for names in _together(sampled):
        linears = {} if _too_large(names, setup) else _read(files, names)
        if not linears:
            continue
        theirs = _peft_outputs(job.uploaded, linears)
        if isinstance(theirs, NotRun):
            return theirs
        only = _only(linears, header)
        own = replaced(plan.on(linears), copies=(), repeats=())
        weights = read_weights(Path(job.served) / WEIGHTS_NAME, only, own, torch.float32)
        measured |= _measured(_our_outputs(weights, linears), theirs, linears)
    if not measured:
        return NotRun(
            "the sampled linears are too large for validation.parity_memory_bytes, or the checkpoint holds them "
            "under other names"
        )
    return _verdict(measured, len(sampled))


def _together(names: Iterable[str]) -> Iterable[list[str]]:
    by_input: dict[tuple[str, str], list[str]] = {}
    for name in names:
        by_input.setdefault(input_of(name), []).append(name)
    return by_input.values()


def _too_large(names: Iterable[str], setup: ParitySetup) -> bool:
    """Return whether COPIES of these linears might exceed the job's memory."""
    shapes = [setup.base.modules[name] for name in names]
    return COPIES * sum(4 * shape.in_features * shape.out_features for shape in shapes) > setup.memory_bytes


def _read(files: BaseFiles, names: Iterable[str]) -> dict[str, nn.Linear]:
    linears = {name: files.linear(name) for name in names}
    return {name: linear for name, linear in linears.items() if linear is not None}


def _sampled(plan: AdapterPlan, base: BaseDescription) -> list[str]:
    changed = [part.module for part in plan.components if part.module in base.modules]
    of_text = {module: base.modules[module].layer for module in changed if not reads_other_inputs(module)}
    of_tower = {module: base.modules[module].layer for module in changed if reads_other_inputs(module)}
    connector = [module for module, layer in of_tower.items() if layer is None]
    return list(dict.fromkeys((*_in_three_layers(of_text), *_in_three_layers(of_tower), *connector)))


def _in_three_layers(layer_of: Mapping[str, int | None]) -> list[str]:
    layers = sorted({layer for layer in layer_of.values() if layer is not None})
    chosen = {layers[0], layers[len(layers) // 2], layers[-1]} if layers else {None}
    return [module for module, layer in layer_of.items() if layer in chosen]


def _only(names: Iterable[str], header: SafetensorsHeader) -> SafetensorsHeader:
    """Keep the tensors of a checked header that belong to `names`."""
    stems = tuple(f"{PREFIX}{name}." for name in names)
    return replaced(header, tensors={key: info for key, info in header.tensors.items() if key.startswith(stems)})


@torch.inference_mode()
def _peft_outputs(folder: str, linears: Mapping[str, nn.Linear]) -> dict[str, torch.Tensor] | NotRun:
    config = peft.PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    # Embedding and head are not among these linears; the start of an activated LoRA is compared in whole prompts.
    for field in ("modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "target_parameters"):
        if hasattr(config, field):
            setattr(config, field, None)
    if config.target_modules == "all-linear":  # PEFT resolves this value only for whole transformers models
        config.target_modules = set(linears)
    path = Path(folder) / WEIGHTS_NAME
    with path.open("rb") as file:
        only = _only(linears, read_header(path)).tensors
        state = {key.removeprefix(PREFIX): read_tensor(file, info).float() for key, info in only.items()}
    try:
        model = peft.inject_adapter_in_model(config, _skeleton(linears)).eval()
    except ValueError as error:
        return NotRun(f"PEFT cannot put this kind of adapter on single layers: {str(error)[:200]}")
    loaded = peft.set_peft_model_state_dict(model, state)
    assert not loaded.unexpected_keys, "every tensor has a place: the plan is exact"
    return {name: model.get_submodule(name)(_inputs(linear)) for name, linear in linears.items()}


@torch.inference_mode()
def _our_outputs(weights: AdapterWeights, linears: Mapping[str, nn.Linear]) -> dict[str, torch.Tensor]:
    if any(map(reads_other_inputs, linears)):
        return _outputs_in_tower(weights, linears)
    sites = {
        name: Site(index, linear.in_features, linear.out_features)
        for index, (name, linear) in enumerate(linears.items())
    }
    widest = max(max(site.in_features, site.out_features) for site in sites.values())
    page = PAGE_TILES * RANK_TILE * widest
    num_pages = lay_out(tuple(matrices_of(weights.plan, None)), page, torch.float32.itemsize).num_pages
    bank = AdapterBank(torch.zeros(num_pages * page), page, sites, weights.plan.max_rank, max_slots=1)
    model = _skeleton(linears)
    fitted = fit_to_base(weights, BaseWeights(install_linears(model, bank), {}))
    slot = bank.install(bank.prepare(fitted), list(range(num_pages)))
    segments = Segments((0, ROWS), (slot,))
    with bank.serving(segments, bank.extras_of(segments, np.arange(0))):
        return {name: model.get_submodule(name)(_inputs(linear)) for name, linear in linears.items()}


def _outputs_in_tower(weights: AdapterWeights, linears: Mapping[str, nn.Linear]) -> dict[str, torch.Tensor]:
    """Return the outputs of linears that read images: each row with the adapter, the base's rows after it."""
    own = {name: base_linear(linear, linear, slice(None)) for name, linear in linears.items()}
    fitted = fit_to_base(weights, BaseWeights(own, {}))
    with changed_linears(linears, fitted):
        changed = {name: linear(_inputs(linear)[:ROWS]) for name, linear in linears.items()}
    return {name: torch.cat((changed[name], linear(_inputs(linear)[ROWS:]))) for name, linear in linears.items()}


@torch.inference_mode()
def _measured(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], linears: Mapping[str, nn.Linear]
) -> dict[str, Measured]:
    measured = {}
    for name, linear in linears.items():
        y, reference, base = ours[name], theirs[name], linear(_inputs(linear))
        measured[name] = Measured(
            apart=compare_outputs(y[:ROWS], reference[:ROWS], base[:ROWS]),
            beside=compare_outputs(y[ROWS:], base[ROWS:], base[ROWS:]),
            contribution=float((reference - base).abs().max() / base.abs().max()),
            finite=bool(torch.isfinite(reference).all()),
        )
    return measured


def _verdict(measured: Mapping[str, Measured], sampled: int) -> Verdict:
    method = f"{len(measured)} of {sampled} linears of sampled layers against PEFT's, in float32"
    if nowhere := next((name for name, one in measured.items() if not one.finite), None):
        return Verdict(method, {}, ParityFault(OUTPUTS_NOT_FINITE, f"PEFT's own {nowhere} gives NaN or infinity"))
    worst = max(measured, key=lambda name: measured[name].apart)
    apart, beside = measured[worst].apart, max(one.beside for one in measured.values())
    figures = {
        "linears": float(len(measured)),
        "largest_error": apart,
        "largest_error_of_base_rows": beside,
        "largest_contribution": max(one.contribution for one in measured.values()),
    }
    if apart <= 1 and beside <= 1:
        return Verdict(method, figures)
    sentence = (
        f"the output of {worst} is {apart:.3g} times as far from PEFT's as rounding explains, and that of rows "
        f"without an adapter {beside:.3g} times"
    )
    return Verdict(method, figures, ParityFault(PARITY_FAILED, sentence))


def _inputs(linear: nn.Linear) -> torch.Tensor:
    """Return float32`[ROWS + BASE_ROWS, in_features]`, equal for every linear of that width."""
    generator = torch.Generator().manual_seed(linear.in_features)
    return torch.randn(ROWS + BASE_ROWS, linear.in_features, generator=generator)


def _copy(linear: nn.Linear) -> nn.Linear:
    """Return a copy that PEFT may change: it changes weights (PiSSA) and loads trained biases."""
    copy = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    copy.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    if linear.bias is not None:
        copy.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return copy


def _skeleton(linears: Mapping[str, nn.Linear]) -> nn.Module:
    """Return a model that has only these linears, under their names."""
    root = nn.Module()
    for name, linear in linears.items():
        parent = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(leaf, _copy(linear))
    return root
