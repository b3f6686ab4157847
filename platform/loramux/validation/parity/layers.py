"""Sampled layers: PEFT's own modules against ours, on the same inputs and the checkpoint's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import torch
from torch import nn

from loramux.validation.parity.checkpoint import read_linear
from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux.validation.parity.verdict import OUTPUTS_NOT_FINITE, PARITY_FAILED, Fault, NotRun, Verdict, compare_outputs
from loramux_adapters import WEIGHTS_NAME, AdapterPlan, BaseDescription, SafetensorsHeader, plan_adapter, read_header
from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base_weights import BaseWeights, fit_to_base
from loramux_adapters.layout import lay_out
from loramux_adapters.linear import install_linears
from loramux_adapters.matrices import matrices_of
from loramux_adapters.parts import PREFIX
from loramux_adapters.tensors import read_tensor
from loramux_adapters.validate import read_config
from loramux_adapters.weights import AdapterWeights, read_weights
from loramux_kernels import RANK_TILE, Segments

ROWS = 5
BASE_ROWS = 2
"""Behind those of the adapter, which must leave them alone."""
PAGE_TILES = 4


def compare_layers(setup: ParitySetup, job: ParityJob) -> Verdict | NotRun:
    """Compare every adapted linear of the first, the middle and the last layer that the adapter touches."""
    header = read_header(Path(job.served) / WEIGHTS_NAME)
    plan = plan_adapter(read_config(Path(job.served)), header, setup.base, job.limits)
    linears = {name: read_linear(setup.model_dir, name) for name in _sampled(plan, setup.base)}
    found = {name: linear for name, linear in linears.items() if linear is not None}
    if not linears:
        return NotRun("the adapter changes no linear of a layer")
    if not found:
        return NotRun("the checkpoint holds the sampled layers' weights under other names")
    theirs = _peft_outputs(job.uploaded, found)
    if isinstance(theirs, NotRun):
        return theirs
    weights = read_weights(Path(job.served) / WEIGHTS_NAME, _only(found, header), plan.on(found), torch.float32)
    return _verdict(_our_outputs(weights, found), theirs, found)


def _sampled(plan: AdapterPlan, base: BaseDescription) -> list[str]:
    layer_of = {part.module: base.modules[part.module].layer for part in plan.parts if part.module in base.modules}
    layers = sorted({layer for layer in layer_of.values() if layer is not None})
    chosen = {layers[0], layers[len(layers) // 2], layers[-1]} if layers else {None}
    return [module for module, layer in layer_of.items() if layer in chosen]


def _only(names: Iterable[str], header: SafetensorsHeader) -> SafetensorsHeader:
    """Those tensors of a checked header that belong to `names`."""
    stems = tuple(f"{PREFIX}{name}." for name in names)
    return replace(header, tensors={key: info for key, info in header.tensors.items() if key.startswith(stems)})


@torch.inference_mode()
def _peft_outputs(folder: str, linears: Mapping[str, nn.Linear]) -> dict[str, torch.Tensor] | NotRun:
    config = peft.PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    # The embedding and the head are not among these, and which rows an activated one serves is seen in whole prompts.
    for field in ("modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "target_parameters"):
        if hasattr(config, field):
            setattr(config, field, None)
    if config.target_modules == "all-linear":  # which PEFT knows of whole transformers models only
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
    slot = bank.install(fitted, bank.plan_layout(fitted.plan), list(range(num_pages)))
    segments = Segments((0, ROWS), (slot,))
    with bank.serving(segments, bank.beyond_pairs(segments, np.arange(0))):
        return {name: model.get_submodule(name)(_inputs(linear)) for name, linear in linears.items()}


def _verdict(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], linears: Mapping[str, nn.Linear]
) -> Verdict:
    method = f"{len(ours)} linears of sampled layers against PEFT's, in float32"
    base = {name: linear(_inputs(linear)).detach() for name, linear in linears.items()}
    if nowhere := next((name for name, y in theirs.items() if not torch.isfinite(y).all()), None):
        return Verdict(method, {}, Fault(OUTPUTS_NOT_FINITE, f"PEFT's own {nowhere} gives NaN or infinity"))
    apart = {name: compare_outputs(y[:ROWS], theirs[name][:ROWS], base[name][:ROWS]) for name, y in ours.items()}
    worst = max(apart, key=lambda name: apart[name])
    beside = max(compare_outputs(y[ROWS:], base[name][ROWS:], base[name][ROWS:]) for name, y in ours.items())
    contribution = max(float((y - base[name]).abs().max() / base[name].abs().max()) for name, y in theirs.items())
    figures = {
        "linears": float(len(apart)),
        "largest_error": apart[worst],
        "largest_error_of_base_rows": beside,
        "largest_contribution": contribution,
    }
    if apart[worst] <= 1 and beside <= 1:
        return Verdict(method, figures)
    sentence = (
        f"the output of {worst} is {apart[worst]:.3g} times as far from PEFT's as rounding explains, and that of rows "
        f"without an adapter {beside:.3g} times"
    )
    return Verdict(method, figures, Fault(PARITY_FAILED, sentence))


def _inputs(linear: nn.Linear) -> torch.Tensor:
    """float32`[ROWS + BASE_ROWS, in_features]`: the same for every linear of that width."""
    generator = torch.Generator().manual_seed(linear.in_features)
    return torch.randn(ROWS + BASE_ROWS, linear.in_features, generator=generator)


def _copy(linear: nn.Linear) -> nn.Linear:
    """Another module with the same weights, which may be taken apart."""
    copy = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    copy.weight, copy.bias = linear.weight, linear.bias
    return copy


def _skeleton(linears: Mapping[str, nn.Linear]) -> nn.Module:
    """A model that has these linears under their names, and nothing else."""
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
