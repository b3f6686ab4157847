"""Bases saved in the formats of quantized checkpoints, written by each format's public definition, and their twins.

A twin is the same base with the dequantized weights in float32, on which PEFT runs. It does not use `loramux_kernels`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from formats import FormatZoo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""A checkpoint's tensors of one linear, and the weight that they represent, in float32."""
Write = Callable[[torch.Tensor], Written]
Config = dict[str, Any]

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = tuple(sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def rounded(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes `[out, in]`, scales and zero points `[out, groups]`, each input's group, and the weight."""
    groups = math.ceil(weight.shape[1] / group)
    index = torch.arange(weight.shape[1]) // group
    if order is not None:
        index = index[order]
    highest, middle = (1 << bits) - 1, 1 << bits - 1
    scales, zeros = torch.empty(len(weight), groups), torch.full((len(weight), groups), float(middle))
    for g in range(groups):
        part = weight[:, index == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = part.abs().amax(1) / (middle - 1) if symmetric else (high - low) / highest
        if not symmetric:
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, highest)
    scales = scales.to(dtype).float()
    codes = (weight / scales[:, index] + zeros[:, index]).round().clamp(0, highest)
    return codes.int(), scales, zeros.int(), index, (codes - zeros[:, index]) * scales[:, index]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32`[n, m * bits / 32]`, lowest bits first."""
    per = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per)).long().view(len(codes), -1, per)
    words = (codes << torch.arange(per) * bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq(bits: int, group: int, act_order: bool = False, symmetric: bool = False) -> tuple[Config, Write]:
    config: Config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": symmetric,
    }

    def write(weight: torch.Tensor) -> Written:
        width = weight.shape[1]
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if act_order else None
        size = width if group == -1 else group
        codes, scales, zeros, index, value = rounded(weight, bits, size, symmetric, torch.float16, order)
        return {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed(zeros.T - 1, bits),
            "scales": scales.T.contiguous().half(),
            "g_idx": index.int(),
        }, value

    return config, write


def awq(group: int) -> tuple[Config, Write]:
    config: Config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def columns(codes: torch.Tensor) -> torch.Tensor:
        return packed(codes.view(len(codes), -1, 8)[..., torch.tensor(AWQ_ORDER)].flatten(1), 4)

    def write(weight: torch.Tensor) -> Written:
        codes, scales, zeros, _, value = rounded(weight, 4, group, False, torch.float16)
        tensors = {"qweight": columns(codes.T), "qzeros": columns(zeros.T), "scales": scales.T.contiguous().half()}
        return tensors, value

    return config, write


def bitsandbytes_nf4(is_double: bool) -> tuple[Config, Write]:
    config: Config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config["bnb_4bit_use_double_quant"] = is_double

    def write(weight: torch.Tensor) -> Written:
        blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        largest = blocks.abs().amax(1)
        codes = (blocks[..., None] / largest[:, None, None] - torch.tensor(NF4)).abs().argmin(-1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors: Tensors = {"weight.quant_map": torch.tensor(NF4)}
        if is_double:
            mean, table = largest.mean(), torch.linspace(-1, 1, 256)
            highest = (largest - mean).abs().amax()
            of_scale = ((largest - mean)[:, None] / highest - table).abs().argmin(1)
            largest = table[of_scale] * highest + torch.tensor(mean.item())
            state |= {"nested_blocksize": 256, "nested_offset": mean.item(), "nested_dtype": "float32"}
            tensors |= {"weight.absmax": of_scale.to(torch.uint8), "weight.nested_absmax": highest[None]}
            tensors["weight.nested_quant_map"] = table
        else:
            tensors["weight.absmax"] = largest
        flat = codes.flatten()[: weight.numel()].to(torch.uint8)
        tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        saved = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors["weight.quant_state.bitsandbytes__nf4"] = saved
        value = torch.tensor(NF4)[codes] * largest[:, None]
        return tensors, value.flatten()[: weight.numel()].view(weight.shape)

    return config, write


def bitsandbytes_int8() -> tuple[Config, Write]:
    def write(weight: torch.Tensor) -> Written:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round()
        tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes * (largest / 127)[:, None]

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, write


def compressed_tensors(form: str, weights: Config, activations: Config | None = None) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def packed_int(bits: int, group: int, symmetric: bool) -> tuple[Config, Write]:
    scheme = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}

    def write(weight: torch.Tensor) -> Written:
        codes, scales, zeros, _, value = rounded(weight, bits, group, symmetric, torch.bfloat16)
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
        return tensors, value

    return compressed_tensors("pack-quantized", scheme), write


def int8_channels() -> tuple[Config, Write]:
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None, "symmetric": True}
    dynamic = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}

    def write(weight: torch.Tensor) -> Written:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127)
        return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()

    return compressed_tensors("int-quantized", scheme, dynamic), write


def fp8_channels(strategy: str) -> tuple[Config, Write]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "group_size": None, "symmetric": True}
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}

    def write(weight: torch.Tensor) -> Written:
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()[None]
        scales = (largest / 448).bfloat16()
        codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()

    return compressed_tensors("float-quantized", scheme, dynamic), write


def fp8_blocks(block: int) -> tuple[Config, Write]:
    def write(weight: torch.Tensor) -> Written:
        rows, columns = (math.ceil(size / block) for size in weight.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[: len(weight), : weight.shape[1]] = weight
        scales = padded.view(rows, block, columns, block).abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: len(weight), : weight.shape[1]]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread

    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}, write


def packed_fp4(form: str, group: int) -> tuple[Config, Write]:
    strategy = "group" if form == "mxfp4" else "tensor_group"
    scheme = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True}

    def write(weight: torch.Tensor) -> Written:
        if form == "mxfp4":
            stored, value = mxfp4(weight)
            return {"weight_packed": stored["blocks"].flatten(-2), "weight_scale": stored["scales"]}, value
        blocks = weight.unflatten(-1, (-1, group))
        largest = blocks.abs().amax(-1)
        whole = 448 * 6 / largest.amax()[None]
        scales = (largest * whole / 6).to(torch.float8_e4m3fn)
        codes, value = e2m1(blocks, scales.float() / whole)
        return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": whole}, value

    return compressed_tensors(f"{form}-pack-quantized", scheme), write


CHECKPOINTS = {
    "gptq int4": gptq(4, 32),
    "gptq int4 symmetric channels": gptq(4, -1, symmetric=True),
    "gptq int4 act order": gptq(4, 16, act_order=True),
    "gptq int8": gptq(8, 32, symmetric=True),
    "awq": awq(32),
    "nf4": bitsandbytes_nf4(is_double=False),
    "nf4 double": bitsandbytes_nf4(is_double=True),
    "bitsandbytes int8": bitsandbytes_int8(),
    "packed int4": packed_int(4, 32, symmetric=True),
    "packed int4 asymmetric": packed_int(4, 16, symmetric=False),
    "packed int8": packed_int(8, 32, symmetric=True),
    "int8": int8_channels(),
    "fp8 channels": fp8_channels("channel"),
    "fp8 tensor": fp8_channels("tensor"),
    "fp8 blocks": fp8_blocks(16),
    "packed mxfp4": packed_fp4("mxfp4", 32),
    "packed nvfp4": packed_fp4("nvfp4", 16),
}
"""Every format that is served, in small groups: `quantization_config`, and the writer of one linear."""


class QuantizedZoo(FormatZoo):
    """A base saved as a quantized checkpoint in `quantized`; `base` is its twin."""

    def __init__(self, family: str, root: Path, formats: tuple[str, ...], checkpoint: str) -> None:
        super().__init__(family, root, formats)
        self.quantized = root / "quantized"
        config, write = CHECKPOINTS[checkpoint]
        saved = load_file(self.base / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(self.base)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                tensors, value = write(saved.pop(f"{name}.weight"))
                saved |= {f"{name}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
                module.weight.data = value
        self.quantized.mkdir()
        save_file(saved, self.quantized / "model.safetensors", {"format": "pt"})
        fields = json.loads((self.base / "config.json").read_text())
        (self.quantized / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
        model.save_pretrained(self.base)


class Mxfp4Zoo(FormatZoo):
    """gpt-oss in its published form in `quantized`, its experts in MXFP4; `base` is its twin."""

    def __init__(self, root: Path, formats: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__("gpt_oss", root, formats, **fields)
        self.quantized = root / "quantized"
        saved = load_file(self.base / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(self.base)
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                stored, value = mxfp4(saved.pop(name).mT)
                saved |= {f"{name}_{part}": tensor for part, tensor in stored.items()}
                parameter.data = value.mT.contiguous()
        self.quantized.mkdir()
        save_file(saved, self.quantized / "model.safetensors", {"format": "pt"})
        config = json.loads((self.base / "config.json").read_text())
        published = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        (self.quantized / "config.json").write_text(json.dumps(config | {"quantization_config": published}))
        model.save_pretrained(self.base)


def mxfp4(weight: torch.Tensor) -> Written:
    """Blocks of 32 neighbours of the last dimension, by the OCP Microscaling specification 1.0."""
    blocks = weight.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2  # 2: that of the largest number of E2M1
    codes, value = e2m1(blocks, torch.exp2(exponents))
    return {"blocks": codes.unflatten(-1, (-1, 16)), "scales": (exponents + 127).to(torch.uint8)}, value


def e2m1(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of `blocks` `[..., groups, neighbours]`, two in a byte, and the weight that they represent."""
    table = torch.tensor(E2M1)
    codes = (blocks[..., None] / scales[..., None, None] - table).abs().argmin(-1)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (table[codes] * scales[..., None]).flatten(-2)
