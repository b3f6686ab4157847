"""Checkpoints whose linears are saved as codes: the formats, and how each stores a weight.

A format names the tensor by which a linear is known to be quantized (`marker`), and turns the linear's stored tensors
into a `QuantizedWeight`. Linears that are not quantized stay as they are. transformers makes the model and loads the
rest. Its quantizer, an extension point, puts a `QuantizedLinear` in the place of a linear with codes, and
`QuantizedExperts` in the place of a mixture's stacked weights, so memory never holds the weight itself. Activations are
never rounded: formats that would round them (W8A8) are served with rounded weights alone, which is more exact.

Sources: the saved layouts of AutoGPTQ and GPTQModel, AutoAWQ's "gemm" version, bitsandbytes' quant_state,
compressed-tensors' pack-, int- and float-quantized compressors, block-wise FP8, and MXFP4 of experts.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.sharded_checkpoint import CheckpointShare, files_by_key, module_of, with_dot
from loramux_adapters.base import BaseDescription, LinearShape, expert_parameters, expert_weights
from loramux_adapters.base_weights import QuantizedExperts, QuantizedLinear
from loramux_adapters.checkpoint_config import quant_method, refusal_of_quantization, schemes_of
from loramux_adapters.experts import probe_quantized_experts
from loramux_adapters.families import tensors_of_heads
from loramux_kernels.quantized_weight import Coding, QuantizedWeight, blocks_of_rows, pack_nibbles

Stored = Mapping[str, torch.Tensor]
"""Stored tensors of one linear, by the last part of their names."""
Track = Callable[[Collection[tuple[str, QuantizedLinear]]], Iterable[tuple[str, QuantizedLinear]]]
"""Function that iterates over linears and reports the number done."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight, to which each four bits of AWQ's integers belong."""


CODES = frozenset(("qweight", "weight_packed", "weight", "blocks"))
SCALES = frozenset(("scales", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax"))
EXPONENTS = frozenset(("scales", "weight_scale"))
"""Names of SCALES that are exponents if they are uint8, and are held as they are."""
ZEROS = frozenset(("qzeros", "weight_zero_point"))
"""Names of a stored linear's zero points, in all formats."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantized checkpoints."""

    name: str
    """Name of the format in facts, logs and reports."""
    markers: tuple[str, ...]
    """Last parts of tensor names; a quantized linear has one of them."""
    read: Callable[[Stored, int, int], QuantizedWeight]
    """Function that makes the weight from the stored tensors, in_features and out_features. Raises ValueError with a
    reason."""


def format_of(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format that `quantization_config` of config.json names; None if there is none.

    Raises UnsupportedModel for a format that no test has compared with PEFT's answers.
    """
    fields: dict[str, Any] | None = config.get("quantization_config")
    if not fields:
        return None
    if (refusal := refusal_of_quantization(fields)) is not None:
        raise UnsupportedModel(refusal)
    return METHODS[quant_method(fields)](fields)


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _gptq(fields: dict[str, Any]) -> WeightFormat:
    bits: int = fields["bits"]
    # The first version of the format saves zero points minus one.
    more = 1 if (fields.get("checkpoint_format") or "gptq") == "gptq" else 0

    def read(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
        codes = _unpack(stored["qweight"].T, bits)[:, :in_features]
        zeros = _unpack(stored["qzeros"], bits)[:, :out_features].float() + more
        scales = stored["scales"].float()
        order, group = None, _group_of(in_features, len(scales), fields.get("group_size"))
        if (index := stored.get("g_idx")) is not None and not _is_in_order(index, group):
            order = torch.argsort(index, stable=True)
            _require(_is_in_order(index[order], group), "groups of different sizes (g_idx)")
            codes = codes[:, order]
        return _integers(codes, bits, scales.T, zeros.T, group, order)

    return WeightFormat(f"gptq-int{bits}", ("qweight",), read)


def _awq(fields: dict[str, Any]) -> WeightFormat:
    def read(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
        def columns(packed: torch.Tensor) -> torch.Tensor:
            codes = _unpack(packed, 4).view(len(packed), -1, 8)
            return codes[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)[:, :out_features]

        codes, scales = columns(stored["qweight"]).T, stored["scales"].float()
        zeros = columns(stored["qzeros"]).float()
        group = _group_of(in_features, len(scales), fields.get("group_size", fields.get("q_group_size")))
        return _integers(codes, 4, scales.T, zeros.T, group)

    return WeightFormat("awq-int4", ("qweight",), read)


def _bitsandbytes(fields: dict[str, Any]) -> WeightFormat:
    if fields.get("load_in_8bit"):
        return WeightFormat("bitsandbytes-int8", ("SCB",), _read_bitsandbytes_int8)
    kind = fields.get("bnb_4bit_quant_type", "fp4")
    return WeightFormat(f"bitsandbytes-{kind}", (f"weight.quant_state.bitsandbytes__{kind}",), _read_bitsandbytes_4bit)


def _read_bitsandbytes_int8(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
    codes, layout = stored["weight"], stored.get("weight_format")
    _require(codes.dtype == torch.int8 and codes.shape == (out_features, in_features), "weights of another form")
    _require(layout is None or int(layout) == 0, "weights that are not in rows (weight_format)")
    return _signed_bytes(codes, stored["SCB"].float()[:, None] / 127, in_features)


def _read_bitsandbytes_4bit(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
    state_name = next(name for name in stored if "quant_state" in name)
    state = json.loads(bytes(stored[state_name].tolist()))
    _require(tuple(state["shape"]) == (out_features, in_features), f"a weight of shape {state['shape']}")
    packed, scales = stored["weight"].flatten(), stored["weight.absmax"]
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: out_features * in_features]
    if (table := stored.get("weight.nested_quant_map")) is not None:
        per = torch.arange(len(scales)) // state["nested_blocksize"]
        scales = table.float()[scales.long()] * stored["weight.nested_absmax"].float()[per] + state["nested_offset"]
    coding: Coding = "nf4" if state["quant_type"] == "nf4" else "fp4"
    rows = pack_nibbles(codes.view(out_features, in_features))
    return blocks_of_rows(coding, rows, scales.float(), state["blocksize"], in_features)


def _compressed_tensors(fields: dict[str, Any]) -> WeightFormat:
    schemes = schemes_of(fields)
    kinds = {(scheme.get("type"), scheme.get("num_bits")) for scheme in schemes}
    size = schemes[0].get("group_size")
    block = next((tuple(scheme["block_structure"]) for scheme in schemes if scheme.get("block_structure")), None)

    def read(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
        if "weight_packed" in stored and kinds == {("float", 4)}:
            return _read_packed_floats(stored, in_features, size)
        if "weight_packed" in stored:
            return _read_packed(stored, in_features, out_features, size)
        weight, scales = stored["weight"], stored["weight_scale"].float()
        scales, group = _expanded(scales, in_features, out_features, size, block)
        if weight.dtype == torch.float8_e4m3fn:
            return _floats(weight, scales, group)
        _require(weight.dtype == torch.int8, f"weights of {weight.dtype}")
        zeros = stored.get("weight_zero_point")
        offsets = None if zeros is None else _expanded(zeros.float(), in_features, out_features, size, block)[0]
        return _signed_bytes(weight, scales, group, offsets)

    names = ", ".join(sorted(f"{kind}{bits}" for kind, bits in kinds))
    return WeightFormat(f"compressed-tensors {names}", ("weight_packed", "weight_scale"), read)


def _read_packed_floats(stored: Stored, in_features: int, size: int | None) -> QuantizedWeight:
    scales = stored["weight_scale"]
    if scales.dtype != torch.uint8:  # NVFP4 scales the groups' E4M3 scales so that they use its whole range
        scales = scales.float() / stored["weight_global_scale"].float()
    return _e2m1(stored["weight_packed"], scales, in_features, size or in_features)


def _read_packed(stored: Stored, in_features: int, out_features: int, size: int | None) -> QuantizedWeight:
    packed, scales = stored["weight_packed"], stored["weight_scale"].float()
    bits = next((bits for bits in (4, 8) if packed.shape[1] == -(-in_features * bits // 32)), None)
    if packed.dtype != torch.int32 or bits is None:
        raise ValueError(f"weight_packed of {packed.dtype} and shape {tuple(packed.shape)}")
    codes, zeros = _unpack(packed, bits)[:, :in_features], None
    if (packed_zeros := stored.get("weight_zero_point")) is not None:
        zeros = _unpack(packed_zeros.T, bits).T[:out_features].float()
    scales = scales.view(-1, 1) if scales.ndim < 2 else scales
    group = _group_of(in_features, scales.shape[1], size)
    order, index = None, stored.get("weight_g_idx")
    if index is not None and not _is_in_order(index, group):
        order = torch.argsort(index, stable=True)
        _require(_is_in_order(index[order], group), "groups of different sizes (weight_g_idx)")
        codes = codes[:, order]
    scales = scales.expand(out_features, -1)
    zeros = torch.full_like(scales, 1 << bits - 1) if zeros is None else zeros.expand(out_features, -1)
    return _integers(codes, bits, scales, zeros, group, order)


def _fp8(fields: dict[str, Any]) -> WeightFormat:
    block = tuple(fields["weight_block_size"])

    def read(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
        scales, weight = stored["weight_scale_inv"].float(), stored["weight"]
        _require(weight.dtype == torch.float8_e4m3fn, f"weights of {weight.dtype}")
        return _floats(weight, *_expanded(scales, in_features, out_features, None, block))

    return WeightFormat("fp8", ("weight_scale_inv",), read)


def _mxfp4(_fields: dict[str, Any]) -> WeightFormat:
    return WeightFormat("MXFP4", ("blocks",), _read_mxfp4)


def _read_mxfp4(stored: Stored, in_features: int, out_features: int) -> QuantizedWeight:
    """Read the experts' `blocks` uint8`[..., groups, 16]` and `scales` uint8`[..., groups]`."""
    blocks, scales = stored["blocks"], stored["scales"]
    _require(blocks.shape == (*scales.shape, 16), f"blocks of shape {list(blocks.shape)}")
    return _e2m1(blocks.reshape(out_features, -1), scales.reshape(out_features, -1), in_features, 32)


def _e2m1(codes: torch.Tensor, scales: torch.Tensor, in_features: int, size: int) -> QuantizedWeight:
    """Return the weight of `codes` uint8`[out, in / 2]`, the lower bits first, and of `scales` `[out, groups]`, which
    are exponents if they are uint8."""
    _require(codes.dtype == torch.uint8, f"codes of {codes.dtype}")
    _require(2 * codes.shape[1] == in_features, f"{2 * codes.shape[1]} codes for {in_features} inputs")
    group, is_exponent = _group_of(in_features, scales.shape[1], size), scales.dtype == torch.uint8
    _require(not is_exponent or not bool((scales == 255).any()), "scales that are not finite")
    return QuantizedWeight("mxfp4" if is_exponent else "nvfp4", codes, scales, group, in_features)


METHODS: dict[str, Callable[[dict[str, Any]], WeightFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8`[n, m * 32 / bits]`: the codes in int32`[n, m]`, lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    return (packed.contiguous()[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _integers(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
    order: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Return scales * (codes - zeros): unsigned `codes` `[out, in]`, the others `[out, groups]`."""
    offsets = zeros - (1 << bits - 1)
    rest = (scales.contiguous(), group, codes.shape[1], offsets.contiguous() if offsets.any() else None, order)
    if bits == 4:
        return QuantizedWeight("int4", pack_nibbles(codes), *rest)
    return QuantizedWeight("int8", codes.contiguous() ^ 128, *rest)


def _signed_bytes(
    codes: torch.Tensor, scales: torch.Tensor, group: int, offsets: torch.Tensor | None = None
) -> QuantizedWeight:
    return QuantizedWeight(
        "int8", codes.contiguous().view(torch.uint8), scales.contiguous(), group, codes.shape[1], offsets
    )


def _floats(codes: torch.Tensor, scales: torch.Tensor, group: int) -> QuantizedWeight:
    held = codes.contiguous().view(torch.uint8)
    _require(not bool(((held & 127) == 127).any()), "weights that are not finite")
    return QuantizedWeight("fp8", held, scales.contiguous(), group, codes.shape[1])


def _expanded(
    scales: torch.Tensor, in_features: int, out_features: int, size: int | None, block: tuple[int, ...] | None
) -> tuple[torch.Tensor, int]:
    """Return scales of a tensor, of channels, of groups or of blocks as `[out_features, groups]`, and the group."""
    if block is not None:
        return scales.repeat_interleave(block[0], 0)[:out_features], block[1]
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(out_features, 1), in_features
    scales = scales.view(out_features, -1)
    return scales, _group_of(in_features, scales.shape[1], size)


def _group_of(in_features: int, groups: int, size: int | None) -> int:
    """Return the length of each of `groups` groups; raises ValueError if config.json has another length."""
    group = size if size is not None and size > 0 and groups > 1 else in_features
    _require(-(-in_features // group) == groups, f"{groups} groups of {group} for {in_features} inputs")
    return group


def _is_in_order(index: torch.Tensor, group: int) -> bool:
    return torch.equal(index.long(), torch.arange(len(index)) // group)


@register_quantization_config("loramux")
class _AsStored(QuantizationConfigMixin):
    """Quantization config with which transformers leaves the quantized linears empty."""

    def __init__(self, linears: list[str], quant_method: str = "loramux", **_: Any) -> None:
        self.quant_method = quant_method
        self.linears = linears


def _empty(owner: Any, attribute: str, head: nn.Module | None) -> QuantizedLinear | None:
    """Return what holds the codes of a linear, or of a mixture's stacked weights, of `owner`; None if this `attribute`
    is neither.

    The forward of `owner` is replaced until the experts are packed.
    """
    held = getattr(owner, attribute, None)
    if isinstance(held, nn.Linear) and held is not head:
        return QuantizedLinear(held.in_features, held.out_features, held.bias is not None, held.weight.dtype)
    if not isinstance(held, nn.Parameter) or held.ndim != 3 or attribute not in expert_parameters(owner):
        return None
    num_experts, out_features, in_features = expert_weights(owner, attribute).shape
    empty = QuantizedExperts(num_experts, in_features, out_features, held.dtype)
    delattr(owner, attribute)
    owner.forward = partial(probe_quantized_experts, owner)
    return empty


@register_quantizer("loramux")
class _Replacing(HfQuantizer):
    """Makes room for codes in the place of each linear that has them, before transformers loads the rest."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        assert isinstance(self.quantization_config, _AsStored), "registered for it"
        for name in self.quantization_config.linears:
            parent, attribute = name.rpartition(".")[::2]
            try:
                owner = model.get_submodule(parent)
            except AttributeError:
                owner = None
            empty = _empty(owner, attribute, model.get_output_embeddings())
            if empty is None:
                raise UnsupportedModel(
                    f"{name} is quantized in the checkpoint and is no linear of the model's layers: quantized heads, "
                    f"experts of other formats than MXFP4 and models of images are not served. Give the checkpoint "
                    f"that it was made from, with model.quantization if its weights take too much memory."
                )
            setattr(owner, attribute, empty)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        """Return False: the model is never saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Return False: the model is never trained."""
        return False


def coded_linears(keys: Iterable[str], form: WeightFormat) -> set[str]:
    """Return the names of the linears that are stored as codes, by the names of their tensors."""
    endings = tuple(f".{marker}" for marker in form.markers)
    return {key.removesuffix(ending) for key in map(with_dot, keys) for ending in endings if key.endswith(ending)}


def quantized_linears(directory: Path, config: PretrainedConfig, form: WeightFormat) -> list[str]:
    """Return the names of the base's linears that the checkpoint in `directory` stores as codes. Raises
    UnsupportedModel."""
    keys = files_by_key(directory).keys()
    found = sorted(coded_linears(keys - tensors_of_heads(config, keys).keys(), form))
    if not found:
        raise UnsupportedModel(f"{directory}: config.json says that it is quantized ({form.name}), and no linear is.")
    return found


def loading_config(config: PretrainedConfig, linears: list[str]) -> PretrainedConfig:
    """Change `config` so that transformers leaves `linears` empty."""
    config.quantization_config = {"quant_method": "loramux", "linears": linears}
    return config


def read_quantized(
    model: PreTrainedModel, directory: Path, form: WeightFormat, share: CheckpointShare | None, track: Track
) -> set[str]:
    """Fill the empty linears of `model` from the files in `directory`; returns the names of the tensors that were read.

    Only one linear's stored tensors are in memory at a time; `share` of each weight is kept (None: all). Raises
    UnsupportedModel for tensors that `form` cannot read, and for a linear whose groups the ranks cannot divide.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    parts = _stored_parts(directory, linears)
    for name, linear in track(linears.items()):
        if linear.bias is not None:
            parts[name].pop("bias", None)
        whole = linear if share is None else whole_shape(share.base, name)
        assert whole is not None, "put in its place by name"
        stored = {part: read_tensor(path, key) for part, (path, key) in parts[name].items()}
        try:
            weight = read_weight(stored, form, whole.in_features, whole.out_features)
        except ValueError as error:
            raise UnsupportedModel(f"{directory}: {name} {error}") from error
        linear.hold(weight if share is None else _share_of(weight, name, share))
    return {key for named in parts.values() for _, key in named.values()}


def read_weight(
    stored: dict[str, torch.Tensor], form: WeightFormat, in_features: int, out_features: int
) -> QuantizedWeight:
    """Make a linear's weight from its `stored` tensors, by the last part of their names. Raises ValueError."""
    try:
        _require(not stored.pop("bias", torch.zeros(1)).any(), "a bias that config.json does not have")
        weight = form.read(stored, in_features, out_features)
        _require(weight.shape == (out_features, in_features), f"a weight of shape {weight.shape}")
        _require(bool(torch.isfinite(weight.scales).all()), "scales that are not finite")
    except (ValueError, KeyError, RuntimeError, IndexError) as error:
        raise ValueError(f"cannot be read as {form.name}: {error}") from error
    return weight


def whole_shape(base: BaseDescription, name: str) -> LinearShape | None:
    """Return the shape of a weight that is read as one: a linear's, or that of all experts, their outputs one after the
    other. None if `base` has no weight of this name."""
    if (experts := base.parameters.get(name)) is None:
        return base.modules.get(name)
    return LinearShape(experts.in_features, experts.num_experts * experts.out_features, experts.layer)


def held_bytes(directory: Path, linears: Mapping[str, LinearShape]) -> dict[str, int]:
    """Estimate the bytes that each of the quantized `linears` takes in memory: codes as stored, scales and zero points
    in float32, scales that are exponents as stored."""
    found: dict[str, int] = {}
    for name, stored in _stored_parts(directory, linears).items():
        rows, codes, scales = linears[name].out_features, 0, linears[name].out_features
        scale_bytes = 4
        for part, (path, key) in stored.items():
            with safe_open(path, framework="pt") as file:
                held = file.get_slice(key)
                shape, dtype = held.get_shape(), held.get_dtype()
            if part in CODES:
                codes = math.prod(shape) * (4 if dtype == "I32" else 1)
            elif part in SCALES:  # several rows, if the scales are of blocks
                of_blocks = part.startswith("weight_scale") and len(shape) == 2
                scales = max(rows * shape[1] if of_blocks else math.prod(shape), rows)
                scale_bytes = 1 if dtype == "U8" and part in EXPONENTS else 4
        found[name] = codes + scale_bytes * scales * (2 if any(part in ZEROS for part in stored) else 1)
    return found


def _share_of(weight: QuantizedWeight, name: str, share: CheckpointShare) -> QuantizedWeight:
    """Return the rank's part of a whole linear's weight: rows, or columns with the scales of their groups."""
    sharding, (rows, columns) = share.sharding, weight.shape
    inputs = sharding.inputs(name, share.rank, columns)
    experts = share.base.parameters.get(name)
    num_experts = 1 if experts is None else experts.num_experts
    outputs = sharding.outputs(name, share.rank, rows // num_experts)
    if outputs is not None:
        starts = range(0, rows, rows // num_experts)
        outputs = tuple(range(start + part.start, start + part.stop) for start in starts for part in outputs)
    try:
        return weight.taken(outputs, inputs)
    except ValueError as error:
        each = sum(map(len, inputs or ()))
        raise UnsupportedModel(
            f"{name} cannot be divided: each of {sharding.size} ranks would hold {each} of its {columns} inputs, and "
            f"{error}. Set engine.tensor_parallel_size so that a rank's inputs are whole groups, or to 1"
            f"{', or give a checkpoint that was quantized without desc_act' if weight.order is not None else ''}."
        ) from error


def read_tensor(path: Path, key: str) -> torch.Tensor:
    """Read one tensor of a file."""
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(key)
        return tensor


def _stored_parts(directory: Path, linears: Collection[str]) -> dict[str, dict[str, tuple[Path, str]]]:
    """Return the file and the name of each tensor of `linears`, by linear and by the last part of its name."""
    found: dict[str, dict[str, tuple[Path, str]]] = defaultdict(dict)
    for key, path in files_by_key(directory).items():
        if (name := module_of(key, linears)) is not None:
            found[name][with_dot(key).removeprefix(f"{name}.")] = path, key
    return found
