"""The collectives of tensor parallelism: one rank's end of a group, which counts what it sends.

Every rank gets the same bits from a sum, so that what is computed from it on all ranks (a router's choice, say) is the
same on all. And a row's sum depends on nothing but that row: with more than two ranks a ring adds each piece in another
order, by its place in the batch, so the pieces are exchanged and added up in the order of the ranks instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from loramux_adapters.sharding import Sharding


class Ranks:
    """One of `size` ranks."""

    def __init__(self, group: distributed.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        """Bytes that this rank has sent in collectives, by the number of elements that each must move at least."""
        self.num_reductions = 0

    @classmethod
    def join(cls, meeting: Path, rank: int, size: int, timeout_s: float) -> Ranks:
        """Join the group whose ranks all name the file `meeting`; waits until all have.

        A collective that takes longer than `timeout_s` raises RuntimeError, as does one whose other end has died.
        """
        gloo: Any = distributed.ProcessGroupGloo
        store = torch._C._distributed_c10d.FileStore(str(meeting), size)
        options = gloo._Options()
        # The loopback alone: nothing of it can be reached from another machine.
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return cls(gloo(store, rank, size, options), rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over the ranks, in place; it is contiguous. Sends 2 (size - 1) / size of its bytes."""
        if x.numel() == 0:
            return x
        self.num_reductions += 1
        if self.size == 2:  # a + b is b + a
            self.bytes_sent += x.nbytes
            self._group.allreduce([x]).wait()
            return x
        flat = x.view(-1)
        each = -(-flat.numel() // self.size)
        pieces = flat.new_zeros(each * self.size)
        pieces[: flat.numel()] = flat
        received = torch.empty_like(pieces)
        self._group.alltoall_base(received, pieces, [], []).wait()
        first, *others = received.view(self.size, each)
        for other in others:
            first = first + other
        self._group._allgather_base(pieces, first.contiguous()).wait()
        self.bytes_sent += 2 * (self.size - 1) * first.nbytes
        flat.copy_(pieces[: flat.numel()])
        return x

    def gather_columns(self, y: torch.Tensor) -> torch.Tensor:
        """Return the ranks' `y` `[n, columns]` side by side on rank 0; on the others `y` itself."""
        if y.numel() == 0:
            return y.new_empty(*y.shape[:-1], y.shape[-1] * self.size) if self.rank == 0 else y
        parts = [torch.empty_like(y) for _ in range(self.size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [y.contiguous()], options).wait()
        if self.rank == 0:
            return torch.cat(parts, dim=-1)
        self.bytes_sent += y.nbytes
        return y


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place in a divided base."""

    sharding: Sharding
    ranks: Ranks
