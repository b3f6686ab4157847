"""Requests with images: hostile ones (`KINDS`), and ordinary ones to compare with (`ORDINARY`)."""

from __future__ import annotations

import base64
import itertools
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

MAX_SIDE = 5000
"""Side of a square image with the most pixels that `images.max_pixels` allows."""
FILE_SIDE = 1660
"""Side of a square image of noise whose file has almost the most bytes that `images.max_bytes` allows."""


_numbers = itertools.count()
"""Numbers of images, over all senders."""


@dataclass(frozen=True)
class ImageRequests:
    """Requests of one kind."""

    name: str
    count: int
    """Number of images of a request."""
    file: Callable[[int], bytes]
    """Returns the file of an image, by the image's number."""

    def bodies(self) -> Iterator[bytes]:
        """Yield bodies of POST /v1/chat/completions without end. No image was sent before, unless `file` repeats files:
        the server keeps the results of its vision tower by image.
        """
        while True:
            files = [self.file(next(_numbers)) for _ in range(self.count)]
            urls = (b"data:image/png;base64," + base64.b64encode(file) for file in files)
            parts = b",".join(b'{"type":"image_url","image_url":{"url":"' + url + b'"}}' for url in urls)
            yield b'{"model":"base","max_tokens":1,"messages":[{"role":"user","content":[' + parts + b"]}]}"


def plain(side: int, number: int) -> bytes:
    """Return a square PNG of one colour. Its file is small, whatever its size in pixels."""
    colour = struct.pack(">I", number)[1:]
    return _png(side, 3, _chunk(b"PLTE", colour), _rows(side))


@cache
def noise(number: int) -> bytes:
    """Return one of few square PNGs whose pixels cannot be compressed."""
    rows = random.Random(number).randbytes((3 * FILE_SIDE + 1) * FILE_SIDE)
    whole = bytearray(rows)
    whole[:: 3 * FILE_SIDE + 1] = bytes(FILE_SIDE)  # no filter in any row
    return _png(FILE_SIDE, 2, b"", zlib.compress(whole, 0))


@cache
def _rows(side: int) -> bytes:
    return zlib.compress(bytes((side + 1) * side), 9)


def _png(side: int, colour_type: int, palette: bytes, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", side, side, 8, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + palette + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


KINDS = (
    ImageRequests("largest", 2, partial(plain, MAX_SIDE)),
    ImageRequests("many", 16, partial(plain, 448)),
    ImageRequests("large files", 2, lambda number: noise(number % 4)),
    ImageRequests("too many pixels", 2, partial(plain, MAX_SIDE + 1)),
    ImageRequests("cut off", 2, lambda number: plain(MAX_SIDE, number)[:-40]),
    ImageRequests("too many", 17, partial(plain, 28)),
)
"""The largest images, the most images and the largest files of a request, and images that are refused."""
ORDINARY = ImageRequests("ordinary", 1, partial(plain, 224))
