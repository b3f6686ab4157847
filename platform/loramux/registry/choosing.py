"""Which of an alias's targets a request gets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from loramux.records.reach import Reached

PLACES = 2**64


def chosen(targets: Sequence[Reached], caller: str) -> Reached:
    """Always the same one for the same alias, targets, weights and `caller`.

    The alias keys the hash that gives callers their places, so that they spread in another way under another alias.
    """
    place = hashlib.blake2b(caller.encode(), key=targets[0].key.encode(), digest_size=8)
    return at(targets, int.from_bytes(place.digest(), "big"))


def at(targets: Sequence[Reached], place: int) -> Reached:
    """Whose of the PLACES this is: they are divided among the targets, in order, by exact integer shares.

    So when a share grows at its neighbour's cost, only the callers of what it gains change over.
    """
    ticket = place * sum(target.weight for target in targets) // PLACES
    for target in targets:
        ticket -= target.weight
        if ticket < 0:
            return target
    raise AssertionError("a ticket is less than the sum of the weights")
