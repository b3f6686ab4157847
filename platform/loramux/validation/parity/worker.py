"""The parity stage's process: `prepare` for the fork server."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import msgspec
import torch
import transformers
from peft.tuners.boft import layer as boft
from transformers.utils.logging import disable_progress_bar

from loramux.validation.jobs import ParityJob, ParitySetup
from loramux.validation.parity.comparison import Comparison
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
