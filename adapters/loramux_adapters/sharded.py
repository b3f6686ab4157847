"""One rank's share of an adapter.

A pair on a column-parallel linear is A, and the rows of B of the rank's outputs: `x @ A.T` is computed on every rank,
and nothing is sent. A pair on a row-parallel linear is the columns of A of the rank's inputs, and B: the ranks' results
are parts of the sum that is reduced anyway. S-LoRA (Sheng et al., 2023, section 6) divides B there too, which saves
memory and sends `rank` elements a row more; here no adapter adds a byte to what a step sends.

Parts for the embedding and the head are whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loramux_adapters.components import AdapterPlan, LinearVector, LoraPair, VectorKind
from loramux_adapters.sharding import Sharding, Shares
from loramux_adapters.weights import AdapterWeights, LoraWeights


def shard_plan(plan: AdapterPlan, sharding: Sharding) -> AdapterPlan:
    """Return the plan of a rank's share: all ranks' are alike."""
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
    """Return the indices `shares` of dimension `dim`, contiguous; None: all."""
    if shares is None:
        return tensor
    pieces = [tensor.narrow(dim, share.start, len(share)) for share in shares]
    return torch.cat(pieces, dim=dim) if len(pieces) > 1 else pieces[0].contiguous()


def _columns(name: str, columns: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """Return factors and shifts `[2, n]` of the rank's outputs; of a sum's shifts one rank alone adds them."""
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
