"""A checkpoint as one rank reads it: the tensors of a narrower model, of which only the rank's shares are read.

transformers loads a model from lazily read slices of safetensors files. Here each slice is a rank's share, and the
model is made from the narrowed config. So transformers itself renames, stacks experts and ties weights.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from loramux.engine.execution.attention import UnsupportedModel
from loramux_adapters.base import MODEL_LOCK, BaseDescription, auto_class
from loramux_adapters.families import reads_other_inputs, tensors_of_heads
from loramux_adapters.sharding import Sharding, is_held_by


@dataclass(frozen=True, slots=True)
class CheckpointShare:
    """The share of `rank` in a divided base."""

    base: BaseDescription
    """The whole base."""
    sharding: Sharding
    rank: int


class ShardedTensor:
    """A rank's share of one tensor of a file; read when it is indexed by `...`."""

    def __init__(self, source: Any, key: str, sharding: Sharding, rank: int) -> None:
        """`source`: the result of safetensors' `get_slice`."""
        self._source = source
        shape: list[int] = source.get_shape()
        cuts = sharding.tensor_cuts(key, shape, rank)
        self._is_zero = cuts is None
        self._cuts = cuts or [None] * len(shape)
        self._whole = shape
        self._rows = sharding.length_of(key, shape[0]) if sharding.is_vocabulary(key) else None

    def get_shape(self) -> list[int]:
        """Return the share's shape."""
        shape = [n if cut is None else sum(map(len, cut)) for n, cut in zip(self._whole, self._cuts, strict=True)]
        return shape if self._rows is None else [self._rows, *shape[1:]]

    @property
    def shape(self) -> torch.Size:
        """The share's shape."""
        return torch.Size(self.get_shape())

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return str(self._source.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the share; `index` is `...`."""
        assert index is Ellipsis, "transformers reads whole tensors"
        if self._is_zero:
            return torch.zeros_like(self._source[...])
        found = self._read(0, ())
        if self._rows is not None and len(found) < self._rows:
            return torch.cat((found, found.new_zeros(self._rows - len(found), *found.shape[1:])))
        return found

    def _read(self, place: int, index: tuple[slice, ...]) -> torch.Tensor:
        """Read the pieces along the dimensions from `place` on, and join them."""
        if place == len(self._whole):
            read: torch.Tensor = self._source[index] if index else self._source[...]
            return read
        cut = self._cuts[place]
        if cut is None:
            return self._read(place + 1, (*index, slice(None)))
        pieces = [self._read(place + 1, (*index, slice(piece.start, piece.stop))) for piece in cut]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=place)


@contextmanager
def sharded_tensors(
    directory: Path, sharding: Sharding, rank: int, without: Collection[str] = ()
) -> Iterator[dict[str, ShardedTensor]]:
    """Open a checkpoint's files and yield the rank's share of every tensor of the base that the rank holds. Of the
    modules `without`, only biases are yielded. Raises UnsupportedModel."""
    with ExitStack() as files:
        opened = [files.enter_context(safe_open(path, framework="pt")) for path in safetensors_of(directory)]
        of_heads = tensors_of_heads(sharding.config, (key for file in opened for key in file.keys()))  # noqa: SIM118
        found: dict[str, ShardedTensor] = {}
        for file in opened:
            for key in file.keys():  # noqa: SIM118
                is_read = key not in of_heads and (key.endswith(".bias") or module_of(key, without) is None)
                if is_read and is_held_by(rank, key):
                    found[key] = ShardedTensor(file.get_slice(key), key, sharding, rank)
        yield found


def with_dot(key: str) -> str:
    """Return a tensor's name with a dot after the name of the quantized weight that it is a part of.

    MXFP4's two tensors of a mixture's stacked weights are the only ones that are saved without the dot.
    """
    return re.sub(r"_(blocks|scales)$", r".\1", key)


def module_of(key: str, modules: Collection[str]) -> str | None:
    """Return the module, of `modules`, that the tensor `key` belongs to; the tensor's own name may have dots. None:
    none."""
    name = with_dot(key)
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return name
    return None


def safetensors_of(directory: Path) -> list[Path]:
    """Return the files of a checkpoint. Raises UnsupportedModel if they have another format."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_bytes())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    if not (directory / "model.safetensors").is_file():
        raise UnsupportedModel(
            f"{directory} holds no model.safetensors: quantized weights, and the shares of ranks "
            f"(engine.tensor_parallel_size > 1), are read from that format. Save the model again with "
            f"safe_serialization=True."
        )
    return [directory / "model.safetensors"]


def files_by_key(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint. Raises UnsupportedModel."""
    found: dict[str, Path] = {}
    for path in safetensors_of(directory):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def holds_safetensors(directory: Path) -> bool:
    """Are the checkpoint's weights in safetensors files?"""
    return any((directory / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def load_share_of(
    directory: Path,
    config: PretrainedConfig,
    dtype: str | torch.dtype,
    share: CheckpointShare,
    quantized: Collection[str] = (),
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a share; return it with transformers' report. The linears `quantized` are left empty.

    Raises UnsupportedModel, CannotShard.
    """
    model_class, narrowed = _narrowed_class(share.sharding)
    if share.rank:
        model_class = _derived(model_class, _remove_towers)
    if quantized:
        narrowed.quantization_config = config.quantization_config
    with sharded_tensors(directory, share.sharding, share.rank, without=quantized) as tensors:
        model, report = model_class.from_pretrained(
            None,
            config=narrowed,
            state_dict=tensors,
            dtype=_dtype(config, tensors) if dtype == "auto" else dtype,
            output_loading_info=True,
            experts_implementation="eager",  # others need rows of whole cache lines; ours replace it later
            ignore_mismatched_sizes=True,  # they are in the report, which is checked
        )
    _restore_vocabulary(model, config)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model, report


def empty_model(sharding: Sharding) -> PreTrainedModel:
    """Make a rank's model without memory, on the meta device."""
    model_class, narrowed = _narrowed_class(sharding)
    with MODEL_LOCK, torch.device("meta"):
        model: PreTrainedModel = model_class(narrowed)
    _restore_vocabulary(model, sharding.config)
    model.config.return_dict = True
    model.config.output_hidden_states = model.config.output_attentions = False
    return model.eval()


def _narrowed_class(sharding: Sharding) -> tuple[Any, PretrainedConfig]:
    """Return the class of a rank's model, and the config from which it is made."""
    narrowed = sharding.narrowed_config()
    model_class = auto_class(narrowed)._model_mapping[type(narrowed)]
    if sharding.family.derives_head_width:
        narrowed = copy.deepcopy(sharding.config)
        model_class = _derived(model_class, partial(_narrow_parameters, sharding))
    if model_class.config_class is narrowed.sub_configs.get("text_config"):  # the text alone, as AutoModel does
        narrowed = narrowed.get_text_config()
    return model_class, narrowed


def _derived(model_class: Any, change: Callable[[nn.Module], None]) -> Any:
    """Return a class that makes the whole model, on the meta device, and then calls `change` with it."""

    def make(self: Any, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        change(self)

    # The new class has the old one's name and module, because transformers finds the renamings of checkpoints by both.
    names = {"__init__": make, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), names)


def _narrow_parameters(sharding: Sharding, model: nn.Module) -> None:
    """Cut the parameters of a whole model to a rank's share."""
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        shape = list(parameter.shape)
        if (cuts := sharding.tensor_cuts(name, shape, 0)) is not None:
            narrow = [n if cut is None else sum(map(len, cut)) for n, cut in zip(shape, cuts, strict=True)]
            if narrow != shape:
                setattr(module, name.rpartition(".")[2], nn.Parameter(parameter.new_empty(narrow)))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _remove_towers(model: nn.Module) -> None:
    """Leave out the modules that read images or sound, of which rank 0 sends the results."""
    towers = [name for name, _ in model.named_modules() if reads_other_inputs(f"{name}.")]
    for name in towers:
        if not reads_other_inputs(name):
            model.set_submodule(name, nn.Identity())


def _restore_vocabulary(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Set the size of the whole vocabulary and its padding token, because some models compare token ids with them."""
    whole, text = config.get_text_config().vocab_size, model.config.get_text_config()
    text.pad_token_id = config.get_text_config().pad_token_id
    for module in model.modules():
        if getattr(module, "vocab_size", None) == text.vocab_size:
            module.vocab_size = whole
    text.vocab_size = whole


def _dtype(config: PretrainedConfig, tensors: dict[str, ShardedTensor]) -> torch.dtype:
    """Return the dtype in which the checkpoint was saved: the config's, or that of its first matrix."""
    named = getattr(config, "dtype", None)
    if named is not None:
        return named if isinstance(named, torch.dtype) else getattr(torch, named)
    matrix = next(tensor for tensor in tensors.values() if len(tensor.get_shape()) > 1)
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(matrix.get_dtype(), torch.float32)
