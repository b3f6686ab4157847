"""One rank of tensor parallelism: its collectives, its place in the divided base, and its share of an adapter.

Every rank gets the same bits from a sum, so results computed from it (a router's choice, for example) are the same on
all ranks. A row's sum also depends only on this row. With more than two ranks a ring would add each piece in another
order, which depends on the piece's place in the batch. So the ranks exchange the pieces, and add them up in the order
of the ranks. On GPUs this takes two collectives and several launches instead of one. There a row's result depends on
the batch anyway, so NCCL adds in its own order, unless the sums must be ordered.

The collectives are torch's: gloo for tensors on the host, NCCL for tensors on GPUs. Those of NCCL are launched on the
current stream, and a CUDA graph records them. All ranks must launch the same collectives in the same order.

For a pair on a column-parallel linear, a rank holds A and the rows of B of its outputs. `x @ A.T` is computed on every
rank, and nothing is sent. For a pair on a row-parallel linear, a rank holds the columns of A of its inputs, and B. The
ranks' results are parts of the sum that is reduced anyway. S-LoRA (Sheng et al., 2023, section 6) also divides B in
this case, which saves memory and sends `rank` additional elements per row. In this implementation, adapters add no
bytes to the data that a step sends. Parts for the embedding and the head are whole on every rank.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from loramux_adapters.components import AdapterPlan, LinearVector, LoraPair, VectorKind
from loramux_adapters.sharding import Sharding, Shares
from loramux_adapters.weights import AdapterWeights, LoraWeights

_c10d: Any = torch._C._distributed_c10d
HOST = torch.device("cpu")
NCCL_TIMEOUTS = 2
"""Time-out of a collective of NCCL, in multiples of the time-out of a step: NCCL ends the process, and rank 0 should
first end the engine with a reason."""


class Ranks:
    """One of `size` ranks, whose tensors are on `device`."""

    def __init__(
        self, group: distributed.ProcessGroup, rank: int, size: int, device: torch.device, *, is_ordered: bool = True
    ) -> None:
        """`is_ordered`: add in the order of the ranks."""
        self._group = group
        self.rank = rank
        self.size = size
        self._device = device
        self._is_ordered = is_ordered
        self.bytes_sent = 0
        """Bytes that this rank has sent in collectives, computed as the least that each collective must move. A
        replayed CUDA graph adds nothing."""
        self.num_reductions = 0

    @classmethod
    def join(
        cls,
        meeting: Path,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device = HOST,
        *,
        is_ordered: bool = True,
    ) -> Ranks:
        """Join the group whose ranks all name the file `meeting`. Waits until all ranks have joined.

        On the host, a collective that takes longer than `timeout_s` raises RuntimeError, and so does a collective with
        a dead rank. On a GPU neither stops a recorded collective.
        """
        join = _join_nccl if device.type == "cuda" else _join_gloo
        return cls(join(meeting, rank, size, timeout_s, device), rank, size, device, is_ordered=is_ordered)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the contiguous `x` over the ranks, in place. This sends 2 (size - 1) / size times its bytes."""
        if x.numel() == 0:
            return x
        self.num_reductions += 1
        if self.size <= 2 or not self._is_ordered:  # a + b is b + a
            self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
            _wait(self._group.allreduce([x], _at_once(distributed.AllreduceOptions())))
            return x
        flat = x.view(-1)
        each = -(-flat.numel() // self.size)
        pieces = flat.new_zeros(each * self.size)
        pieces[: flat.numel()] = flat
        received = torch.empty_like(pieces)
        _wait(self._group.alltoall_base(received, pieces, [], [], _at_once(distributed.AllToAllOptions())))
        first, *others = received.view(self.size, each)
        for other in others:
            first = first + other
        options = _at_once(_c10d.AllgatherOptions())
        _wait(self._group._allgather_base(pieces, first.contiguous(), options))
        self.bytes_sent += 2 * (self.size - 1) * first.nbytes
        flat.copy_(pieces[: flat.numel()])
        return x

    def gather_columns(self, y: torch.Tensor) -> torch.Tensor:
        """Return the ranks' `y` `[n, columns]`, joined along the columns, on rank 0; on other ranks `y` itself."""
        if y.numel() == 0:
            return y.new_empty(*y.shape[:-1], y.shape[-1] * self.size) if self.rank == 0 else y
        parts = [torch.empty_like(y) for _ in range(self.size)] if self.rank == 0 else []
        options = _at_once(distributed.GatherOptions())
        options.rootRank = 0
        _wait(self._group.gather([parts] if parts else [], [y.contiguous()], options))
        if self.rank == 0:
            return torch.cat(parts, dim=-1)
        self.bytes_sent += y.nbytes
        return y

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank rank 0's contiguous `x`, in place."""
        options = _at_once(distributed.BroadcastOptions())
        options.rootRank = 0
        _wait(self._group.broadcast([x], options))
        if self.rank == 0:
            self.bytes_sent += x.nbytes
        return x

    def first(self, value: int) -> int:
        """Return rank 0's value. Waits for the device."""
        return self.least(value if self.rank == 0 else sys.maxsize)

    def least(self, value: int) -> int:
        """Return the least of the ranks' values. Waits for the device."""
        options = _at_once(distributed.AllreduceOptions())
        options.reduceOp = distributed.ReduceOp.MIN
        found = torch.tensor([value], dtype=torch.int64, device=self._device)
        _wait(self._group.allreduce([found], options))
        return int(found.item())


def _join_gloo(meeting: Path, rank: int, size: int, timeout_s: float, _device: torch.device) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    store = _c10d.FileStore(str(meeting), size)
    options = gloo._Options()
    # Only the loopback, so that other machines cannot reach this group.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return gloo(store, rank, size, options)


def _join_nccl(meeting: Path, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """Make the group of this process: ranks on GPUs are separate processes."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # as for gloo; data goes through the GPUs' links
    distributed.init_process_group(
        "nccl",
        store=_c10d.FileStore(str(meeting), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=NCCL_TIMEOUTS * timeout_s),
        device_id=device,  # connects now: a graph could not record the connection
    )
    return distributed.group.WORLD


def _at_once(options: Any) -> Any:
    """Have NCCL launch on the current stream instead of another one."""
    options.asyncOp = False
    return options


def _wait(work: distributed.Work | None) -> None:
    """Wait for a collective, if it has not ended or been launched."""
    if work is not None:
        work.wait()


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place in a divided base."""

    sharding: Sharding
    ranks: Ranks


def shard_plan(plan: AdapterPlan, sharding: Sharding) -> AdapterPlan:
    """Return the plan of a rank's share; the plan is the same for all ranks."""
    return replace(
        plan,
        pairs=tuple(_narrow_pair(pair, sharding) for pair in plan.pairs),
        vectors=tuple(_narrow_vector(vector, sharding) for vector in plan.vectors),
    )


def shard_weights(weights: AdapterWeights, sharding: Sharding, rank: int) -> AdapterWeights:
    """Return the share of `rank` in weights that were fitted to the base."""
    return replace(
        weights,
        plan=shard_plan(weights.plan, sharding),
        modules={name: shard_pair(name, pair, sharding, rank) for name, pair in weights.modules.items()},
        columns={name: _columns(name, columns, sharding, rank) for name, columns in weights.columns.items()},
        norms={
            name: take(weight, sharding.outputs(name, rank, weight.shape[1]), 1)
            for name, weight in weights.norms.items()
        },
        inputs={
            name: take(
                inputs, None if sharding.is_vocabulary(name) else sharding.inputs(name, rank, inputs.shape[1]), 1
            )
            for name, inputs in weights.inputs.items()
        },
    )


def shard_pair(name: str, pair: LoraWeights, sharding: Sharding, rank: int) -> LoraWeights:
    """Return the share of `rank` in the pair of module `name`."""
    if sharding.is_vocabulary(name):
        return pair
    outputs = sharding.outputs(name, rank, pair.b.shape[0])
    return LoraWeights(
        take(pair.a, sharding.inputs(name, rank, pair.a.shape[1]), 1), take(pair.b, outputs, 0), pair.scale
    )


def take(tensor: torch.Tensor, shares: Shares | None, dim: int) -> torch.Tensor:
    """Return the indices `shares` of dimension `dim`, contiguous; None: all indices."""
    if shares is None:
        return tensor
    pieces = [tensor.narrow(dim, share.start, len(share)) for share in shares]
    return torch.cat(pieces, dim=dim) if len(pieces) > 1 else pieces[0].contiguous()


def _columns(name: str, columns: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """Return factors and shifts `[2, n]` of the rank's outputs. If the outputs are parts of a sum, only one rank adds
    the shifts."""
    if sharding.is_vocabulary(name):
        return columns
    if rank and sharding.is_row_parallel(name):
        return torch.stack((columns[0], torch.zeros_like(columns[1])))
    return take(columns, sharding.outputs(name, rank, columns.shape[1]), 1)


def _narrow_pair(pair: LoraPair, sharding: Sharding) -> LoraPair:
    if sharding.is_vocabulary(pair.module):
        return pair
    outputs, inputs = sharding.width(pair.module, pair.out_features, pair.in_features)
    return replace(pair, out_features=outputs, in_features=inputs)


def _narrow_vector(vector: LinearVector, sharding: Sharding) -> LinearVector:
    if sharding.is_vocabulary(vector.module):
        return vector
    if vector.kind is VectorKind.INPUT:
        share = sharding.inputs(vector.module, 0, vector.size)
    else:
        share = sharding.outputs(vector.module, 0, vector.size)
    return vector if share is None else replace(vector, size=sum(map(len, share)))
