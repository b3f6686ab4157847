"""Other systems' LoRA kernels, from their own installations, with one interface. The repository contains no code of
these systems.

`--peer vllm=PATH` and `--peer sglang=PATH`: PATH goes on sys.path, so that `import vllm` or `import sglang` works.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from lora_operands import SCALE, LoraOperands, b_of

CHUNK_ROWS = 16
"""SGLang cuts segments to at least so many rows."""


class PeerKernels(Protocol):
    """A system's shrink and expand."""

    def prepare(self, operands: LoraOperands) -> tuple[Callable[[], object], torch.Tensor]:
        """(a call that adds all adapters to the output, the output), everything but the kernels done beforehand."""


class VllmKernels:
    """`lora_shrink` and `lora_expand` of vLLM: all adapters padded to the largest rank."""

    def __init__(self) -> None:
        ops = importlib.import_module("vllm.lora.ops.triton_ops")
        self._shrink, self._expand, self._meta = ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta
        caches = vars(importlib.import_module("vllm.lora.ops.triton_ops.utils"))
        self._remembered = [caches[name] for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT")]

    def prepare(self, operands: LoraOperands) -> tuple[Callable[[], object], torch.Tensor]:
        """Prepare the kernels as vLLM's punica wrapper calls them."""
        # vLLM caches weights by their addresses, and the weights of a new cell may have the address of earlier weights.
        for remembered in self._remembered:
            remembered.clear()
        a, b = padded_weights(operands)
        rows, adapters, sites = len(operands.slots), a.shape[0], a.shape[1]
        device = operands.x.device
        meta = self._meta.make(max_loras=adapters, max_num_tokens=rows, device=device)
        meta.prepare_tensors(torch.tensor(operands.slots, dtype=torch.int32, device=device))
        arguments = _accepted(meta.meta_args, {"token_nums": rows, "specialize_active_lora": True})
        described = meta.meta_args(**arguments)
        down = [a[:, site].contiguous() for site in range(sites)]
        inner = torch.empty(sites, rows, a.shape[2], dtype=torch.float32, device=device)
        y = operands.y.clone()

        def call() -> None:
            self._shrink(operands.x, down, inner.zero_(), *described, SCALE)
            self._expand(inner, b, y, *described, offset_start=0, add_inputs=True)

        return call, y


class SglangKernels:
    """`chunked_sgmv_lora_shrink_forward` and `..._expand_forward` of SGLang."""

    def __init__(self) -> None:
        package = "sglang.kernels.ops.lora.dense"
        self._shrink = importlib.import_module(f"{package}.chunked_sgmv_shrink").chunked_sgmv_lora_shrink_forward
        self._expand = importlib.import_module(f"{package}.chunked_sgmv_expand").chunked_sgmv_lora_expand_forward

    def prepare(self, operands: LoraOperands) -> tuple[Callable[[], object], torch.Tensor]:
        """Prepare the kernels as SGLang's chunked backend calls them."""
        sites, widths, ranks = len(operands.group.sites), operands.group.out_features, operands.ranks
        most, like = max(ranks), operands.x
        # Slices are next to each other at an adapter's own rank, with padding at the end.
        a = like.new_zeros(len(ranks), sites * most, like.shape[1])
        b = like.new_zeros(len(ranks), sum(widths), most)
        for adapter, rank in enumerate(ranks):
            a[adapter, : sites * rank] = operands.a[adapter].flatten(0, 1)
            b[adapter, :, :rank] = torch.cat([b_of(operands.b[adapter], rank, widths, s).T for s in range(sites)])
        batch = chunked_batch(operands)
        offsets = torch.tensor(operands.group.out_starts, dtype=torch.int32, device=like.device)
        y = operands.y.clone()
        shrink = _accepted(self._shrink, {"num_slices": sites})
        expand = _accepted(
            self._expand,
            {"batch_info": batch, "slice_offsets": offsets, "max_slice_size": max(widths), "base_output": y},
        )

        def call() -> None:
            self._expand(self._shrink(like, a, batch, **shrink), b, **expand)

        return call, y


PEERS: dict[str, Callable[[], PeerKernels]] = {"vllm": VllmKernels, "sglang": SglangKernels}


def load_peer(argument: str) -> tuple[str, PeerKernels]:
    """`NAME=PATH` to the peer; raises ValueError for a name that is not known, ImportError if it is not in PATH."""
    name, _, path = argument.partition("=")
    if name not in PEERS or not path:
        raise ValueError(f"--peer {argument!r}: give NAME=PATH with NAME one of {', '.join(PEERS)}")
    sys.path.append(path)
    return name, PEERS[name]()


def padded_weights(operands: LoraOperands) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A `[adapters, sites, most, in]` and, a site, B `[adapters, out, most]`, zeros past each adapter's rank."""
    ranks, widths, like = operands.ranks, operands.group.out_features, operands.x
    a = like.new_zeros(len(ranks), len(widths), max(ranks), like.shape[1])
    b = [like.new_zeros(len(ranks), width, max(ranks)) for width in widths]
    for adapter, rank in enumerate(ranks):
        a[adapter, :, :rank] = operands.a[adapter]
        for site in range(len(widths)):
            b[site][adapter, :, :rank] = b_of(operands.b[adapter], rank, widths, site).T
    return a, b


def chunked_batch(operands: LoraOperands) -> SimpleNamespace:
    """The fields of SGLang's LoRABatchInfo: segments are cut into chunks, and rows keep their places."""
    starts, owners = [0], []
    for slot, first, last in operands.segments.spans:
        for start in range(first, last, CHUNK_ROWS):
            starts.append(min(start + CHUNK_ROWS, last))
            owners.append(slot)

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=operands.x.device)

    return SimpleNamespace(
        bs=len(operands.slots),
        num_segments=len(owners),
        max_len=CHUNK_ROWS,
        use_cuda_graph=False,
        seg_lens=None,
        seg_indptr=ints(starts),
        weight_indices=ints(owners),
        lora_ranks=ints(operands.ranks, torch.int64),
        scalings=torch.full((len(operands.ranks),), SCALE, device=operands.x.device),
        permutation=ints(list(range(len(operands.slots)))),
    )


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that this version of a peer's function takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
