"""What the fork server of the parity check runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import msgspec
import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux.validation.report import Check, Report


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """What the fork server calls once: loads PEFT, and the base where it is small enough."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a server's log is not the place for a library's advice to those who train
    transformers.logging.set_verbosity_error()
    disable_progress_bar()
    parity = msgspec.json.decode(setup, type=ParitySetup)
    if find_spec("peft") is None:
        missing = Check(name="parity", outcome="not_run", detail="PEFT is not installed: pip install 'loramux[parity]'")
        return lambda _: msgspec.json.encode(Report(checks=(missing,)))
    from loramux.validation.parity.comparison import Comparison  # needs PEFT

    comparison = Comparison.over(parity)
    return lambda job: msgspec.json.encode(comparison.report(msgspec.json.decode(job, type=ParityJob)))
