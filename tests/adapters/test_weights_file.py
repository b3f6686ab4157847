"""The header parser: a result or a refusal for any bytes; the library accepts whatever the parser accepts."""

from __future__ import annotations

import json
import math
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file
from tiny_peft import raw_safetensors

from loramux_adapters.errors import AdapterRejected, WeightsFileRejected
from loramux_adapters.weights_file import ITEM_BYTES, MAX_HEADER_BYTES, MAX_TENSORS, MAX_VALUES, read_header

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("header") / "weights.safetensors"


def code_of(path: Path) -> str:
    with pytest.raises(WeightsFileRejected) as caught:
        read_header(path)
    assert caught.value.message
    return caught.value.code


def refuse(path: Path, header: Any, data: bytes = b"\0\0\0\0") -> str:
    path.write_bytes(raw_safetensors(header, data))
    return code_of(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_header_from_the_library_is_read(dtype: torch.dtype, scratch: Path) -> None:
    tensors = {"x.weight": torch.randn(3, 5, dtype=dtype), "a.weight": torch.randn(7, dtype=dtype)}
    save_file(tensors, scratch, metadata={"format": "pt"})
    header = read_header(scratch)
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == scratch.stat().st_size
    assert {name: info.shape for name, info in header.tensors.items()} == {"x.weight": (3, 5), "a.weight": (7,)}
    content = scratch.read_bytes()
    for name, info in header.tensors.items():
        read = torch.frombuffer(bytearray(content[info.start : info.end]), dtype=dtype).view(info.shape)
        assert torch.equal(read, tensors[name])


@pytest.mark.parametrize("size", [128, 384, 640, 896])
def test_header_length_like_a_pickles_first_byte_is_accepted(size: int, scratch: Path) -> None:
    text = json.dumps({"x": ONE}).encode().ljust(size)
    assert struct.pack("<Q", size)[:1] == b"\x80"
    scratch.write_bytes(raw_safetensors(text, b"\0" * 4))
    assert list(read_header(scratch).tensors) == ["x"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_header_of_a_pickle_is_named(protocol: int, scratch: Path) -> None:
    scratch.write_bytes(pickle.dumps({"x": [1.0] * 100}, protocol=protocol))
    assert code_of(scratch) == "weights_pickled"


def test_header_of_a_torch_file_is_named(scratch: Path) -> None:
    torch.save({"x": torch.ones(3)}, scratch)
    assert zipfile.is_zipfile(scratch)
    assert code_of(scratch) == "weights_pickled"
    torch.save({"x": torch.ones(3)}, scratch, _use_new_zipfile_serialization=False)
    assert code_of(scratch) == "weights_pickled"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"[]", "header_invalid"),
        (b' {"x":1}', "header_invalid"),
        (b"{ ", "header_invalid"),
        (b"{}garbage", "header_invalid"),
        (b'{"\xff": 1}', "header_invalid"),
        (
            b'{"__metadata__": {"a": "\\ud800"}, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "header_invalid",
        ),
        (b'{"x": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', "header_invalid"),
        (b'{"x":' + b"[" * 100_000, "header_invalid"),
        (b'{"x":' + b'{"x":' * 100_000, "header_invalid"),
        ({"x": 1}, "header_invalid"),
        ({"x": {**ONE, "more": 1}}, "header_invalid"),
        ({"x": {"dtype": "F32", "shape": [1]}}, "header_invalid"),
        ({"x": {**ONE, "shape": 1}}, "header_invalid"),
        ({"x": {**ONE, "shape": ["1"]}}, "header_invalid"),
        ({"x": {**ONE, "shape": [True]}}, "header_invalid"),
        ({"x": {**ONE, "shape": [1.0]}}, "header_invalid"),
        ({"x": {**ONE, "shape": [-1]}}, "header_invalid"),
        ({"x": {**ONE, "shape": [0]}}, "header_invalid"),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-0, 4]}}', "header_invalid"),
        ({"x": {**ONE, "shape": [1] * 9}}, "header_invalid"),
        ({"x": {**ONE, "shape": [2**63, 2]}}, "header_invalid"),
        ({"x": {**ONE, "shape": [2]}}, "header_invalid"),
        ({"x": {**ONE, "data_offsets": [0]}}, "header_invalid"),
        ({"x": {**ONE, "data_offsets": [4, 0]}}, "header_invalid"),
        ({"x": {**ONE, "data_offsets": [-4, 0]}}, "header_invalid"),
        ({"x": {**ONE, "dtype": "I64"}}, "dtype_unsupported"),
        ({"x": {**ONE, "dtype": "F8_E4M3"}}, "dtype_unsupported"),
        ({"x": {**ONE, "dtype": ["F32"]}}, "dtype_unsupported"),
        ({"__metadata__": {"a": 1}, "x": ONE}, "header_invalid"),
        ({"__metadata__": None, "x": ONE}, "header_invalid"),
        ({"x": {**ONE, "data_offsets": [0, 2**80], "shape": [2**78]}}, "header_invalid"),
        ({"x": ONE, "y": ONE}, "header_invalid"),
        ({"x": {**ONE, "data_offsets": [4, 8]}}, "header_invalid"),
        ({"x": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}, "header_invalid"),
        ({}, "header_invalid"),
        ({"x": {**ONE, "shape": [1000], "data_offsets": [0, 4000]}}, "weights_truncated"),
    ],
)
def test_header_with_a_fault_is_refused_by_code(header: Any, code: str, scratch: Path) -> None:
    assert refuse(scratch, header) == code


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "a..b", ".a", "a.", "a\nb", "a\0", "a b", "é", "x" * 600],
)
def test_header_name_that_is_no_module_path_is_refused(name: str, scratch: Path) -> None:
    assert refuse(scratch, {name: ONE}) == "header_invalid"


def test_header_duplicate_key_is_refused_by_name(scratch: Path) -> None:
    one = json.dumps(ONE)
    scratch.write_bytes(raw_safetensors(f'{{"twin": {one}, "twin": {one}}}'.encode(), b"\0" * 4))
    with pytest.raises(WeightsFileRejected, match="'twin' stands twice"):
        read_header(scratch)
    twice = '{"x": {"dtype": "F32", "shape": [1], "shape": [1], "data_offsets": [0, 4]}}'
    scratch.write_bytes(raw_safetensors(twice.encode(), b"\0" * 4))
    with pytest.raises(WeightsFileRejected, match="'shape' stands twice"):
        read_header(scratch)


def test_header_with_too_many_tensors_is_refused(scratch: Path) -> None:
    halves = {f"t{i}": {"dtype": "F16", "shape": [1], "data_offsets": [2 * i, 2 * i + 2]} for i in range(MAX_TENSORS)}
    data = bytes(2 * MAX_TENSORS)
    scratch.write_bytes(raw_safetensors(halves, data))
    assert len(read_header(scratch).tensors) == MAX_TENSORS
    assert refuse(scratch, halves | {"one.more": ONE}, data) == "too_many_tensors"


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1, 80 << 20, 2**63, 2**64 - 1])
def test_header_length_out_of_bounds_is_refused_unread(length: int, scratch: Path) -> None:
    with scratch.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(128 << 20)
    tracemalloc.start()
    assert code_of(scratch) == "header_length_invalid"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"0,", b'"x",', b"[[1]],", b"[" * 100 + b"]" * 100 + b","])
def test_header_of_the_worst_kind_takes_little_memory(filler: bytes, scratch: Path) -> None:
    count = (MAX_HEADER_BYTES - 20) // len(filler)
    scratch.write_bytes(raw_safetensors(b'{"x": [' + filler * count + b"0]}"))
    tracemalloc.start()
    assert code_of(scratch) == "header_invalid"
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_header_with_the_most_values_takes_little_memory(scratch: Path) -> None:
    depth = 900  # a nesting that the parser accepts
    nested = (b"[" * depth + b"]" * depth + b",") * ((MAX_VALUES - 10) // (depth + 1))
    scratch.write_bytes(raw_safetensors(b'{"x": [' + nested + b"0]}"))
    tracemalloc.start()
    assert code_of(scratch) == "header_invalid"
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_header_of_a_large_mixture_with_a_pair_on_every_expert_is_read(scratch: Path) -> None:
    entries, position = {}, 0
    for name in (f"layers.{n // 384}.experts.{n // 3 % 128}.{'abc'[n % 3]}" for n in range(48 * 128 * 3)):
        for tensor in ("lora_A", "lora_B"):
            offsets = [position, position + 8]
            key = f"base_model.model.model.{name}_longer_name.{tensor}.weight"
            entries[key] = {"dtype": "BF16", "shape": [2, 2], "data_offsets": offsets}
            position += 8
    scratch.write_bytes(raw_safetensors(entries, bytes(position)))
    assert len(read_header(scratch).tensors) == 36_864


@pytest.mark.parametrize("size", [0, 1, 7])
def test_header_missing_is_truncated(size: int, scratch: Path) -> None:
    scratch.write_bytes(b"\0" * size)
    assert code_of(scratch) == "weights_truncated"


def test_header_of_every_truncated_file_is_refused(scratch: Path) -> None:
    whole = save({"x": torch.ones(4), "y": torch.ones(2)})
    for end in range(len(whole)):
        scratch.write_bytes(whole[:end])
        assert code_of(scratch) == "weights_truncated"
    scratch.write_bytes(whole + b"\0")
    assert code_of(scratch) == "header_invalid"


def test_header_of_no_file_is_missing(tmp_path: Path) -> None:
    assert code_of(tmp_path / "absent") == "weights_missing"
    assert code_of(tmp_path) == "weights_missing"


# ---- whatever the bytes

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
sizes = st.integers(1, 6)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEM_BYTES, "I8"]) | values,
        "shape": st.lists(sizes, max_size=3) | values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | values,
    }
)
names = st.text("ab._-/", min_size=1, max_size=6) | st.text(max_size=5) | st.just("__metadata__")


def result_or_refusal(path: Path) -> bool:
    """Return True if the parser accepts the file; the library must then accept it and see the same."""
    try:
        header = read_header(path)
    except AdapterRejected:
        return False
    with safe_open(path, framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            name: info.shape for name, info in header.tensors.items()
        }
    return True


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300, deadline=None
)
@given(content=st.binary(max_size=200))
@example(content=b"")
def test_header_any_bytes_are_read_as_the_library_reads_them_or_refused(content: bytes, scratch: Path) -> None:
    scratch.write_bytes(content)
    result_or_refusal(scratch)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300, deadline=None
)
@given(header=st.dictionaries(names, entries | values, max_size=3) | values, data=st.binary(max_size=40))
def test_header_any_json_is_read_as_the_library_reads_it_or_refused(header: Any, data: bytes, scratch: Path) -> None:
    scratch.write_bytes(raw_safetensors(header, data))
    result_or_refusal(scratch)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300, deadline=None
)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(sizes, max_size=3)), max_size=4),
    damage=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2)), max_size=2),
)
def test_header_of_a_damaged_file_is_never_misread(
    shapes: list[tuple[str, list[int]]], damage: list[tuple[int, bytes]], scratch: Path
) -> None:
    header: dict[str, Any] = {}
    end = 0
    for number, (dtype, shape) in enumerate(shapes):
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[f"t.{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = bytearray(raw_safetensors(header, bytes(end)))
    for position, replacement in damage:
        at = position % len(content)
        content[at : at + len(replacement)] = replacement
    scratch.write_bytes(content)
    assert result_or_refusal(scratch) or damage
