"""Signatures and structures of the C++ operators, as abi.hpp declares them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of dtypes in calls."""

CODINGS = {"int8": 0, "int4": 1, "nf4": 2, "fp4": 2, "fp8": 3, "mxfp4": 4, "nvfp4": 5}
"""Codes of weights' codings in calls; nf4 and fp4 share one because both read a table of values."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Codes of activations in calls."""

MAX_HEAD_DIM = 512
"""Longest head that `loramux_rope` takes."""

MAX_TAPS = 7
"""Most earlier inputs of a convolution that `loramux_state_step` takes."""


class CodedWeightsAbi(ctypes.Structure):
    """Addresses of coded weights and of their scales."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "scales", "offsets", "values")),
        *((name, c_int64) for name in ("width", "group", "columns")),
    )


class LoraTableAbi(ctypes.Structure):
    """Addresses of a LoraTable's tensors."""

    _fields_ = (
        *((name, c_void_p) for name in ("a_offsets", "b_offsets", "ranks", "scales")),
        *((name, c_int64) for name in ("num_sites", "max_tiles")),
    )


class KvLayerAbi(ctypes.Structure):
    """A KvLayer's addresses and its strides in elements."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "key_scale", "value_scale")),
        *((f"{tensor}_{axis}", c_int64) for tensor in ("key", "value") for axis in ("page", "head", "token")),
        *((f"{tensor}_scale_page", c_int64) for tensor in ("key", "value")),
        *((name, c_int64) for name in ("block_size", "num_kv_heads", "key_dim", "value_dim")),
    )


class AttentionBatchAbi(ctypes.Structure):
    """Addresses of an AttentionBatch's tensors."""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens", "context_lens", "block_table", "row_ends", "key_ranges")),
        *((name, c_int64) for name in ("num_sequences", "max_blocks")),
    )


class AttentionAbi(ctypes.Structure):
    """One call of attention; 0 means no window and no soft cap."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "output", "sinks")),
        *((name, c_int64) for name in ("query_row", "query_head", "num_heads", "sliding_window")),
        *((name, c_float) for name in ("scaling", "softcap")),
        ("lse", c_void_p),
    )


class NormAbi(ctypes.Structure):
    """A Norm's parameters; without a weight nothing is normalised."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("rounds_first", c_int32))


class RmsNormAbi(ctypes.Structure):
    """One call of `rms_norm`; without a delta no value is added."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "delta", "y")),
        *((name, c_int64) for name in ("x_row", "delta_row", "rows", "width")),
        ("norm", NormAbi),
        ("factor", c_float),
    )


class RopeAbi(ctypes.Structure):
    """One call of `rope_write_kv`; with a rotary_dim of 0 no rotation is applied."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "cos", "sin", "slots")),
        *((f"{tensor}_{axis}", c_int64) for tensor in ("query", "key", "value") for axis in ("token", "head")),
        *((name, c_int64) for name in ("tokens", "num_heads", "rotary_dim", "rotation_is_float")),
        ("query_norm", NormAbi),
        ("key_norm", NormAbi),
    )


class LayerLinearAbi(ctypes.Structure):
    """A product of a layer: panels, multiplied by tiles or not, or coded weights and their coding."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "coded", "bias", "group")),
        *((name, c_int64) for name in ("panels_dtype", "by_tiles", "coding", "width", "columns")),
    )


class LayerAbi(ctypes.Structure):
    """A decoder layer; a norm without a weight is skipped."""

    _fields_ = (
        *((f"{place}_{part}", NormAbi) for part in ("attention", "network") for place in ("before", "after")),
        *((f"{heads}_norm", NormAbi) for heads in ("query", "key")),
        *((name, LayerLinearAbi) for name in ("qkv", "out", "gate_up", "down")),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("num_heads", "sliding_window", "turns", "activation")),
        *((name, c_float) for name in ("scaling", "softcap", "factor")),
    )


class LayerStepAbi(ctypes.Structure):
    """A step's arguments for every layer. Without segments no row has an adapter; without kept rows all are kept."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "cos", "sin", "slots", "pool", "table", "segments", "shrunk")),
        *((name, c_void_p) for name in ("kept", "kept_segments")),
        *((name, c_int64) for name in ("num_kept", "dtype", "rows", "rotary_dim", "rotation_is_float", "max_rank")),
    )


class StateStepAbi(ctypes.Structure):
    """One token of sequences that decode, in a layer that keeps states; without `b` the rule is Mamba 2's."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "a", "b", "shift", "kernel", "bias", "decay", "skip")),
        *((name, c_void_p) for name in ("units", "tables", "rows", "in_prompt", "out")),
        *((f"{tensor}_{axis}", c_int64) for tensor in ("query", "key") for axis in ("row", "head")),
        *((f"{tensor}_{axis}", c_int64) for tensor in ("value", "a", "b") for axis in ("row", "group")),
        *((name, c_int64) for name in ("table_row", "page_stride", "per_page", "unit", "first")),
        *((name, c_int64) for name in ("num_sequences", "key_heads", "heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("channels", "taps", "is_delta")),
        *((name, c_float) for name in ("delta_factor", "least", "most")),
    )


class DrawAbi(ctypes.Structure):
    """Parameters for drawing the token of one row of logits."""

    _fields_ = (
        *((name, c_int64) for name in ("row", "top_k")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "number")),
    )


class RuntimeAbi(ctypes.Structure):
    """Functions of the OpenMP runtime that torch has loaded."""

    _fields_ = tuple((name, c_void_p) for name in ("parallel", "thread", "threads"))


_LORA = (POINTER(LoraTableAbi), c_void_p, c_void_p)  # table, group, segments

_LINEAR = (c_int, c_int, c_void_p, *(c_int64,) * 3, *(c_void_p,) * 3, c_int64, c_int64, c_int)

SIGNATURES = {
    "loramux_use_runtime": (RuntimeAbi,),
    "loramux_lora_shrink": (c_int, c_void_p, *(c_int64,) * 3, c_void_p, *_LORA, c_void_p, c_int64, c_int),
    "loramux_lora_expand": (c_int, c_void_p, c_int64, c_void_p, *_LORA, c_void_p, c_int64, c_int64, c_int),
    "loramux_linear_pack": (c_int, c_int, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int),
    "loramux_linear": _LINEAR,
    "loramux_tile_linear": (c_void_p, *(c_int64,) * 3, *(c_void_p,) * 3, c_int64, c_int64, c_int),
    "loramux_rows_linear": (*_LINEAR[:-1], *(c_int64,) * 3, c_int),
    "loramux_coded_linear": (
        c_int, c_int, c_void_p, c_int64, c_int64, POINTER(CodedWeightsAbi), c_void_p, c_void_p, c_int64, c_int64, c_int,
    ),
    "loramux_attention": (c_int, POINTER(AttentionAbi), POINTER(KvLayerAbi), POINTER(AttentionBatchAbi), c_int),
    "loramux_write_kv": (
        c_int, POINTER(KvLayerAbi), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int,
    ),
    "loramux_rms_norm": (c_int, POINTER(RmsNormAbi), c_int),
    "loramux_rope": (c_int, POINTER(RopeAbi), POINTER(KvLayerAbi), c_int),
    "loramux_draw_tokens": (c_int, c_void_p, c_int64, c_int64, POINTER(DrawAbi), c_int64, c_void_p, c_int),
    "loramux_most_likely": (c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),
    "loramux_gated": (
        c_int, c_int, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int,
    ),
    "loramux_state_step": (c_int, POINTER(StateStepAbi), c_int),
    "loramux_layers": (
        POINTER(LayerAbi), POINTER(c_void_p), c_int64, POINTER(LayerStepAbi), POINTER(AttentionBatchAbi), c_int,
    ),
}  # fmt: skip
"""Argument types of the functions that return nothing."""
