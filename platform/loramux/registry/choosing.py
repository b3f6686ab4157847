"""Which of an alias's targets a request gets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from loramux.records.reach import Reached


def chosen(targets: Sequence[Reached], caller: str) -> Reached:
    """Always the same one for the same alias, targets, weights and `caller`.

    `caller` falls on one of 2**64 places by a hash that the alias keys, so that callers spread in another way under
    another alias; the places are divided among the targets, in order, by exact integer shares. So when a share grows at
    its neighbour's cost, only the callers of what it gains change over.
    """
    place = hashlib.blake2b(caller.encode(), key=targets[0].key.encode(), digest_size=8)
    ticket = int.from_bytes(place.digest(), "big") * sum(target.weight for target in targets) >> 64
    for target in targets:
        ticket -= target.weight
        if ticket < 0:
            return target
    raise AssertionError("a ticket is less than the sum of the weights")
