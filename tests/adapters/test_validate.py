"""Folders as customers and attackers upload them: accepted, or refused with a specific code."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load, save_file
from tiny_peft import raw_safetensors, save_adapter, tiny_model, write_adapter

from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits, validate_adapter
from loramux_adapters.weights_file import CHUNK_BYTES

LIMITS = PlanLimits(max_rank=64, max_bytes=64 << 20)


def refusal_of(directory: Path, base: Any) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        validate_adapter(directory, base, LIMITS)
    assert caught.value.message == str(caught.value)
    assert caught.value.message.endswith((".", "?"))
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    return caught.value


def test_folder_from_peft_is_accepted(good_folder: Path, llama) -> None:
    plan = validate_adapter(good_folder, llama, LIMITS)
    assert [(pair.module, pair.rank, pair.scale) for pair in plan.pairs] == [
        (f"model.layers.{layer}.{leaf}", 8, 2.0) for layer in (0, 1) for leaf in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert plan.file_bytes == (good_folder / WEIGHTS_NAME).stat().st_size


# ---- what PEFT saves and this server does not serve

REFUSED_FORMATS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dora_on_the_embedding": ("llama", {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}, "use_dora"),
    "bias_of_norms": ("gpt2", {"bias": "all", "target_modules": ["c_attn"]}, "bias"),
    "norms_with_biases": ("gpt2", {"modules_to_save": ["ln_1"], "target_modules": ["c_attn"]}, "modules_to_save"),
    "linears_saved_whole": ("llama", {"modules_to_save": ["o_proj"]}, "modules_to_save"),
    "alora_on_the_head": (
        "llama",
        {"target_modules": ["lm_head"], "alora_invocation_tokens": [7, 8]},
        "alora_invocation_tokens",
    ),
    "pissa": ("llama", {"init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ("llama", {"init_lora_weights": "olora"}, "init_lora_weights"),
    "replication": ("llama", {"layer_replication": [(0, 2), (1, 2)]}, "layer_replication"),
    "velora": ("llama", {"velora_config": peft.tuners.lora.config.VeloraConfig(num_groups=8)}, "velora_config"),
    "kasa": ("llama", {"kasa_config": peft.tuners.lora.config.KasaConfig()}, "kasa_config"),
    "monteclora": ("llama", {"monteclora_config": peft.tuners.lora.config.MontecloraConfig()}, "monteclora_config"),
    "bdlora": (
        "llama",
        {"use_bdlora": peft.tuners.lora.config.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)},
        "use_bdlora",
    ),
}


@pytest.mark.parametrize("name", REFUSED_FORMATS)
def test_folder_of_unsupported_format_is_refused_by_field(name: str, base_of, tmp_path: Path) -> None:
    family, fields, field = REFUSED_FORMATS[name]
    save_adapter(family, tmp_path, **{"target_modules": ["q_proj"]} | fields)
    refusal = refusal_of(tmp_path, base_of(family))
    assert refusal.field == field
    assert field in refusal.message


OTHER_KINDS = [
    peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    peft.LoKrConfig(r=4, target_modules=["q_proj"]),
    peft.VeraConfig(r=8, target_modules=["q_proj"]),
    peft.AdaLoraConfig(init_r=8, target_r=4, total_step=100, target_modules=["q_proj"]),
    peft.OFTConfig(oft_block_size=8, r=0, target_modules=["q_proj"]),
    peft.LNTuningConfig(),
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
]


@pytest.mark.parametrize("config", OTHER_KINDS, ids=lambda config: type(config).__name__)
def test_folder_of_unsupported_kind_is_refused_by_kind(config: peft.PeftConfig, llama, tmp_path: Path) -> None:
    peft.get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    refusal = refusal_of(tmp_path, llama)
    assert (refusal.code, refusal.field) == ("peft_type_unsupported", "peft_type")
    assert config.peft_type.value in refusal.message


@pytest.mark.parametrize("init", [False, "gaussian", "orthogonal", "mica"])
def test_folder_with_initialisation_that_leaves_the_base_alone_is_accepted(init: Any, llama, tmp_path: Path) -> None:
    save_adapter("llama", tmp_path, target_modules=["q_proj"], init_lora_weights=init)
    assert len(validate_adapter(tmp_path, llama, LIMITS).pairs) == 2


def test_folder_of_activated_lora_keeps_its_tokens(llama, tmp_path: Path) -> None:
    save_adapter("llama", tmp_path, target_modules=["q_proj"], alora_invocation_tokens=[7, 8])
    assert validate_adapter(tmp_path, llama, LIMITS).invocation == (7, 8)
    save_adapter("llama", tmp_path, target_modules=["q_proj"], alora_invocation_tokens=[7, llama.vocab_size])
    assert refusal_of(tmp_path, llama).field == "alora_invocation_tokens"


# ---- damaged and hostile folders


def without_config(directory: Path) -> None:
    (directory / CONFIG_NAME).unlink()


def without_weights(directory: Path) -> None:
    (directory / WEIGHTS_NAME).unlink()


def config_is_a_folder(directory: Path) -> None:
    (directory / CONFIG_NAME).unlink()
    (directory / CONFIG_NAME).mkdir()


def config_huge(directory: Path) -> None:
    with (directory / CONFIG_NAME).open("ab") as file:
        file.truncate(1 << 30)


def config_set(**fields: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / CONFIG_NAME).read_text())
        (directory / CONFIG_NAME).write_text(json.dumps(config | fields))

    return change


def pickled(directory: Path) -> None:
    torch.save(load((directory / WEIGHTS_NAME).read_bytes()), directory / WEIGHTS_NAME)


def truncated(directory: Path) -> None:
    content = (directory / WEIGHTS_NAME).read_bytes()
    (directory / WEIGHTS_NAME).write_bytes(content[:-100])


def padded(directory: Path) -> None:
    with (directory / WEIGHTS_NAME).open("ab") as file:
        file.write(b"\0" * 100)


def giant(directory: Path) -> None:
    shape = [1 << 20, 64]
    header = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}}
    (directory / WEIGHTS_NAME).write_bytes(raw_safetensors(header))
    size = (directory / WEIGHTS_NAME).stat().st_size
    with (directory / WEIGHTS_NAME).open("ab") as file:
        file.truncate(size + 4 * shape[0] * shape[1])


def header_of_80_megabytes(directory: Path) -> None:
    with (directory / WEIGHTS_NAME).open("wb") as file:
        file.write((80 << 20).to_bytes(8, "little"))
        file.truncate(81 << 20)


def tensors_set(change: Callable[[dict[str, torch.Tensor], str], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load((directory / WEIGHTS_NAME).read_bytes())
        change(tensors, sorted(tensors)[0])
        save_file(tensors, directory / WEIGHTS_NAME)

    return apply


def integers(tensors: dict[str, torch.Tensor], key: str) -> None:
    tensors[key] = tensors[key].to(torch.int32)


def dropped(tensors: dict[str, torch.Tensor], key: str) -> None:
    del tensors[key]


def added(tensors: dict[str, torch.Tensor], key: str) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.ones(64)


def transposed(tensors: dict[str, torch.Tensor], key: str) -> None:
    tensors[key] = tensors[key].T.contiguous()


def poisoned(value: float) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], key: str) -> None:
        tensors[key].view(-1)[-1] = value

    return change


CORPUS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without_config, "config_missing"),
    "config is a folder": (config_is_a_folder, "config_missing"),
    "config of a gigabyte": (config_huge, "config_too_large"),
    "no weights": (without_weights, "weights_missing"),
    "negative rank": (config_set(r=-3), "config_invalid"),
    "rank as text": (config_set(r="8"), "config_invalid"),
    "alpha as text": (config_set(lora_alpha="nan"), "config_invalid"),
    "alpha is NaN": (config_set(lora_alpha=float("nan")), "config_invalid"),
    "unknown field": (config_set(new_future_field=True), "field_unknown"),
    "unknown kind": (config_set(peft_type="NOPE"), "peft_type_unsupported"),
    "rank of the file is another": (config_set(r=4), "shape_mismatch"),
    "rank above the limit": (config_set(r=65), "rank_too_large"),
    "targets without a tensor": (config_set(target_modules=["k_proj"]), "tensors_missing"),
    "fewer targets than tensors": (config_set(target_modules=["q_proj"]), "tensors_unexpected"),
    "targets of another base": (config_set(target_modules=["c_attn"]), "no_module_matched"),
    "endless expression": (config_set(target_modules="(.+)+x"), "pattern_too_slow"),
    "no expression": (config_set(rank_pattern={"(": 3}), "pattern_invalid"),
    "target is a norm": (config_set(target_modules=["q_proj", "norm"]), "target_unsupported"),
    "pickle": (pickled, "weights_pickled"),
    "truncated": (truncated, "weights_truncated"),
    "bytes at the end": (padded, "header_invalid"),
    "over the limit": (giant, "weights_too_large"),
    "huge header": (header_of_80_megabytes, "header_length_invalid"),
    "integers": (tensors_set(integers), "dtype_unsupported"),
    "tensor missing": (tensors_set(dropped), "tensors_missing"),
    "tensor too many": (tensors_set(added), "tensors_unexpected"),
    "transposed": (tensors_set(transposed), "shape_mismatch"),
    "NaN": (tensors_set(poisoned(float("nan"))), "weights_not_finite"),
    "infinity": (tensors_set(poisoned(float("-inf"))), "weights_not_finite"),
}


@pytest.mark.parametrize("name", CORPUS)
def test_folder_with_a_fault_is_refused_by_code(name: str, good_folder: Path, llama, tmp_path: Path) -> None:
    spoil, code = CORPUS[name]
    directory = tmp_path / "adapter"
    shutil.copytree(good_folder, directory)
    assert validate_adapter(directory, llama, LIMITS)
    spoil(directory)
    tracemalloc.start()
    assert refusal_of(directory, llama).code == code
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


# ---- finite values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_at_every_place_of_every_dtype_are_checked(
    dtype: torch.dtype, value: float, good_config, good_tensors, llama, tmp_path: Path
) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in good_tensors.items()}
    assert validate_adapter(write_adapter(tmp_path, good_config, tensors), llama, LIMITS)
    for key, tensor in tensors.items():
        for place in (0, tensor.numel() // 2, -1):
            spoilt = tensor.clone()
            spoilt.view(-1)[place] = value
            refusal = refusal_of(write_adapter(tmp_path, good_config, tensors | {key: spoilt}), llama)
            assert (refusal.code, refusal.field) == ("weights_not_finite", key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_largest_finite_are_accepted(
    dtype: torch.dtype, good_config, good_tensors, llama, tmp_path: Path
) -> None:
    largest = {
        key: torch.full_like(tensor, torch.finfo(dtype).max, dtype=dtype) for key, tensor in good_tensors.items()
    }
    assert validate_adapter(write_adapter(tmp_path, good_config, largest), llama, LIMITS)


def test_values_of_a_large_file_are_read_in_chunks(tmp_path: Path) -> None:
    from loramux_adapters.weights_file import check_finite, read_header

    weights = torch.zeros(4 * CHUNK_BYTES // 4 + 3)
    path = tmp_path / WEIGHTS_NAME
    save_file({"x": weights}, path)
    tracemalloc.start()
    check_finite(path, read_header(path))
    assert tracemalloc.get_traced_memory()[1] < 4 * CHUNK_BYTES
    tracemalloc.stop()
    weights[-1] = float("nan")
    save_file({"x": weights}, path)
    with pytest.raises(AdapterRejected):
        check_finite(path, read_header(path))
