"""The engine on the Triton kernels: on a GPU or in Triton's interpreter, as tests/kernels/cuda is run."""

from __future__ import annotations

import os

import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() else ["test_*.py"]
