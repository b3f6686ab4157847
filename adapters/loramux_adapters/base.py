"""What an adapter must fit: the linears of the base model, known from its config.json without reading a weight."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loramux_adapters.errors import BaseUnusable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear of the base."""

    in_features: int
    out_features: int
    layer: int | None
    """The decoder layer that it stands in."""
    transposed: bool = False
    """The weight is stored `[in, out]` (GPT-2's Conv1D); an adapter's A and B are as for any other."""


@dataclass(frozen=True, slots=True)
class BaseDescription:
    """The base model as adapters see it. Plain data: it can be compared, pickled and sent."""

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    modules: Mapping[str, LinearShape]
    """The linears that an adapter may touch, in the model's order. The output head is not one of them."""
    others: Mapping[str, str]
    """Every other module: its name and its class."""
    output_head: str | None
    fingerprint: str
    """sha256 over the linears' names and shapes: equal exactly where the same adapters fit."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every module's name, as PEFT walks them when it looks for targets."""
        return (*self.modules, *self.others)


def describe_base(model_dir: Path) -> BaseDescription:
    """Describe the checkpoint in `model_dir` from its config.json, on the meta device. Raises BaseUnusable."""
    # Here and not above: those who only check files against a description need neither library.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model_dir / "config.json").is_file():
        raise BaseUnusable(f"{model_dir} holds no config.json; give the folder of a local transformers checkpoint.")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise BaseUnusable(f"{model_dir} is not a causal language model that transformers knows: {error}") from error
    return describe_model(model)


def describe_model(model: PreTrainedModel) -> BaseDescription:
    """Describe a transformers model that exists already, before any of its modules was replaced."""
    head = model.get_output_embeddings()
    modules: dict[str, LinearShape] = {}
    others: dict[str, str] = {}
    output_head = None
    for name, module in model.named_modules():
        shape = _linear_shape(name, module)
        if module is head:
            output_head = name
        if shape is not None and module is not head:
            modules[name] = shape
        elif name:
            others[name] = type(module).__name__
    text = model.config.get_text_config()
    return BaseDescription(
        architecture=type(model).__name__,
        model_type=model.config.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        modules=modules,
        others=others,
        output_head=output_head,
        fingerprint=_fingerprint(modules),
    )


def _linear_shape(name: str, module: nn.Module) -> LinearShape | None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return LinearShape(module.in_features, module.out_features, _layer(name))
    if isinstance(module, Conv1D):
        return LinearShape(module.nx, module.nf, _layer(name), transposed=True)
    return None


def _layer(name: str) -> int | None:
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else None


def _fingerprint(modules: Mapping[str, LinearShape]) -> str:
    canonical = json.dumps({name: asdict(shape) for name, shape in modules.items()}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
