"""The weights file: its safetensors header, which is bounded and checked before a library reads it, and its values.

Format: 8 bytes little-endian header length n, n bytes of JSON, then the tensors' bytes without gaps.
Source: https://github.com/huggingface/safetensors#format; this reader refuses more than the library does.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux_adapters import strict_json
from loramux_adapters.errors import WeightsFileRejected

MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 50_000
"""Maximum number of tensors in a file, enough for a pair on every expert of a large mixture: 48 layers of 128 experts
make 36,864 tensors, in 5 MiB.
"""
MAX_VALUES = 10 * MAX_TENSORS
"""Maximum number of commas and opening brackets in a header; a tensor has eight. Each of them makes a value of about
seventy bytes in memory.
"""
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 512
MAX_SIZE = 1 << 48

ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

_START_BYTES = 512
_ARCHIVES = (b"PK", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!")
_TAR_MAGIC = slice(257, 262)

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_CONVERT = (
    "pickled weights can run code when they are read, so only safetensors is accepted. Load the adapter with PEFT and "
    "call save_pretrained(..., safe_serialization=True)."
)

CHUNK_BYTES = 4 << 20

# Without the sign, floats are ordered as their bits: a value is finite if and only if its bits are below infinity's.
_INFINITY: Mapping[str, tuple[str, int]] = {
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_ROUNDED_TO_INFINITY: Mapping[tuple[str, str], int] = {
    ("F32", "F16"): 0x477F_F000,  # 65,520
    ("F32", "BF16"): 0x7F7F_8000,
    ("BF16", "F16"): 0x4780,  # 65,536
}
"""Smallest bits of a value that rounds to infinity, by (dtype of the file, serving dtype)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `dtype` F32, F16 or BF16, and bytes `[start, end)` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors of a file, in the order of their bytes."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    file_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of `path`; at most MAX_HEADER_BYTES of the file are read.

    Raises WeightsFileRejected: `weights_missing`, `weights_pickled`, `weights_archived`, `weights_truncated`,
    `header_length_invalid`, `header_invalid`, `too_many_tensors`, `dtype_unsupported`.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
            length = _header_length(start, status.st_size)
            data = start[8 : 8 + length] + file.read(max(0, 8 + length - len(start)))
    except FileNotFoundError:
        raise WeightsFileRejected(
            "weights_missing", None, f"There is no file {path.name}. If the weights are in a .bin: {_CONVERT}"
        ) from None
    if len(data) < length:
        raise WeightsFileRejected("weights_truncated", None, "The file ends inside its header; upload it again.")
    return parse_header(data, status.st_size)


def parse_header(data: bytes, file_bytes: int) -> SafetensorsHeader:
    """Check the JSON of the header of a file of `file_bytes`. Raises as read_header does."""
    document = _document(data)
    metadata = _metadata(document.pop("__metadata__", {}))
    if len(document) > MAX_TENSORS:
        raise WeightsFileRejected(
            "too_many_tensors", None, f"The file holds {len(document)} tensors; the maximum is {MAX_TENSORS}."
        )
    first_byte = 8 + len(data)
    tensors = {name: _tensor(name, entry, first_byte) for name, entry in document.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_contiguous(ordered, first_byte, file_bytes)
    return SafetensorsHeader(ordered, metadata, file_bytes)


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the first bytes of a file with these tensors, `(dtype, shape)` by name, in this order and without gaps."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_length(start: bytes, file_bytes: int) -> int:
    length = int.from_bytes(start[:8], "little")
    if start[8:9] != b"{":
        _check_kind(start)
    if len(start) < 8:
        raise WeightsFileRejected(
            "weights_truncated", None, f"The file has {file_bytes} bytes and no header; upload it again."
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise WeightsFileRejected(
            "header_length_invalid",
            None,
            f"The header would be {length} bytes long; 2 to {MAX_HEADER_BYTES} are accepted. Is it a safetensors file?",
        )
    if 8 + length > file_bytes:
        raise WeightsFileRejected(
            "weights_truncated", None, f"The header says {length} bytes, the file has {file_bytes}; upload it again."
        )
    return length


def _check_kind(start: bytes) -> None:
    """Refuse other formats by their first bytes, which cannot be the beginning of a safetensors file."""
    if start[:1] == b"\x80" or (start[:2] == b"PK" and b"data.pkl" in start):
        raise WeightsFileRejected(
            "weights_pickled", None, f"The weights are a pickle (.bin, .pt), not safetensors; {_CONVERT}"
        )
    if start.startswith(_ARCHIVES) or start[_TAR_MAGIC] == b"ustar":
        raise WeightsFileRejected(
            "weights_archived",
            None,
            "The weights are an archive, and nothing is unpacked here: upload the files that are in it, "
            "adapter_config.json and adapter_model.safetensors.",
        )


def _document(data: bytes) -> dict[str, Any]:
    if data[:1] != b"{":
        raise _invalid(None, "it does not start with '{'")
    if (values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise _invalid(None, f"it has {values} values and lists; {MAX_VALUES} are the maximum")
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise _invalid(None, str(error)) from None
    assert isinstance(document, dict)
    return document


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _invalid("__metadata__", "it may hold only strings")
    return value


def _tensor(name: str, entry: Any, first_byte: int) -> TensorInfo:
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise _invalid(
            None,
            f"the name {name[:120]!r} is not dotted parts of letters, digits, '_' and '-' of up to {MAX_NAME_LENGTH} "
            "characters",
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid(name, "a tensor has exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise WeightsFileRejected(
            "dtype_unsupported",
            name,
            f"The tensor {name} has dtype {str(dtype)[:40]!r}; {', '.join(ITEM_BYTES)} are accepted. "
            "Convert it before saving, e.g. with model.to(torch.bfloat16).",
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(name, f"shape is up to {MAX_DIMENSIONS} integers from 0 to 2^48")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _invalid(name, "data_offsets are two integers from 0 to 2^48")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _invalid(name, f"data_offsets span {end - start} bytes, which shape {shape} in {dtype} does not fill")
    return TensorInfo(dtype, tuple(shape), first_byte + start, first_byte + end)


def _are_sizes(value: Any) -> bool:
    # bool is a subclass of int, but true is not a size.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_SIZE for item in value)


def _check_contiguous(ordered: Mapping[str, TensorInfo], first_byte: int, file_bytes: int) -> None:
    position = first_byte
    for name, tensor in ordered.items():
        if tensor.start != position:
            what = "overlaps the one before it" if tensor.start < position else "leaves a gap before it"
            raise _invalid(name, f"its data {what}")
        position = tensor.end
    if position > file_bytes:
        raise WeightsFileRejected(
            "weights_truncated", None, f"The tensors end at byte {position}, the file at {file_bytes}; upload it again."
        )
    if position < file_bytes:
        raise _invalid(None, f"{file_bytes - position} bytes follow the last tensor")


def _invalid(field: str | None, reason: str) -> WeightsFileRejected:
    where = "" if field is None else f" at {field!r}"
    return WeightsFileRejected("header_invalid", field, f"The safetensors header is not valid{where}: {reason}.")


def check_finite(path: Path, header: SafetensorsHeader, serving: str = "F32") -> None:
    """Read every tensor of `path` once, in chunks, and refuse NaN, infinity, and overflow in the `serving` dtype.

    Raises WeightsFileRejected: `weights_not_finite`, `weights_overflow` or `weights_truncated`.
    """
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    with path.open("rb") as file:
        for name, tensor in header.tensors.items():
            largest = _largest_bits(file, tensor, buffer)
            if largest >= _INFINITY[tensor.dtype][1]:
                raise WeightsFileRejected(
                    "weights_not_finite",
                    name,
                    f"{name} holds NaN or infinity, so every answer would be noise: the training diverged, or the "
                    "weights overflowed when they were converted.",
                )
            if largest >= _ROUNDED_TO_INFINITY.get((tensor.dtype, serving), largest + 1):
                raise WeightsFileRejected(
                    "weights_overflow",
                    name,
                    f"{name} holds values beyond what {serving} can express, in which this server runs its base.",
                )


def _largest_bits(file: BufferedReader, tensor: TensorInfo, buffer: npt.NDArray[np.uint8]) -> int:
    """Return the bits of the tensor's largest magnitude; a NaN counts as larger than infinity."""
    word, infinity = _INFINITY[tensor.dtype]
    magnitude = (1 << (8 * ITEM_BYTES[tensor.dtype] - 1)) - 1
    assert CHUNK_BYTES % ITEM_BYTES[tensor.dtype] == 0
    file.seek(tensor.start)
    left, largest = tensor.end - tensor.start, 0
    while left and largest < infinity:
        chunk = buffer[: min(left, CHUNK_BYTES)]
        if file.readinto(chunk.data) != len(chunk):
            raise WeightsFileRejected("weights_truncated", None, "The file became shorter while it was read.")
        largest = max(largest, int(np.max(chunk.view(word) & magnitude)))
        left -= len(chunk)
    return largest
