"""Writes quantized_vectors.json: small weights as the formats' own libraries save them, and what these read back.

    pip install bitsandbytes compressed-tensors && python tests/support/make_quantized_vectors.py

The libraries are needed here only; tests read the file.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

OUT, WIDTH = 16, 64


def encoded(tensor: torch.Tensor) -> dict[str, object]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def bitsandbytes_4bit(weight: torch.Tensor, kind: str, is_double: bool) -> tuple[dict[str, Any], torch.Tensor]:
    codes, state = bnb.quantize_4bit(weight, compress_statistics=is_double, quant_type=kind)
    saved = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"weight": codes, **saved}, bnb.dequantize_4bit(codes, state)


def bitsandbytes_int8(weight: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    return {"weight": codes, "SCB": scales}, bnb.int8_vectorwise_dequant(codes, scales)


def compressed(weight: torch.Tensor, form: str, **fields: object) -> tuple[dict[str, Any], torch.Tensor]:
    args = QuantizationArgs(**fields)
    parts = weight.view(OUT, -1, args.group_size) if args.group_size else weight.view(OUT, 1, WIDTH)
    if args.strategy == "tensor":
        parts = weight.view(1, 1, -1)
    whole = generate_gparam(weight.amin(), weight.amax()) if args.strategy == "tensor_group" else None
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=whole)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    state |= {} if whole is None else {"weight_global_scale": whole}
    compressor = BaseCompressor.get_value_from_registry(form)
    saved = {key: tensor.contiguous() for key, tensor in compressor.compress(state, scheme).items()}
    return saved, compressor.decompress(dict(saved), scheme)["weight"]


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUT, WIDTH) * torch.logspace(-2, 0, OUT)[:, None]
    made = {
        **{
            f"bitsandbytes {kind}{' double' * is_double}": bitsandbytes_4bit(weight, kind, is_double)
            for kind in ("nf4", "fp4")
            for is_double in (False, True)
        },
        "bitsandbytes int8": bitsandbytes_int8(weight),
        "packed int4": compressed(
            weight, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True
        ),
        "packed int4 asymmetric": compressed(
            weight, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False
        ),
        "int8": compressed(weight, "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        "fp8 channels": compressed(weight, "float-quantized", num_bits=8, type="float", strategy="channel"),
        "fp8 tensor": compressed(weight, "float-quantized", num_bits=8, type="float", strategy="tensor"),
        "packed mxfp4": compressed(weight, "mxfp4-pack-quantized", **MXFP4A16["weights"].model_dump()),
        "packed nvfp4": compressed(weight, "nvfp4-pack-quantized", **NVFP4A16["weights"].model_dump()),
    }
    vectors = {
        name: {"saved": {key: encoded(t) for key, t in saved.items()}, "value": encoded(value.float())}
        for name, (saved, value) in made.items()
    }
    Path(__file__).with_name("quantized_vectors.json").write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
