"""Uploads as an attacker would send them: made from a sound adapter, each with the code that must refuse it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import math
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft_uploads import CONFIG, WEIGHTS
from safetensors.torch import load, save

Files = dict[str, bytes]
Change = Callable[[Files], Files]


@dataclass(frozen=True)
class Attack:
    """A change of a valid adapter's files, and its refusal."""

    name: str
    change: Change
    code: str


class Boom:
    """Would make a file if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/tmp/loramux-was-here", "w")


def weights(content: bytes | Callable[[bytes], bytes]) -> Change:
    return lambda files: files | {WEIGHTS: content(files[WEIGHTS]) if callable(content) else content}


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """The header rewritten by `change`, which edits it or returns another; the tensors' bytes stay."""

    def rewritten(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        document = json.loads(content[8 : 8 + length])
        edited = change(document)
        text = edited if isinstance(edited, bytes) else json.dumps(edited or document).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return weights(rewritten)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewritten(content: bytes) -> bytes:
        loaded = load(content)
        change(loaded)
        return save(loaded, metadata={"format": "pt"})

    return weights(rewritten)


def config(**fields: Any) -> Change:
    return lambda files: files | {CONFIG: json.dumps(json.loads(files[CONFIG]) | fields).encode()}


def raw_config(content: bytes) -> Change:
    return lambda files: files | {CONFIG: content}


def names(document: dict[str, Any]) -> list[str]:
    return [name for name in document if name != "__metadata__"]


def duplicated(document: dict[str, Any]) -> bytes:
    first = names(document)[0]
    entry = json.dumps({first: document[first]})[1:-1]
    return (json.dumps(document)[:-1] + "," + entry + "}").encode()


def shifted(by: int) -> Callable[[dict[str, Any]], None]:
    """The second tensor starts `by` bytes from where it should, and is as long as it was."""

    def change(document: dict[str, Any]) -> None:
        entries = sorted((document[name] for name in names(document)), key=lambda entry: entry["data_offsets"])
        entries[1]["data_offsets"] = [end + by for end in entries[1]["data_offsets"]]

    return change


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document[name] = document.pop(names(document)[0])

    return change


def reshaped(document: dict[str, Any]) -> None:
    entry = document[names(document)[0]]
    entry["shape"] = [math.prod(entry["shape"])]


def in_dtype(dtype: str, shrink: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        entry = document[names(document)[0]]
        entry["dtype"], entry["shape"] = dtype, [entry["shape"][0], entry["shape"][1] * shrink]

    return change


def first_value(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(loaded: dict[str, torch.Tensor]) -> None:
        next(iter(loaded.values())).view(-1)[0] = value

    return change


def transposed(loaded: dict[str, torch.Tensor]) -> None:
    name = next(name for name in loaded if "lora_A" in name)
    loaded[name] = loaded[name].T.contiguous()


def deeper(loaded: dict[str, torch.Tensor]) -> None:
    """Change the tensors to those of a base with other layers."""
    name = next(name for name in loaded if "layers.1." in name)
    loaded[name.replace("layers.1.", "layers.31.")] = loaded.pop(name)


def wider(loaded: dict[str, torch.Tensor]) -> None:
    """Change the tensors to those of a base with another width."""
    for name in list(loaded):
        if "lora_A" in name:
            loaded[name] = torch.zeros(loaded[name].shape[0], 4096)


def doubled(loaded: dict[str, torch.Tensor]) -> None:
    loaded.update({name.replace("lora_A.", "lora_A.default."): tensor.clone() for name, tensor in loaded.items()})


def as_experts(loaded: dict[str, torch.Tensor]) -> None:
    for name in list(loaded):
        loaded[name.replace("self_attn.q_proj", "mlp.experts.99999.gate_proj")] = loaded.pop(name)


def wrapped(loaded: dict[str, torch.Tensor]) -> None:
    name = next(iter(loaded))
    loaded[name.replace(".lora_", ".base_layer" * 30 + ".lora_")] = loaded[name].clone()


def nested(depth: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for _ in range(depth):
        document = {"a": document}
    return document


def many(count: int) -> bytes:
    entry = {"dtype": "F32", "shape": [1]}
    document = {f"t{i}": entry | {"data_offsets": [4 * i, 4 * i + 4]} for i in range(count)}
    text = json.dumps(document, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * count)


def headed(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def zipped(size: int) -> bytes:
    """`size` zeros, a thousandth of that when it is sent."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_model.safetensors", bytes(size))
    return buffer.getvalue()


def tarred(link: bool = False) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("adapter_model.safetensors")
        if link:
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    return buffer.getvalue()


def torch_saved(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(3)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


NESTED = b'{"x":' * 100_000
DEEP = b"[" * 400 + b"]" * 400 + b","
METADATA = b'{"__metadata__":{"a":"' + b"x" * 900_000 + b'"}}'

ATTACKS = [
    Attack("a pickle that runs code", weights(pickle.dumps(Boom())), "weights_pickled"),
    Attack("a renamed torch.save", weights(lambda _: torch_saved(legacy=False)), "weights_pickled"),
    Attack("a renamed legacy torch.save", weights(lambda _: torch_saved(legacy=True)), "weights_pickled"),
    Attack("a pickle as the configuration", raw_config(pickle.dumps(Boom())), "config_invalid"),
    Attack("a zip bomb", weights(lambda _: zipped(1 << 26)), "weights_archived"),
    Attack("a gzip bomb", weights(lambda _: gzip.compress(bytes(1 << 26), mtime=0)), "weights_archived"),
    Attack("a bzip2 bomb", weights(lambda _: bz2.compress(bytes(1 << 24))), "weights_archived"),
    Attack("a tar file", weights(lambda _: tarred()), "weights_archived"),
    Attack("a tar file with a link to /etc/passwd", weights(lambda _: tarred(link=True)), "weights_archived"),
    Attack("a header of 2^62 bytes", weights(struct.pack("<Q", 1 << 62) + b"{}"), "header_length_invalid"),
    Attack("a header of 8 MiB and a byte", weights(headed(b"{" + b" " * (8 << 20))), "header_length_invalid"),
    Attack("a header past the file's end", weights(struct.pack("<Q", 1 << 19) + b"{}"), "weights_truncated"),
    Attack("100,000 nested objects", weights(headed(NESTED)), "header_invalid"),
    Attack("900,000 bytes of metadata and no tensor", weights(headed(METADATA)), "tensors_missing"),
    Attack("a number of 500,000 digits", weights(headed(b'{"x":' + b"9" * 500_000 + b"}")), "header_invalid"),
    Attack("50,001 tensors", weights(lambda _: many(50_001)), "too_many_tensors"),
    Attack("100,000 tensors", weights(lambda _: many(100_000)), "header_invalid"),
    Attack("millions of empty lists", weights(headed(b'{"x":[' + b"[]," * 2_700_000 + b"0]}")), "header_invalid"),
    Attack("a million lists in each other", weights(headed(b'{"x":[' + DEEP * 9_000 + b"0]}")), "header_invalid"),
    Attack("a key twice", header(duplicated), "header_invalid"),
    Attack("tensors that overlap", header(shifted(-4)), "header_invalid"),
    Attack("tensors with a gap", header(shifted(4)), "header_invalid"),
    Attack("a truncated file", weights(lambda content: content[:-1]), "weights_truncated"),
    Attack("bytes behind the last tensor", weights(lambda content: content + b"#!/bin/sh"), "header_invalid"),
    Attack("an empty tensor file", weights(headed(b"{}")), "tensors_missing"),
    Attack("a tensor named like a path", header(renamed("../../etc/cron.d/x")), "header_invalid"),
    Attack("a tensor named with a null byte", header(renamed("x\0y")), "header_invalid"),
    Attack("a tensor name of 100,000 characters", header(renamed("x" * 100_000)), "header_invalid"),
    Attack("a tensor of another shape", tensors(transposed), "shape_mismatch"),
    Attack("a tensor of other dimensions", header(reshaped), "shape_mismatch"),
    Attack("integers", header(in_dtype("I32", 1)), "dtype_unsupported"),
    Attack("8-bit floats", header(in_dtype("F8_E4M3", 4)), "dtype_unsupported"),
    Attack("a tensor too many", tensors(lambda t: t.update(x=torch.ones(1))), "tensors_unexpected"),
    Attack("a tensor too few", tensors(lambda t: t.popitem()), "tensors_missing"),
    Attack("NaN", tensors(first_value(math.nan)), "weights_not_finite"),
    Attack("infinity", tensors(first_value(-math.inf)), "weights_not_finite"),
    Attack("layers of another base", tensors(deeper), "tensors_missing"),
    Attack("the width of another base", tensors(wider), "shape_mismatch"),
    Attack("one pair under two names", tensors(doubled), "names_ambiguous"),
    Attack("experts of a base without any", tensors(as_experts), "tensors_unexpected"),
    Attack("a name of many wrappers", tensors(wrapped), "tensors_unexpected"),
    Attack("rank 0", config(r=0), "config_invalid"),
    Attack("rank -3", config(r=-3), "config_invalid"),
    Attack("rank 10^6", config(r=10**6), "config_invalid"),
    Attack("a rank beyond the server's", config(r=4096), "rank_too_large"),
    Attack("a rank of text", config(r="8"), "config_invalid"),
    Attack("an alpha of NaN", config(lora_alpha=math.nan), "config_invalid"),
    Attack("a configuration with a key twice", raw_config(b'{"r": 8, "r": 4096}'), "config_invalid"),
    Attack("a configuration of 100,000 nested lists", raw_config(b"[" * 100_000), "config_invalid"),
    Attack("a harmless field of 200 nested objects", config(auto_mapping=nested(200)), "config_invalid"),
    Attack("an expression that never ends", config(target_modules=r"(.*.*)*q_proj(.*)*[^_]$"), "pattern_too_slow"),
    Attack("code to be imported", config(base_model_class="os.system"), "field_unknown"),
    Attack("another method", config(peft_type="PROMPT_TUNING"), "peft_type_unsupported"),
]
"""Each attack is in the two files of an upload; the HTTP form's own parts are tested separately."""


def files_of(folder: Path) -> Files:
    """The sound adapter that attacks are made from."""
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
