"""The properties of a base model that adapters need: linears, mixtures and vocabulary, derived from config.json without
weights.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loramux_adapters.errors import BaseUnusable
from loramux_adapters.families import (
    ENCODERS,
    EXPERT_PARAMETERS,
    ROUTERS,
    SAME_INPUT,
    UNGATED_PARAMETERS,
    Encoder,
    images_of,
)
from loramux_adapters.joined import JoinedLinear, joined_linears

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

MODEL_LOCK = threading.Lock()
"""Lock held while transformers makes a model. During that time transformers changes torch's default dtype, which all
threads share. A model that is made at the same time on another thread would get buffers of that dtype, and leave a
wrong default."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear of the base."""

    in_features: int
    out_features: int
    layer: int | None
    """Decoder layer of the base."""
    transposed: bool = False
    """The weight is stored `[in, out]` (GPT-2's Conv1D). A and B of an adapter are as for any other linear."""

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class VocabularyShape:
    """The input embedding and the output head: a row for each token, `[num_tokens, hidden_size]` each."""

    embedding: str
    """The embedding's name."""
    head: str
    """The output head's name."""
    num_tokens: int
    """Number of rows. It is larger than the number of the tokenizer's tokens if the base pads its vocabulary."""
    hidden_size: int
    tied: bool
    """True if embedding and head are one matrix."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """A parameter that multiplies like a linear without being one: a mixture's experts together, or its router."""

    num_experts: int
    in_features: int
    out_features: int
    layer: int | None
    """Decoder layer of the base."""


@dataclass(frozen=True, slots=True)
class BaseDescription:
    """The properties of a base model that adapters need, as plain data that can be compared, pickled and sent."""

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    modules: Mapping[str, LinearShape]
    """The linears that an adapter may touch, in the model's order. The output head is not included."""
    others: Mapping[str, str]
    """Every other module: its name and its class."""
    vocabulary: VocabularyShape | None
    """None if the head is not one plain linear without bias over the embedding's tokens."""
    norms: Mapping[str, int]
    """The norms with a weight and no bias, and their widths, in the model's order."""
    parameters: Mapping[str, ParameterShape]
    """Parameters of mixtures that an adapter may touch (`target_parameters`), in the model's order. Most have none."""
    fingerprint: str
    """sha256 of the names and shapes of all modules that adapters may change. Two bases have the same fingerprint if
    and only if the same adapters fit. Norms are left out, because their shapes follow from the other modules.
    """
    joined: Mapping[str, JoinedLinear] = field(default_factory=dict)
    """The parts of joined linears, by the last part of the linears' names."""
    alternates_gate_and_up: bool = False
    """True if outputs of a mixture's `gate_up_proj` belong to gate and up alternately, and are not two halves."""
    has_inputs_by_layer: bool = False
    """True if layers read each token's row in a table other than the embedding: an adapter's added tokens have none."""
    encoder: Encoder | None = None
    """The family's facts if the base is an encoder, whose names are those of the model with a head for classes."""
    lacks_transform: bool = False
    """True if the checkpoint of an encoder has no weights of `Encoder.transform`, so adapters with heads do not fit."""

    def without_head(self) -> BaseDescription:
        """Return the base as seen by adapters that were trained without the output head (for vectors or classes)."""
        head = None if self.vocabulary is None else self.vocabulary.head
        return replace(self, others={name: kind for name, kind in self.others.items() if name != head})

    def for_tokens(self) -> BaseDescription:
        """Return the base as seen by adapters that classify each token: an encoder then has no pooler in its body."""
        if self.encoder is None or self.encoder.transform is None or self.encoder.has_transform("TOKEN_CLS"):
            return self
        pooler = self.encoder.transform
        return replace(
            self,
            modules={name: shape for name, shape in self.modules.items() if not name.startswith(f"{pooler}.")},
            others={name: kind for name, kind in self.others.items() if not f"{name}.".startswith(f"{pooler}.")},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every module's name, as PEFT walks them when it looks for targets."""
        return (*self.modules, *self.others)


def input_of(module: str) -> tuple[str, str]:
    """Return a key that is equal for linears that read the same input."""
    parent, _, attribute = module.rpartition(".")
    return parent, next((min(group) for group in SAME_INPUT if attribute in group), attribute)


def siblings(module: str, modules: Iterable[str]) -> list[str]:
    """Return the other `modules` that read the input of `module`."""
    return [other for other in modules if other != module and input_of(other) == input_of(module)]


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' class for the model of `config`: the class for classes of texts of an encoder, the class for
    text and images of a family whose images are served. For other families, the class of the text model if it exists,
    otherwise the class for text and images, of which only the text part is served.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.model_type in ENCODERS:
        return AutoModelForSequenceClassification
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and images_of(config.model_type) is None
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def describe_base(model_dir: Path) -> BaseDescription:
    """Describe the checkpoint in `model_dir` from its config.json, on the meta device. Raises BaseUnusable."""
    # Imported here: checking files against a description needs neither library.
    import torch
    from transformers import AutoConfig

    if not (model_dir / "config.json").is_file():
        raise BaseUnusable(f"{model_dir} holds no config.json; give the folder of a local transformers checkpoint.")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        with MODEL_LOCK, torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise BaseUnusable(f"{model_dir} is not a model that transformers knows and that is served: {error}") from error
    base = describe_model(model)
    if base.encoder is None or base.encoder.transform is None:
        return base
    return replace(base, lacks_transform=not _holds(model_dir, base.encoder.transform.rpartition(".")[2]))


def _holds(model_dir: Path, module: str) -> bool:
    """Return whether a checkpoint has weights of `module`, with or without the prefix of the model around it."""
    from safetensors import safe_open

    names: list[str] = []
    for file in model_dir.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return any(f".{module}." in f".{name}" for name in names)


def describe_model(model: PreTrainedModel) -> BaseDescription:
    """Describe a transformers model that exists already, before any of its modules was replaced."""
    head, encoder = model.get_output_embeddings(), ENCODERS.get(model.config.model_type)
    modules: dict[str, LinearShape] = {}
    others: dict[str, str] = {}
    norms: dict[str, int] = {}
    in_head = frozenset() if encoder is None else {name.partition(".")[0] for name in encoder.head}
    for name, module in model.named_modules():
        if name.partition(".")[0] in in_head:
            continue  # an adapter brings the head of an encoder whole
        shape = _linear_shape(name, module)
        if shape is not None and module is not head:
            modules[name] = shape
        elif name:
            others[name] = type(module).__name__
            if encoder is None and (width := _norm_width(module)) is not None:
                norms[name] = width
    text, vocabulary, parameters = model.config.get_text_config(), _vocabulary(model), dict(_parameters(model))
    return BaseDescription(
        architecture=type(model).__name__,
        model_type=model.config.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        modules=modules,
        others=others,
        vocabulary=vocabulary,
        norms=norms,
        parameters=parameters,
        fingerprint=_fingerprint(modules, vocabulary, parameters),
        joined=joined_linears(text),
        # transformers' own mark: False if the outputs of gate and up alternate
        alternates_gate_and_up=any(not getattr(m.module.experts, "is_concatenated", True) for m in mixtures(model)),
        has_inputs_by_layer=bool(getattr(text, "hidden_size_per_layer_input", 0)),
        encoder=encoder,
    )


def _linear_shape(name: str, module: nn.Module) -> LinearShape | None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LinearShape(module.in_features, module.out_features, _layer(name))
    if isinstance(module, Conv1D):
        return LinearShape(module.nx, module.nf, _layer(name), transposed=True)
    return None


def _norm_width(module: nn.Module) -> int | None:
    parameters = dict(module.named_parameters())
    if "norm" not in type(module).__name__.lower() or list(parameters) != ["weight"]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gated norm also takes a gate
        return None
    return len(parameters["weight"]) if parameters["weight"].ndim == 1 else None


def _vocabulary(model: PreTrainedModel) -> VocabularyShape | None:
    from torch import nn

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear) or head.bias is not None:
        return None
    if head.weight.shape != embedding.weight.shape:
        return None
    names = {module: name for name, module in model.named_modules()}
    # transformers reads `tie_word_embeddings` from the config of the whole model. The text model's config may have
    # another value, or lack the field.
    tied = head.weight is embedding.weight or bool(getattr(model.config, "tie_word_embeddings", False))
    return VocabularyShape(names[embedding], names[head], *embedding.weight.shape, tied)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts whose weights are stacked in common parameters."""

    name: str
    module: Any
    """Module with `experts`, and a router under one of ROUTERS."""
    router: str | None
    """The router's attribute; None if its weight is a linear's, which is served like every other linear."""

    @property
    def router_parameter(self) -> str:
        """Name of the router's weight."""
        return f"{self.name}.{self.router}.weight"

    @property
    def is_layer(self) -> bool:
        """True if the experts are in the decoder layer itself, next to its dense network."""
        return self.name.rpartition(".")[2].isdigit()


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    """Yield every mixture of `model`."""
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        weights = [getattr(experts, parameter, None) for parameter in expert_parameters(experts)]
        if not all(getattr(weight, "ndim", 0) == 3 for weight in weights):
            continue
        routers = [attribute for attribute in ROUTERS if getattr(module, attribute, None) is not None]
        own = (a for a in routers if getattr(getattr(module, a), "weight", None) is not None)
        if routers:
            yield Mixture(name, module, next(own, None))


def expert_name(parameter: str, expert: int) -> str:
    """Return a name for one expert's share of a parameter. No module's name contains a '#'."""
    return f"{parameter}#{expert}"


def parameter_of(name: str) -> str:
    """Return the parameter to which an expert's share belongs; any other name unchanged."""
    return name.partition("#")[0]


def is_expert(name: str) -> bool:
    """True if `name` is an expert's share of a parameter rather than a linear."""
    return "#" in name


def _parameters(model: nn.Module) -> Iterator[tuple[str, ParameterShape]]:
    for mixture in mixtures(model):
        name, layer = mixture.name, _layer(f"{mixture.name}.")
        if mixture.router is not None:
            rows, columns = getattr(mixture.module, mixture.router).weight.shape
            yield mixture.router_parameter, ParameterShape(1, columns, rows, layer)
        for parameter in expert_parameters(mixture.module.experts):
            num_experts, rows, columns = expert_weights(mixture.module.experts, parameter).shape
            yield f"{name}.experts.{parameter}", ParameterShape(num_experts, columns, rows, layer)


def expert_parameters(experts: Any) -> tuple[str, str]:
    """Return the names of the stacked weights of transformers' experts."""
    return EXPERT_PARAMETERS if getattr(experts, "has_gate", True) else UNGATED_PARAMETERS


def expert_weights(experts: Any, parameter: str) -> torch.Tensor:
    """Return a view `[experts, out_features, in_features]` of one of `expert_parameters`."""
    weight: torch.Tensor = getattr(experts, parameter).data
    return weight.transpose(1, 2) if getattr(experts, "is_transposed", False) else weight


def _layer(name: str) -> int | None:
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else None


def _fingerprint(
    modules: Mapping[str, LinearShape], vocabulary: VocabularyShape | None, parameters: Mapping[str, ParameterShape]
) -> str:
    touched: dict[str, LinearShape | ParameterShape] = {**modules, **parameters}
    shapes: dict[str, Any] = {name: asdict(shape) for name, shape in touched.items()}
    if vocabulary is not None:
        shapes[""] = asdict(vocabulary)
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
