"""Parts of a tensor-parallel engine that keep the ranks alike: adapters, their fitting to the base, saved KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from loramux.engine.execution.rank_messages import (
    DropAdapter,
    HoldsRows,
    InstallAdapter,
    MergedSquares,
    RankReady,
    RestoreKv,
    SaveKv,
)
from loramux.engine.execution.rank_team import OtherRank, RankTeam
from loramux.engine.memory.host_kv import HostPages
from loramux_adapters.bank import AdapterBank
from loramux_adapters.base import BaseDescription
from loramux_adapters.base_weights import BaseMatrix, BaseWeights, FittedLinear
from loramux_adapters.components import AdapterPlan
from loramux_adapters.layout import AdapterLayout
from loramux_adapters.sharded import shard_pair, shard_plan, shard_weights, take
from loramux_adapters.sharding import Sharding
from loramux_adapters.weights import AdapterWeights, LoraWeights


class RankedBank:
    """The banks of all ranks as one: an adapter is in all of them, in the same slot and the same pages, or in none."""

    def __init__(self, bank: AdapterBank, sharding: Sharding, team: RankTeam) -> None:
        """`bank` is rank 0's."""
        self._bank = bank
        self._sharding = sharding
        self._team = team

    def plan_layout(self, plan: AdapterPlan) -> AdapterLayout:
        """Lay out a rank's share of a validated adapter. Raises AdapterRejected if its rank is too large."""
        return self._bank.plan_layout(shard_plan(plan, self._sharding))

    def fence(self) -> torch.cuda.Event | None:
        """Return the end of all steps that rank 0 has launched so far."""
        return self._bank.fence()

    def install(
        self, weights: AdapterWeights, layout: AdapterLayout, pages: list[int], fence: torch.cuda.Event | None
    ) -> int:
        """Copy each rank's share into `pages` there, and return the slot that serves it."""
        slot = self._bank.install(shard_weights(weights, self._sharding, 0), layout, pages, fence)
        installed: list[OtherRank] = []
        try:
            for other in self._team.others:
                share = shard_weights(weights, self._sharding, other.rank)
                other.ask(InstallAdapter(slot, share, pages))
                installed.append(other)
        except BaseException:
            for other in installed:
                other.ask(DropAdapter(slot))
            self._bank.drop(slot)
            raise
        return slot

    def drop(self, slot: int) -> None:
        """Forget a slot; its pages may be overwritten as soon as this returns."""
        for other in self._team.others:
            other.ask(DropAdapter(slot))
        self._bank.drop(slot)


class RankedHostKv:
    """A `HostKv` whose copies every rank makes of its own share of a page, in the order of the steps."""

    def __init__(self, own: HostPages, team: RankTeam) -> None:
        self._own = own
        self._team = team
        self.num_slots = own.num_slots
        self.seconds_per_page = own.seconds_per_page

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each page to its slot."""
        self._team.tell(SaveKv(list(pages), list(slots)))
        self._own.save(pages, slots)

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy each slot to its page."""
        self._team.tell(RestoreKv(list(slots), list(pages)))
        self._own.restore(slots, pages)


@dataclass(frozen=True, slots=True)
class RankedLinear:
    """A linear whose weights lie on several ranks."""

    name: str
    own: FittedLinear
    bias: torch.Tensor | None
    """`[out_features]` of the whole."""
    out_features: int
    sharding: Sharding
    others: Sequence[OtherRank]

    def merged_squares(self, pair: LoraWeights) -> torch.Tensor:
        """Add up the ranks' parts, or lay them side by side; see FittedLinear."""
        own = self.own.merged_squares(self._share(pair, 0))
        if not (self.sharding.is_row_parallel(self.name) or self.sharding.outputs(self.name, 0, self.out_features)):
            return own
        total = own.new_zeros(self.out_features)
        for rank, part in self._parts(own, pair):
            shares = self.sharding.outputs(self.name, rank, self.out_features)
            if shares is None:
                total += part
            else:
                place_shares(total, shares, part)
        return total

    def _parts(self, own: torch.Tensor, pair: LoraWeights) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, own
        for other in self.others:
            answer = other.ask(MergedSquares(self.name, self._share(pair, other.rank)))
            yield other.rank, answer.to(own.device)

    def _share(self, pair: LoraWeights, rank: int) -> LoraWeights:
        """Return the part of `pair` that fits the rank's own weights; those of the head may be filled up with zeros."""
        if not self.sharding.is_vocabulary(self.name):
            return shard_pair(self.name, pair, self.sharding, rank)
        b = take(pair.b, self.sharding.outputs(self.name, rank, self.out_features), 0)
        rows = self.sharding.length_of(self.name, self.out_features)
        return LoraWeights(pair.a, functional.pad(b, (0, 0, 0, rows - len(b))), pair.scale)


@dataclass(frozen=True, slots=True)
class RankedMatrix:
    """A matrix with a row for each token, of which each rank has as many."""

    name: str
    own: BaseMatrix
    """Rank 0's; the last rank's may be filled up."""
    num_tokens: int
    others: Sequence[OtherRank]

    def __len__(self) -> int:
        return self.num_tokens

    def holds(self, start: int, rows: torch.Tensor) -> bool:
        """Ask each rank about those that are its own."""
        each, stop = len(self.own), start + len(rows)
        for rank in range(len(self.others) + 1):
            first, last = max(start, rank * each), min(stop, (rank + 1) * each)
            if first >= last:
                continue
            part = rows[first - start : last - start].contiguous()
            place = first - rank * each
            found = (
                self.others[rank - 1].ask(HoldsRows(self.name, place, part)) if rank else self.own.holds(place, part)
            )
            if not found:
                return False
        return True


def place_shares(whole: torch.Tensor, shares: Sequence[range], part: torch.Tensor) -> None:
    """Put a rank's `part` `[n]` where its `shares` lie in `whole`; what stands behind them is filling."""
    start = 0
    for share in shares:
        whole[share.start : share.stop] = part[start : start + len(share)]
        start += len(share)


def ranked_weights(
    base: BaseDescription, own: BaseWeights, sharding: Sharding, team: RankTeam, ready: Sequence[RankReady]
) -> BaseWeights:
    """Return the weights of the whole base, of which `own` are rank 0's."""
    dimensions: dict[str, int] = {name: shape.out_features for name, shape in base.modules.items()}
    if base.vocabulary is not None:
        dimensions[base.vocabulary.head] = base.vocabulary.num_tokens
    linears: Mapping[str, FittedLinear] = {
        name: RankedLinear(
            name,
            linear,
            _bias(name, linear, dimensions[name], sharding, ready),
            dimensions[name],
            sharding,
            team.others,
        )
        for name, linear in own.linears.items()
    }
    num_tokens = base.vocabulary.num_tokens if base.vocabulary else 0
    matrices = {name: RankedMatrix(name, matrix, num_tokens, team.others) for name, matrix in own.matrices.items()}
    return BaseWeights(linears, matrices, own.packed_bytes)


def _bias(
    name: str, own: FittedLinear, out_features: int, sharding: Sharding, ready: Sequence[RankReady]
) -> torch.Tensor | None:
    """Join the ranks' biases; that of a sum is rank 0's alone."""
    if own.bias is None:
        return None
    whole = own.bias.new_zeros(out_features)
    for rank, bias in enumerate((own.bias, *(one.biases[name] for one in ready))):
        shares = sharding.outputs(name, rank, out_features)
        if shares is not None:
            place_shares(whole, shares, bias)
        elif rank == 0:
            whole = bias
    return whole
