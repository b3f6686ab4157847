"""The process that decodes images: `prepare` for the sandbox.

An image is a customer's file, and its decoder is native code. Each image is decoded in a separate process, with the
kernel's limits on time and memory, and without rights. Bounds are checked in the image's header before its pixels are
decoded. The checkpoint's own image processor then resizes the image and, if the tower reads patches, cuts it into them,
as in training.
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
from loramux_adapters.families import TowerInput

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are decoded, under Pillow's names."""
ImageFault = Literal[
    "no_base64", "too_large", "unknown_format", "too_many_pixels", "too_many_scans", "animated", "broken", "too_narrow",
    "too_many_tokens",
]  # fmt: skip
SCAN = b"\xff\xda"
"""The marker before a scan of a JPEG; coded pixels never hold it."""
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Maxima of the tokens of an image that Gemma 4's image processor takes."""
MAX_SCANS = 100
"""Scans of a JPEG. Each scan takes a pass over all pixels; encoders write about ten whatever the size."""


class DecodingSetup(msgspec.Struct, frozen=True):
    """The checkpoint whose images are decoded."""

    folder: str
    """Folder with the files of its image processor."""
    tower_reads: TowerInput = "patches"
    patch: int = 0
    """Side of a patch in pixels, if the tower reads pictures; 0: the image processor cuts them into patches."""
    merge: int = 0
    """Patches along an edge of the square that becomes one token of a picture."""


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
    """The grid of an image's patches, or of its picture, as in `ImageInput`, or a fault. The patches are the answer's
    bulk.
    """

    grid: tuple[int, int, int] = (0, 0, 0)
    fault: ImageFault | None = None
    size: tuple[int, int] = (0, 0)
    """Width and height in the file, in pixels; zeros if the header cannot be read."""


class _Refused(Exception):
    def __init__(self, fault: ImageFault, size: tuple[int, int] = (0, 0)) -> None:
        super().__init__(fault)
        self.fault, self.size = fault, size


Resized = tuple[DecodedImage, bytes]
"""The grid of an image and its patches."""
Resize = Callable[[Image.Image, int], Resized]
"""Function of an image and the maximum number of its tokens."""


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. `setup` is a DecodingSetup; the checkpoint's image processor is loaded."""
    # transformers imports torch if it finds it, and says so if not. Pillow's processors need no torch. Its import takes
    # three seconds and 340 MiB.
    sys.modules["torch"] = cast(ModuleType, None)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from transformers import AutoImageProcessor

    chosen = msgspec.json.decode(setup, type=DecodingSetup)
    processor = AutoImageProcessor.from_pretrained(Path(chosen.folder), backend="pil", trust_remote_code=False)
    Image.init()  # import the formats' modules now, because a job cannot open files
    resize: Resize
    match chosen.tower_reads:
        case "patches":
            resize = partial(_patches, processor)
        case "a picture":
            resize = _picture_maker(processor, chosen)
        case "a square":
            resize = partial(_square, processor, chosen)
        case "placed patches":
            resize = partial(_placed_patches, processor)
    return partial(_decode, resize)


def _decode(resize: Resize, message: bytes) -> bytes:
    """Decode the image of a DecodingJob, and return a DecodedImage with patches or a fault."""
    text, file = split_bulk(message)
    job = msgspec.json.decode(text, type=DecodingJob)
    try:
        image = _opened(_file(file) if job.is_base64 else file, job)
        decoded, patches = resize(_upright(image), job.max_tokens)
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


def _patches(processor: Any, image: Image.Image, max_tokens: int) -> Resized:
    """Return the patches before their values are scaled, so that each value is a byte."""
    side = processor.patch_size * processor.merge_size
    size = dict(processor.size)
    size["longest_edge"] = min(size["longest_edge"], max_tokens * side * side)
    size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
    try:
        made = processor(images=[image], size=size, do_rescale=False, do_normalize=False)
    except ValueError:  # the processor refuses an image whose sides differ by more than a factor of 200
        raise _Refused("too_narrow", image.size) from None
    grid = tuple(int(n) for n in made["image_grid_thw"][0])
    return DecodedImage((grid[0], grid[1], grid[2]), size=image.size), _bytes_of(made["pixel_values"])


def _picture_maker(processor: Any, setup: DecodingSetup) -> Resize:
    """Return a function that resizes a picture to whole tokens. One token more follows each of its lines."""
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    side = setup.patch * setup.merge

    def cells_of(image: Image.Image, edges: Any) -> tuple[int, int]:
        """Return the lines and columns of tokens of an image that is resized to at most `edges`."""
        pixels = np.empty((0, image.height, image.width), np.uint8)
        height, width = get_resize_output_image_size(pixels, edges, side, ChannelDimension.FIRST)
        return height // side, width // side

    def resize(image: Image.Image, max_tokens: int) -> Resized:
        size = dict(processor.size)
        lines, columns = cells_of(image, size.get("longest_edge") or (size["height"], size["width"]))
        while lines * (columns + 1) > max_tokens:
            size = {"longest_edge": (max(lines, columns) - 1) * side}
            lines, columns = cells_of(image, size["longest_edge"])
        if not lines * columns:
            raise _Refused("too_narrow", image.size)
        cell = {"height": side, "width": side}
        made = processor(images=[image], size=size, patch_size=cell, do_rescale=False, do_normalize=False)
        grid = (1, lines * setup.merge, columns * setup.merge)
        return DecodedImage(grid, size=image.size), _bytes_of(made["pixel_values"])

    return resize


def _square(processor: Any, setup: DecodingSetup, image: Image.Image, max_tokens: int) -> Resized:
    """Return the picture of the one size that the tower reads, whatever the image's sides are."""
    made = processor(images=[image], do_pan_and_scan=False, do_rescale=False, do_normalize=False)
    pixels = np.asarray(made["pixel_values"])
    lines, columns = (side // setup.patch for side in pixels.shape[-2:])
    if lines * columns > max_tokens * setup.merge**2:
        raise _Refused("too_many_tokens", image.size)
    return DecodedImage((1, lines, columns), size=image.size), _bytes_of(pixels)


def _placed_patches(processor: Any, image: Image.Image, max_tokens: int) -> Resized:
    """Return the patches of an image that is resized to nearly the largest number of tokens."""
    bounds = [count for count in SOFT_TOKENS if count <= min(max_tokens, processor.max_soft_tokens)]
    if not bounds:
        raise _Refused("too_many_tokens", image.size)
    made = processor(images=[image], max_soft_tokens=bounds[-1], do_rescale=False, do_normalize=False)
    places = np.asarray(made["image_position_ids"])[0]
    places = places[places[:, 0] >= 0]  # others pad
    columns, lines = (int(side) + 1 for side in places.max(axis=0))
    patches = np.asarray(made["pixel_values"])[0, : len(places)]
    return DecodedImage((1, lines, columns), size=image.size), _bytes_of(patches)


def _bytes_of(values: Any) -> bytes:
    pixels = np.asarray(values)
    assert ((pixels >= 0) & (pixels <= 255)).all(), "the processor resizes bytes"
    return pixels.astype(np.uint8).tobytes()
