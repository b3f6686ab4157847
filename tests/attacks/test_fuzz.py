"""Folders that are nearly right: whatever is wrong, the answer is a refusal, and what is taken is exactly sound."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import Files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft_uploads import CONFIG, WEIGHTS
from safetensors.torch import load

from loramux_adapters.base import BaseDescription, describe_base
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import PlanLimits, validate_adapter

LIMITS = PlanLimits(max_rank=64, max_bytes=1 << 20)
NAMES = st.sampled_from(["q_proj", "v_proj", "all-linear", "lm_head", "model.layers.0.self_attn.q_proj", "x", ""])
"""Without regular expressions, each of which takes a process to match."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | NAMES | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    (
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "layers_to_transform",
        "layers_pattern",
        "peft_type",
        "init_lora_weights",
        "modules_to_save",
        "use_dora",
        "new",
    )
)
EDITS = st.one_of(
    st.tuples(st.just("config"), FIELDS, VALUES),
    st.tuples(st.just("without"), FIELDS, st.none()),
    st.tuples(st.just("dtype"), st.integers(0, 7), st.sampled_from(["F32", "F16", "BF16", "I8", "F8_E5M2", 7])),
    st.tuples(st.just("shape"), st.integers(0, 7), st.lists(st.integers(-1, 64), max_size=3)),
    st.tuples(st.just("offsets"), st.integers(0, 7), st.lists(st.integers(-4, 5000), min_size=1, max_size=3)),
    st.tuples(st.just("rename"), st.integers(0, 7), st.sampled_from(["x", "../x", "lora_A.weight", "__metadata__"])),
    st.tuples(st.just("drop"), st.integers(0, 7), st.none()),
    st.tuples(st.just("twice"), st.integers(0, 7), st.none()),
    st.tuples(st.just("bytes"), st.integers(0, 4000), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("cut"), st.integers(0, 5000), st.none()),
)


@pytest.fixture(scope="module")
def base(base_dir: Path) -> BaseDescription:
    return describe_base(base_dir)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(edits=st.lists(EDITS, max_size=3))
def test_a_folder_is_refused_or_exactly_sound(
    edits: list[tuple[str, Any, Any]], base: BaseDescription, sound: Files, tmp_path: Path
) -> None:
    for name, content in edited(sound, edits).items():
        (tmp_path / name).write_bytes(content)
    try:
        plan = validate_adapter(tmp_path, base, LIMITS)
    except AdapterRejected:
        return
    loaded = load((tmp_path / WEIGHTS).read_bytes())
    expected = {name: shape for pair in plan.pairs for name, shape in pair.shapes.items()}
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == expected
    assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.values())
    assert 1 <= plan.max_rank <= LIMITS.max_rank


def edited(sound: Files, edits: list[tuple[str, Any, Any]]) -> Files:
    config, weights = json.loads(sound[CONFIG]), sound[WEIGHTS]
    (length,) = struct.unpack("<Q", weights[:8])
    header, data = json.loads(weights[8 : 8 + length]), bytearray(weights[8 + length :])
    names, twice = [name for name in header if name != "__metadata__"], ""
    for kind, where, value in edits:
        entry = header.get(names[where]) if kind in ("dtype", "shape", "offsets", "twice") else None
        match kind:
            case "config":
                config[where] = value
            case "without":
                config.pop(where, None)
            case "dtype" | "shape" if entry:
                entry[kind] = value
            case "offsets" if entry:
                entry["data_offsets"] = value
            case "rename" if names[where] in header:
                header[value] = header.pop(names[where])
            case "drop":
                header.pop(names[where], None)
            case "twice" if entry:
                twice = f", {json.dumps(names[where])}: {json.dumps(entry)}"
            case "bytes":
                data[where : where + len(value)] = value
            case "cut":
                del data[where:]
    text = (json.dumps(header)[:-1] + twice + "}").encode()
    return {CONFIG: json.dumps(config).encode(), WEIGHTS: struct.pack("<Q", len(text)) + text + bytes(data)}
