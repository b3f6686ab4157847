"""Digests of the beginnings of prompts: they tell a router which engine has cached a beginning, and nothing else.

A digest covers the first 1, 2, 3, 4, 6, 8, 12, ... pages of a prompt, so at least two thirds of a shared beginning are
found. Servers compute the digests, keyed with a secret that engines do not have, and send them with the request. An
engine keeps the digest with the page that ends there, and reports the digests of its most recently used pages.

A digest is never compared across tenants: the tenant is part of the hash, and the identity under which the KV was
computed is part of the reported value. A collision would send a request to an engine without its beginning; the cache
itself compares all token ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from loramux.engine.messages import ImageInput, KvIdentity

DEPTHS = tuple(sorted({1, *(pages << shift for pages in (2, 3) for shift in range(12))}))
"""Numbers of leading pages that have a digest."""
PLACES = {depth: place for place, depth in enumerate(DEPTHS)}
"""Place of a depth's digest in `Request.prefix_digests`."""


FOLDED_DIGITS = 7
"""Hexadecimal digits of an image's digest that fit into 32 bits with a sign."""


def with_image_ids(
    token_ids: Sequence[int], images: Iterable[ImageInput], start: int = 0, digits: int | None = None
) -> list[int]:
    """Return `token_ids`, which begin at position `start` of a prompt, with the id of its image for each placeholder.

    An image's id is a negative number that is made of the first `digits` of its digest. With all digits, equal ids mean
    equal images of equal grids.
    """
    ids = list(token_ids)
    for image in images:
        first, last = max(image.start - start, 0), min(image.start + image.num_tokens - start, len(ids))
        if first < last:
            ids[first:last] = [-1 - int(image.digest[:digits], 16)] * (last - first)
    return ids


def prefix_digests(
    key: bytes, tenant: str, token_ids: Sequence[int], block_size: int, images: Iterable[ImageInput] = ()
) -> tuple[int, ...]:
    """Return the digest of the first `DEPTHS[i]` pages of `token_ids` at place i, for all full pages.

    `key` has at most 64 bytes. Equal digests mean equal tokens of one tenant, and, except for a chance of 1 in 2**28,
    equal images.
    """
    hashed = blake2b(tenant.encode() + b"\0", digest_size=8, key=key)
    num_pages = min(len(token_ids) // block_size, DEPTHS[-1])
    num_tokens = num_pages * block_size
    # `struct` packs a list in a third of the time of `array`.
    tokens = struct.pack(f"<{num_tokens}i", *with_image_ids(token_ids[:num_tokens], images, digits=FOLDED_DIGITS))
    digests, start = [], 0
    for depth in DEPTHS:
        if depth > num_pages:
            break
        end = 4 * depth * block_size
        hashed.update(tokens[start:end])
        digests.append(int.from_bytes(hashed.digest(), "little"))
        start = end
    return tuple(digests)


@lru_cache(maxsize=16_384)
def identity_mask(identity: KvIdentity) -> int:
    """Return the number by which digests of equal tokens differ between two identities: XOR of both masks."""
    return int.from_bytes(blake2b(repr(tuple(identity)).encode(), digest_size=8).digest(), "little")
