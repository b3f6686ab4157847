"""Every kind of PEFT is served, converted or refused by name, with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from other_kinds import make_kind
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file

from loramux_adapters.base import BaseDescription
from loramux_adapters.config import CONVERTED, UNSUPPORTED_KINDS, parse_adapter_config
from loramux_adapters.convert import conversion
from loramux_adapters.convert.conversion import CONVERTERS, convert_adapter, known_fields
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import PlanLimits

LIMITS = PlanLimits(max_rank=96, max_bytes=1 << 30)
SERVED = ("LORA", "IA3")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def test_kinds_every_kind_of_peft_is_decided_once() -> None:
    assert set(CONVERTERS) == CONVERTED
    assert sorted([*SERVED, *CONVERTERS, *UNSUPPORTED_KINDS]) == sorted(kind.value for kind in peft.PeftType)


@pytest.mark.parametrize("kind", UNSUPPORTED_KINDS)
def test_kinds_unsupported_is_refused_by_name(kind: str) -> None:
    with pytest.raises(AdapterRejected) as caught:
        parse_adapter_config(json.dumps({"peft_type": kind}).encode())
    assert (caught.value.code, caught.value.field) == ("peft_type_unsupported", "peft_type")
    assert all(part in caught.value.message for part in (kind, *UNSUPPORTED_KINDS[kind]))


@pytest.mark.parametrize("kind", CONVERTERS)
def test_kinds_every_field_of_a_converted_kind_is_decided(kind: str) -> None:
    """A field that is neither read nor harmless is refused when it is on, so every field of PEFT must be listed."""
    fields = set(PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]].__dataclass_fields__)
    undecided = fields - known_fields(CONVERTERS[kind]) - set(CONVERTERS[kind].REFUSED) - {"modules_to_save"}
    if kind == "ADALORA":  # its other fields are LoRA's, most of which it cannot be trained with
        undecided -= set(peft.LoraConfig.__dataclass_fields__)
    assert undecided == set()


@pytest.fixture(scope="session")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {
        "vera": peft.VeraConfig(r=4, target_modules=["q_proj"]),
        "loha": peft.LoHaConfig(r=3, target_modules=["q_proj"]),
        "randlora": peft.RandLoraConfig(r=8, target_modules=["q_proj"]),
        "vblora": peft.VBLoRAConfig(r=2, target_modules=["q_proj"], num_vectors=9, vector_length=8),
        "miss": peft.MissConfig(r=4, target_modules=["q_proj"]),
        "c3a": peft.C3AConfig(block_size=16, target_modules=["q_proj"]),
        "lokr": peft.LoKrConfig(r=2, target_modules=["q_proj"]),
        "gralora": peft.GraloraConfig(r=4, target_modules=["q_proj"]),
        "adalora": peft.AdaLoraConfig(init_r=4, total_step=10, target_modules=["q_proj"]),
        "pvera": peft.PveraConfig(r=4, target_modules=["q_proj"]),
        "oft": peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"]),
        "boft": peft.BOFTConfig(boft_block_size=8, target_modules=["q_proj"]),
    }
    folder = tmp_path_factory.mktemp("kinds")
    for name, config in configs.items():
        make_kind(base, folder / name, config)
    return {name: folder / name for name in configs}


def spoiled(folder: Path, into: Path, fields: dict[str, Any], change: Callable[[Any], object] | None = None) -> Path:
    into.mkdir()
    tensors = load_file(folder / WEIGHTS)
    if change:
        change(tensors)
    save_file(tensors, into / WEIGHTS)
    (into / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | fields))
    return into


def refusal_of(folder: Path, described: BaseDescription, limits: PlanLimits = LIMITS) -> AdapterRejected:
    (folder / "into").mkdir()
    with pytest.raises(AdapterRejected) as caught:
        convert_adapter(folder, folder / "into", described, limits)
    return caught.value


FIELDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "modules_to_save": ("vera", {"modules_to_save": ["lm_head"]}, "field_unsupported", "modules_to_save"),
    "a field of the future": ("loha", {"new_future_field": 3}, "field_unsupported", "new_future_field"),
    "lora's field": ("adalora", {"lora_bias": True}, "field_unsupported", "lora_bias"),
    "biases": ("vera", {"bias": "all"}, "field_unsupported", "bias"),
    "another task": ("vera", {"task_type": "SEQ_CLS"}, "field_unsupported", "task_type"),
    "projections left out": ("vera", {"save_projection": False}, "field_unsupported", "save_projection"),
    "no weights but top ones": (
        "vblora",
        {"save_only_topk_weights": True},
        "field_unsupported",
        "save_only_topk_weights",
    ),
    "sampling": ("pvera", {"sample_at_inference": True}, "field_unsupported", "sample_at_inference"),
    "bat": ("miss", {"init_weights": "bat"}, "field_unsupported", "init_weights"),
    "expressions of c3a": ("c3a", {"block_size_pattern": {"q|v": 8}}, "field_unsupported", "block_size_pattern"),
    "a size that does not divide": ("c3a", {"block_size": 7}, "config_invalid", "block_size"),
    "vectors that do not divide": ("vblora", {"vector_length": 7}, "config_invalid", "vector_length"),
    "more top ones than vectors": ("vblora", {"topk": 10}, "config_invalid", "topk"),
    "parts that do not divide": ("gralora", {"gralora_k": 3}, "config_invalid", "gralora_k"),
    "rank of mini": ("miss", {"init_weights": "mini", "mini_r": 7}, "config_invalid", "mini_r"),
    "rank beyond the inputs": ("miss", {"r": 65}, "config_invalid", "r"),
    "rank 0": ("loha", {"r": 0}, "config_invalid", "r"),
    "rank -3": ("vera", {"r": -3}, "config_invalid", "r"),
    "rank 10^6": ("loha", {"r": 10**6}, "config_invalid", "r"),
    "rank as text": ("lokr", {"r": "8"}, "config_invalid", "r"),
    "no rank": ("loha", {"r": None}, "field_missing", "r"),
    "factor": ("lokr", {"decompose_factor": -2}, "config_invalid", "decompose_factor"),
    "no targets": ("loha", {"target_modules": None}, "field_missing", "target_modules"),
    "targets of another base": ("loha", {"target_modules": ["c_attn"]}, "no_module_matched", "target_modules"),
    "the embedding": ("loha", {"target_modules": ["embed_tokens"]}, "target_unsupported", "target_modules"),
    "another rank": ("loha", {"r": 4}, "shape_mismatch", "base_model.model.model.layers.0.self_attn.q_proj.hada_w1_a"),
    "oft of two sizes": ("oft", {"r": 8}, "config_invalid", "oft_block_size"),
    "oft of no size": ("oft", {"oft_block_size": 0}, "config_invalid", "oft_block_size"),
    "oft of old weights": ("oft", {"oft_block_size": None}, "field_missing", "oft_block_size"),
    "oft of an old series": ("oft", {"peft_version": None}, "field_unsupported", "use_cayley_neumann"),
    "blocks that do not divide": ("boft", {"boft_block_size": 7}, "config_invalid", "boft_block_size"),
    "boft of two sizes": ("boft", {"boft_block_num": 8}, "config_invalid", "boft_block_size"),
    "butterfly": ("boft", {"boft_n_butterfly_factor": 2}, "field_unsupported", "boft_n_butterfly_factor"),
    "biases of oft": ("oft", {"bias": "oft_only"}, "field_unsupported", "bias"),
    "every rank pruned": (
        "adalora",
        {"rank_pattern": {f"model.layers.{i}.self_attn.q_proj.lora_E": [False] * 4 for i in (0, 1)}},
        "rank_pattern_empty",
        "rank_pattern",
    ),
}


def pruned(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = (tensor[:, :0] if name.endswith("lora_B") else tensor[:0]).contiguous()


@pytest.mark.parametrize("name", FIELDS)
def test_kinds_unconvertible_configuration_is_refused(name: str, saved, described, tmp_path: Path) -> None:
    kind, fields, code, field = FIELDS[name]
    folder = spoiled(saved[kind], tmp_path / "x", fields, pruned if name == "every rank pruned" else None)
    refusal = refusal_of(folder, described)
    assert (refusal.code, refusal.field) == (code, field)
    assert refusal.message.endswith(".")
    assert list((folder / "into").iterdir()) == []


Q = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "one is missing": ("loha", lambda t: t.pop(f"{Q}.hada_w1_a"), "tensors_missing"),
    "one too many": ("loha", lambda t: t.update(more=torch.zeros(1)), "tensors_unexpected"),
    "NaN": ("vera", lambda t: t[f"{Q}.vera_lambda_b"].fill_(float("nan")), "weights_not_finite"),
    "infinity": ("vblora", lambda t: t[f"{Q}.vblora_logits_A"].fill_(float("inf")), "weights_not_finite"),
    "a copy of its own": ("randlora", lambda t: t[f"{Q}.randlora_A"].add_(1), "copy_differs"),
    "integers": ("loha", lambda t: t.update({f"{Q}.hada_w1_a": torch.zeros(64, 3).int()}), "dtype_unsupported"),
    "products beyond float32": (
        "loha",
        lambda t: [tensor.fill_(1e30) for tensor in t.values()],
        "weights_overflow",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_kinds_unconvertible_weights_are_refused(name: str, saved, described, tmp_path: Path) -> None:
    kind, change, code = TENSORS[name]
    assert refusal_of(spoiled(saved[kind], tmp_path / "x", {}, change), described).code == code


def test_kinds_copies_of_shared_tensors_are_optional(saved, described, tmp_path: Path) -> None:
    def without_copies(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("base_model.model.") and name[-1] in "AB"]:
            del tensors[name]

    folder = spoiled(saved["randlora"], tmp_path / "x", {}, without_copies)
    (tmp_path / "into").mkdir()
    assert convert_adapter(folder, tmp_path / "into", described, LIMITS) is not None


def test_kinds_rank_above_the_limit_names_the_way_out(saved, described, tmp_path: Path) -> None:
    refusal = refusal_of(spoiled(saved["loha"], tmp_path / "x", {}), described, PlanLimits(max_rank=8))
    assert refusal.code == "rank_too_large"
    assert all(part in refusal.message for part in ("LOHA", "rank 9", "up to 8", "peft.save_as_lora"))


def test_kinds_rotation_of_a_large_linear_names_its_rank_and_the_way_out(saved, described, tmp_path: Path) -> None:
    refusal = refusal_of(spoiled(saved["oft"], tmp_path / "x", {}), described, PlanLimits(max_rank=32))
    assert refusal.code == "rank_too_large"
    parts = ("OFT", "rank 64", "up to 32", "a side of at most 32", "peft.LoraConfig")
    assert all(part in refusal.message for part in parts)


def test_kinds_lora_larger_than_the_limit_is_not_written(saved, described, tmp_path: Path) -> None:
    limit = (saved["loha"] / WEIGHTS).stat().st_size
    refusal = refusal_of(spoiled(saved["loha"], tmp_path / "x", {}), described, PlanLimits(max_bytes=limit))
    assert refusal.code == "weights_too_large"


@pytest.mark.parametrize(("limit", "tensor"), [("MAX_SHARED_BYTES", "vector_bank"), ("MAX_TENSOR_BYTES", "logits")])
def test_kinds_giant_tensors_are_refused_unread(
    limit: str, tensor: str, saved, described, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, limit, 100)
    monkeypatch.setattr(conversion, "read_tensor", None)
    refusal = refusal_of(spoiled(saved["vblora"], tmp_path / "x", {}), described)
    assert refusal.code == "weights_too_large"
    assert tensor in str(refusal.field)


values = (
    st.none() | st.booleans() | st.integers(-3, 70_000) | st.floats() | st.text(max_size=5) | st.lists(st.integers())
)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(sorted(CONVERTERS)),
    drawn=st.dictionaries(
        st.sampled_from(sorted({field for form in CONVERTERS.values() for field in form.__struct_fields__})),
        values,
        max_size=4,
    ),
)
def test_kinds_any_configuration_is_converted_or_refused(
    kind: str, drawn: dict[str, Any], saved, described, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    document = {"peft_type": kind, "target_modules": ["q_proj"], "r": 4, "alpha": 4, "block_size": 8} | drawn
    (folder / CONFIG).write_text(json.dumps(document))
    (folder / WEIGHTS).write_bytes((saved["loha"] / WEIGHTS).read_bytes())
    (folder / "into").mkdir()
    with pytest.raises(AdapterRejected):
        convert_adapter(folder, folder / "into", described, PlanLimits(max_rank=2))
