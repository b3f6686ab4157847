"""The process that decodes images: `prepare` for the sandbox.

An image is a customer's file, and its decoder is native code. Each image is decoded in a separate process, with the
kernel's limits on time and memory, and without rights. Bounds are checked in the image's header before its pixels are
decoded. The checkpoint's own image processor then resizes the image and cuts it into patches, as in training.
"""

from __future__ import annotations

import binascii
import io
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import msgspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from loramux.common.sandbox.sandbox import split_bulk, with_bulk

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are decoded, under Pillow's names."""
ImageFault = Literal[
    "no_base64", "too_large", "unknown_format", "too_many_pixels", "too_many_scans", "animated", "broken", "too_narrow"
]
SCAN = b"\xff\xda"
"""The marker before a scan of a JPEG; coded pixels never hold it."""
MAX_SCANS = 100
"""Scans of a JPEG. Each scan takes a pass over all pixels; encoders write about ten whatever the size."""


class DecodingJob(msgspec.Struct, frozen=True):
    """One image, whose file is the job's bulk."""

    is_base64: bool
    """True if the file is sent as base64."""
    max_bytes: int
    max_pixels: int
    """Maximum number of pixels of the image in its file."""
    max_tokens: int
    """Maximum number of tokens that the image takes in a prompt; a larger image is resized to fewer pixels."""


class DecodedImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grid of an image's patches, as in `ImageInput`, or a fault. The patches are the answer's bulk."""

    grid: tuple[int, int, int] = (0, 0, 0)
    fault: ImageFault | None = None
    size: tuple[int, int] = (0, 0)
    """Width and height in the file, in pixels; zeros if the header cannot be read."""


class _Refused(Exception):
    def __init__(self, fault: ImageFault, size: tuple[int, int] = (0, 0)) -> None:
        super().__init__(fault)
        self.fault, self.size = fault, size


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. `setup` is the folder of the checkpoint, whose image processor is loaded."""
    # transformers imports torch if it finds it, and says so if not. Pillow's processors need no torch. Its import takes
    # three seconds and 340 MiB.
    sys.modules["torch"] = cast(ModuleType, None)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(Path(setup.decode()), backend="pil", trust_remote_code=False)
    Image.init()  # import the formats' modules now, because a job cannot open files
    return partial(_decode, processor)


def _decode(processor: Any, message: bytes) -> bytes:
    """Decode the image of a DecodingJob, and return a DecodedImage with patches or a fault."""
    text, file = split_bulk(message)
    job = msgspec.json.decode(text, type=DecodingJob)
    try:
        image = _opened(_file(file) if job.is_base64 else file, job)
        decoded, patches = _patches(_upright(image), processor, job.max_tokens)
    except _Refused as refused:
        decoded, patches = DecodedImage(fault=refused.fault, size=refused.size), b""
    return with_bulk(msgspec.json.encode(decoded), patches)


def _file(text: bytes) -> bytes:
    try:
        return binascii.a2b_base64(text.decode("ascii"))
    except ValueError:
        raise _Refused("no_base64") from None


def _opened(data: bytes, job: DecodingJob) -> Image.Image:
    """Read the header, and check its facts."""
    if len(data) > job.max_bytes:
        raise _Refused("too_large")
    Image.MAX_IMAGE_PIXELS = None  # the bound below is the server's own
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise _Refused("unknown_format") from None
    except Exception:  # the header may be wrong in any way
        raise _Refused("broken") from None
    if image.width * image.height > job.max_pixels:
        raise _Refused("too_many_pixels", image.size)
    if image.format in ("JPEG", "MPO") and data.count(SCAN) > MAX_SCANS:
        raise _Refused("too_many_scans", image.size)
    # A camera's JPEG may hold a second picture (format MPO); viewers show the first one.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise _Refused("animated", image.size)
    return image


def _upright(image: Image.Image) -> Image.Image:
    """Decode the pixels, and turn them as the camera's note in the file says."""
    try:
        with warnings.catch_warnings(action="ignore"):
            image.load()
            image = ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # the file may be wrong in any way
        raise _Refused("broken", image.size) from None
    if image.mode.startswith("I"):  # Pillow would cut 16 bits off at 255: white
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    return image


def _patches(image: Image.Image, processor: Any, max_tokens: int) -> tuple[DecodedImage, bytes]:
    """Return the grid, and the patches before their values are scaled, so that each value is a byte."""
    side = processor.patch_size * processor.merge_size
    size = dict(processor.size)
    size["longest_edge"] = min(size["longest_edge"], max_tokens * side * side)
    size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
    try:
        made = processor(images=[image], size=size, do_rescale=False, do_normalize=False)
    except ValueError:  # the processor refuses an image whose sides differ by more than a factor of 200
        raise _Refused("too_narrow", image.size) from None
    patches = np.asarray(made["pixel_values"])
    grid = tuple(int(n) for n in made["image_grid_thw"][0])
    assert ((patches >= 0) & (patches <= 255)).all(), "the processor resizes bytes"
    return DecodedImage((grid[0], grid[1], grid[2]), size=image.size), patches.astype(np.uint8).tobytes()
