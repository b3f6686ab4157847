"""Quantized bases: adapters on them answer as PEFT does on the dequantized base in float32."""

from __future__ import annotations

import base64
import json
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from adapter_zoo import Asked, load, make_engine, serve
from formats import FormatZoo
from preempting import preempting
from quantized_zoo import CHECKPOINTS, Mxfp4Zoo, QuantizedZoo, fp8_blocks
from rounded_zoo import RoundedZoo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loramux.engine.execution import assembly
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import load_checkpoint, weights_digest
from loramux.engine.execution.quantized_checkpoint import format_of
from loramux_adapters.base_weights import QuantizedExperts, QuantizedLinear
from loramux_kernels import format_choice
from loramux_kernels.quantized_weight import to_nf4

FORMATS = ("plain", "dora")
OFTEN = ("gptq int4 act order", "awq", "nf4 double", "packed int4 asymmetric", "fp8 blocks")
"""One of each reader."""


def questions(formats: tuple[str, ...]) -> list[Asked]:
    return [Asked(f"{a} {i}", a, (5 + i, 40, *range(3, 3 + 5 * i)), 6) for i, a in enumerate([*formats, None])]


def check(zoo: FormatZoo, engine) -> None:
    asked = questions(zoo.formats)
    got = serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


def family_of(checkpoint: str) -> str:
    return "llama" if list(CHECKPOINTS).index(checkpoint) % 2 else "qwen2"


@pytest.mark.parametrize(
    "checkpoint", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in CHECKPOINTS]
)
def test_adapters_on_a_quantized_checkpoint_answer_as_peft_on_the_dequantized_base(tmp_path, checkpoint: str) -> None:
    zoo = QuantizedZoo(family_of(checkpoint), tmp_path, FORMATS, checkpoint)
    zoo.make_adapters()
    check(zoo, make_engine(zoo.quantized, max_num_batched_tokens=13))


@pytest.mark.parametrize(
    ("family", "checkpoint", "size"),
    [
        *(
            pytest.param(
                *(family_of(name), name, size),
                marks=() if (name, size) == ("packed int4 asymmetric", 2) else pytest.mark.slow,
            )
            for name in CHECKPOINTS
            if name != "gptq int4 act order"
            for size in (2, 4)
        ),
        pytest.param("phi3", "awq", 2, marks=pytest.mark.slow),  # its joined linears are cut in three places
    ],
)
def test_ranks_of_a_quantized_checkpoint_answer_as_peft_on_the_dequantized_base(
    tmp_path, family: str, checkpoint: str, size: int
) -> None:
    """Four ranks cut groups of 32 inputs to 8, and repeat key-value heads."""
    formats = ("plain", "dora", "ia3", "lora_bias")
    zoo = QuantizedZoo(family, tmp_path, formats, checkpoint)
    zoo.make_adapters()
    with closing(make_engine(zoo.quantized, max_num_batched_tokens=13, tensor_parallel_size=size)) as engine:
        check(zoo, preempting(engine))


EXPERTS = {
    "experts": {"r": 3, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "router": {"r": 18, "target_modules": "all-linear", "target_parameters": ["router.weight", "experts.down_proj"]},
}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_adapters_on_experts_in_mxfp4_answer_as_peft_on_the_dequantized_base(tmp_path, size: int) -> None:
    """Ranks cut the groups of 32 inputs of `down_proj`: two into 16, four into 8."""
    zoo = Mxfp4Zoo(tmp_path, tuple(EXPERTS))
    for seed, (name, fields) in enumerate(EXPERTS.items()):
        zoo.make_format(name, peft.LoraConfig(lora_alpha=10, task_type="CAUSAL_LM", **fields), seed)
    with closing(make_engine(zoo.quantized, max_num_batched_tokens=13, tensor_parallel_size=size)) as engine:
        check(zoo, preempting(engine))


def test_experts_in_mxfp4_are_never_held_as_floats_and_take_their_own_bytes(tmp_path) -> None:
    zoo = Mxfp4Zoo(tmp_path, hidden_size=160, intermediate_size=224)
    model = load_checkpoint(zoo.quantized, "float32", torch.device("cpu"))
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    each = [6 * rows * columns for _ in range(3) for rows, columns in ((160, 224), (448, 160))]
    assert sorted(one.quantized.nbytes for one in experts) == sorted(n // 2 + n // 32 for n in each)
    coded, _ = load(zoo.quantized, block_size=32)
    exact, _ = load(zoo.base, block_size=32)
    # float16 holds these weights exactly, so panels take two bytes
    assert exact.weight_bytes - coded.weight_bytes == sum(2 * n - n // 2 - n // 32 for n in each)


def test_format_of_linears_next_to_experts_in_mxfp4_is_chosen_for_the_linears_alone(tmp_path, monkeypatch) -> None:
    asked: list[tuple[int, bool]] = []

    def choose(shapes, *rest, is_quantized: bool):
        asked.append((sum(shape.number for shape in shapes), is_quantized))
        return format_choice.choose_for_base(shapes, *rest, is_quantized=is_quantized)

    monkeypatch.setattr(assembly, "choose_for_base", choose)
    load(Mxfp4Zoo(tmp_path).quantized)
    assert asked == [(6, False)], "three layers of qkv and o"


def test_mxfp4_scales_that_are_not_numbers_are_refused(tmp_path) -> None:
    zoo = Mxfp4Zoo(tmp_path)
    saved = load_file(zoo.quantized / "model.safetensors")
    saved["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 1] = 255
    save_file(saved, zoo.quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match=r"1\.mlp\.experts\.down_proj cannot be read as MXFP4: scales that are not"
    ):
        load(zoo.quantized)


def test_experts_in_mxfp4_are_not_quantized_again(tmp_path) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantization = 'int8', and the checkpoint is quantized already"):
        load(Mxfp4Zoo(tmp_path).quantized, "int8")


def test_ranks_cannot_divide_groups_that_are_no_neighbours(tmp_path) -> None:
    zoo = QuantizedZoo("llama", tmp_path, (), "gptq int4 act order")
    with pytest.raises(UnsupportedModel, match=r"o_proj cannot be divided: each of 2 ranks .* 32 of its 64.*desc_act"):
        load(zoo.quantized, tensor_parallel_size=2)


def test_ranks_cannot_divide_groups_into_crumbs(tmp_path) -> None:
    """Four ranks of 24 inputs each would cut blocks of 12."""
    CHECKPOINTS["fp8 blocks of 12"] = fp8_blocks(12)
    zoo = QuantizedZoo("llama", tmp_path, (), "fp8 blocks of 12")
    with pytest.raises(UnsupportedModel, match=r"32 of its 64 inputs, and groups of 12 inputs would be cut to 4"):
        load(zoo.quantized, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama", "int8"), ("gemma2", "int8"), ("gemma4_e2b", "int8"), ("qwen2", "nf4"), ("llama", "nf4-double")],
)
def test_adapters_on_weights_quantized_at_load_answer_as_peft_on_them(tmp_path, family, quantization) -> None:
    zoo = RoundedZoo(family, tmp_path, quantization, (*FORMATS, "ia3"))
    zoo.make_adapters()
    check(zoo, make_engine(zoo.served, quantization=quantization, max_num_batched_tokens=13))


def test_quantized_weights_say_how_many_bytes_a_step_reads(tmp_path) -> None:
    zoo = FormatZoo("llama", tmp_path, ())
    exact, _ = load(zoo.base)
    rounded, _ = load(zoo.base, "int8")
    assert rounded.weight_bytes < 0.6 * exact.weight_bytes
    assert exact.weight_bytes == sum(
        p.numel() * 4
        for name, p in AutoModelForCausalLM.from_pretrained(zoo.base).named_parameters()
        if "embed_tokens" not in name
    )


def test_quantized_checkpoint_is_never_held_as_floats(tmp_path) -> None:
    zoo = QuantizedZoo("llama", tmp_path, (), "gptq int4")
    model = load_checkpoint(zoo.quantized, "float32", torch.device("cpu"))
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 21
    for linear in linears:
        assert linear.quantized.codes.nbytes == linear.in_features * linear.out_features // 2
    digest = weights_digest(model, "none")
    linears[3].codes[5, 0] ^= 1
    assert weights_digest(model, "none") != digest


VECTORS = json.loads((Path(__file__).parents[2] / "support/quantized_vectors.json").read_text())
CONFIGS = {
    "bitsandbytes nf4": CHECKPOINTS["nf4"][0],
    "bitsandbytes nf4 double": CHECKPOINTS["nf4 double"][0],
    "bitsandbytes fp4": CHECKPOINTS["nf4"][0] | {"bnb_4bit_quant_type": "fp4"},
    "bitsandbytes fp4 double": CHECKPOINTS["nf4"][0] | {"bnb_4bit_quant_type": "fp4"},
    "bitsandbytes int8": CHECKPOINTS["bitsandbytes int8"][0],
}


def decoded(vector: dict) -> torch.Tensor:
    data = bytearray(base64.b64decode(vector["data"]))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, vector["dtype"])).reshape(vector["shape"])


@pytest.mark.parametrize("name", VECTORS)
def test_what_a_formats_own_library_saved_is_read_as_it_reads_it(name: str) -> None:
    config = CONFIGS[name] if name in CONFIGS else CHECKPOINTS[name][0]
    form = format_of({"quantization_config": config})
    assert form is not None
    stored = {part: decoded(vector) for part, vector in VECTORS[name]["saved"].items()}
    wanted = decoded(VECTORS[name]["value"])
    weight = form.read(stored, wanted.shape[1], len(wanted))
    rounding = 2**-8 if name == "packed nvfp4" else 1e-6  # the library computes it in bfloat16
    torch.testing.assert_close(weight.dequantize(), wanted, rtol=rounding, atol=1e-9)


@pytest.mark.parametrize(("name", "is_double"), [("bitsandbytes nf4", False), ("bitsandbytes nf4 double", True)])
def test_nf4_made_at_load_is_what_bitsandbytes_makes(name: str, is_double: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64) * torch.logspace(-2, 0, 16)[:, None]
    theirs = decoded(VECTORS[name]["value"])
    torch.testing.assert_close(to_nf4(weight, is_double).dequantize(), theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False}, "neither"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        (CHECKPOINTS["packed int4"][0] | {"format": "nvfp4-pack-quantized"}, r"weights of \[\"\('int', 4\)\"\]"),
        (CHECKPOINTS["int8"][0] | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "hqq"}, "'hqq'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantized_checkpoint_without_a_parity_test_is_refused_by_name(config: dict, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as refused:
        format_of({"quantization_config": config})
    assert "model.quantization" in str(refused.value)


def test_checkpoint_that_is_quantized_already_is_not_quantized_again(tmp_path) -> None:
    zoo = QuantizedZoo("llama", tmp_path, (), "awq")
    with pytest.raises(UnsupportedModel, match="already"):
        load(zoo.quantized, "int8")


def test_quantized_head_and_damaged_codes_are_refused(tmp_path) -> None:
    zoo = QuantizedZoo("llama", tmp_path, (), "awq")
    file = zoo.quantized / "model.safetensors"
    whole = load_file(file)
    codes = whole["model.layers.1.mlp.up_proj.qweight"]
    save_file(whole | {"lm_head.qweight": codes.clone()}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="lm_head is quantized"):
        load(zoo.quantized)
    save_file(whole | {"model.layers.1.mlp.up_proj.qweight": codes[:-8].clone()}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="up_proj cannot be read as awq"):
        load(zoo.quantized)
