"""The base's own matrices that PEFT saves beside an adapter of the embedding or the head: are they this base's?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from loramux.validation.parity.checkpoint import read_parameter
from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux_adapters import WEIGHTS_NAME, AdapterPlan, plan_adapter, read_header
from loramux_adapters.base import VocabularyShape
from loramux_adapters.base_weights import BaseWeights, fit_to_base
from loramux_adapters.parts import BaseCopy
from loramux_adapters.validate import read_config
from loramux_adapters.weights import read_weights


def check_base_copies(setup: ParitySetup, job: ParityJob) -> None:
    """Raise AdapterRejected (`base_differs`) unless they are, as loading the adapter would."""
    path = Path(job.served) / WEIGHTS_NAME
    header = read_header(path)
    plan = plan_adapter(read_config(Path(job.served)), header, setup.base, job.limits)
    for copy in plan.copies:
        own = _own(setup, copy)
        if own is None or copy.key not in header.tensors:
            continue
        only = replace(header, tensors={copy.key: header.tensors[copy.key]})
        weights = read_weights(path, only, _alone(plan, copy), own.dtype)
        fit_to_base(weights, BaseWeights({}, {copy.module: own}))


def _alone(plan: AdapterPlan, copy: BaseCopy) -> AdapterPlan:
    return replace(plan.on(()), copies=(copy,))


def _own(setup: ParitySetup, copy: BaseCopy) -> torch.Tensor | None:
    """The checkpoint's; a tied base may have saved it under one of both names."""
    vocabulary = setup.base.vocabulary
    assert isinstance(vocabulary, VocabularyShape), "who has no vocabulary has no copies of it"
    names = (copy.module, vocabulary.embedding, vocabulary.head) if vocabulary.tied else (copy.module,)
    found = (read_parameter(setup.model_dir, f"{name}.weight") for name in names)
    return next((matrix for matrix in found if matrix is not None), None)
