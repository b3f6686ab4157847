"""PEFT's forward of a base that is too large to be held: one decoder layer's weights are in memory at a time.

The model is built without weights. Before a unit (a decoder layer, the embedding, the head, a norm) runs, its weights
are read from the checkpoint in float32; after it they are dropped. The adapter's own weights stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import init_empty_weights
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from loramux.validation.checkpoint_files import BaseFiles
from loramux.validation.jobs import EngineAnswer, ParityJob, ParitySetup
from loramux.validation.parity.verdict import (
    LOGPROB_TOLERANCE,
    OUTPUTS_NOT_FINITE,
    NotRun,
    ParityFault,
    Verdict,
    compare_tokens,
)
from loramux.validation.parity.whole_model import GreedyOutput, divergence, logits_of, token_fault
from loramux_adapters.base import VocabularyShape

ROUNDING_FACTOR = 16
"""The engine's log probabilities with the adapter may be so many times as far from PEFT's as the base's own are. Of
random models and adapters in bfloat16 some were 6 times as far."""
ROUNDED_TOLERANCE = 0.1
"""Nats that an engine in 16 bits may always be apart. The answers of another adapter are 0.7 and more apart."""
TAKES_FROM_THE_BASE = ("pissa", "olora")
BYTES_PER_ENTRY = 6
"""Of a unit's weights while they are read: as they are saved, in 16 bits, and in float32."""


class _Missing(Exception):
    """The checkpoint has a parameter under another name."""


def compare_answers(streamed: StreamedModel, setup: ParitySetup, job: ParityJob) -> Verdict | NotRun:
    """Compare the serving engine's `job.answers`, the last of them the base's own, with PEFT's forward.

    The engine rounds to its own dtype. How far that moves log probabilities is measured on the base's answer, which
    no adapter touches.
    """
    method = (
        f"{len(job.answers) - 1} x {len(job.answers[0].tokens)} greedy tokens of the serving engine ({setup.serving}) "
        "against PEFT's forward in float32, layer by layer"
    )
    if streamed.peak_bytes > setup.memory_bytes:
        return NotRun("the base's largest layer, in float32, does not fit into validation.parity_memory_bytes")
    try:
        plain = streamed.logits(job.answers)
        adapted = streamed.with_adapter(Path(job.uploaded)).logits(job.answers[:-1])
    except _Missing as missing:
        return NotRun(f"the checkpoint has no {missing} under the name that PEFT's model gives it")
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return NotRun(
            f"PEFT cannot run this adapter on a base of which one layer at a time is read: {str(error)[:200]}"
        )
    if not torch.isfinite(adapted).all():
        return Verdict(method, {}, ParityFault(OUTPUTS_NOT_FINITE, "PEFT's own forward gives NaN or infinity"))
    *ours, base = job.answers
    num_ours = len(adapted)
    rounding = compare_tokens(base.tokens, base.logprobs, plain[num_ours:])["largest_logprob_error"]
    least = LOGPROB_TOLERANCE if setup.serving == "float32" else ROUNDED_TOLERANCE
    tolerance = max(least, ROUNDING_FACTOR * rounding)
    tokens, logprobs = [t for one in ours for t in one.tokens], [p for one in ours for p in one.logprobs]
    figures = compare_tokens(tokens, logprobs, adapted, tolerance)
    fault = token_fault(figures, tolerance)
    figures |= {"allowed_logprob_error": tolerance, "mean_divergence_from_base": divergence(adapted, plain[:num_ours])}
    return Verdict(method, figures, fault)


class StreamedModel:
    """A model whose base weights are read when they are needed."""

    def __init__(self, setup: ParitySetup, files: BaseFiles) -> None:
        self._setup = setup
        self._files = files
        config = AutoConfig.from_pretrained(setup.model_dir)
        with init_empty_weights(include_buffers=False):
            self._model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._layer_classes = frozenset(self._model._no_split_modules or ())
        self._names: dict[nn.Parameter, str] = {}
        """The base's parameters, whose entries are one and the same zero in memory, and their names."""
        for module_name, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                own = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
                module._parameters[name] = own
                self._names[own] = f"{module_name}.{name}"
        self._held: list[tuple[nn.Module, str, nn.Parameter]] = []
        """What was read: the module, the parameter's name in it, and the one that it had."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest unit while it is read."""
        sizes = (sum(parameter.numel() for parameter in unit.parameters()) for unit in self._units(self._model))
        return BYTES_PER_ENTRY * max(sizes)

    def with_adapter(self, folder: Path) -> StreamedModel:
        """Put the adapter on the model, and return it."""
        config = peft.PeftConfig.from_pretrained(str(folder))
        first = getattr(config, "init_lora_weights", True)
        if isinstance(first, str) and first.lower().startswith(TAKES_FROM_THE_BASE):
            raise ValueError(f"{first} takes its first factors from the base's weights")
        if first is False:
            config.init_lora_weights = True  # modules that the file lacks would get random weights otherwise
        config.inference_mode = True
        self._model = peft.get_peft_model(self._model, config).eval()
        state = peft.utils.load_peft_weights(str(folder), device="cpu")
        # Copies of the base's embedding and head are this base's: `check_base_copies`.
        own = {name: tensor for name, tensor in state.items() if ".base_layer." not in name}
        peft.set_peft_model_state_dict(self._model, own)
        return self

    def logits(self, answers: Sequence[EngineAnswer]) -> torch.Tensor:
        """Return float32`[tokens, vocab]`: the logits at the position of each token of the answers."""
        hooks = [
            hook
            for unit in self._units(self._model)
            for hook in (unit.register_forward_pre_hook(self._read), unit.register_forward_hook(self._drop))
        ]
        found = [logits_of(self._model, one.prompt, GreedyOutput(one.tokens, one.logprobs)) for one in answers]
        for hook in hooks:
            hook.remove()
        return torch.cat(found)

    def _units(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules whose weights are read together, from the outside inwards."""
        is_wrapper = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        if is_wrapper or type(module).__name__ in self._layer_classes or module._parameters:
            yield module
        else:
            for child in module.children():
                yield from self._units(child)

    def _read(self, unit: nn.Module, _: object) -> None:
        for module in unit.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in self._names:
                    self._held.append((module, name, parameter))
                    module._parameters[name] = nn.Parameter(self._load(parameter), requires_grad=False)

    def _drop(self, *_: object) -> None:
        for module, name, parameter in self._held:
            module._parameters[name] = parameter
        self._held.clear()

    def _load(self, parameter: nn.Parameter) -> torch.Tensor:
        """Read the parameter from the checkpoint. A tied base may have saved it under either name."""
        name = self._names[parameter]
        vocabulary = self._setup.base.vocabulary
        candidates = [name]
        if isinstance(vocabulary, VocabularyShape) and vocabulary.tied:
            tied = [f"{vocabulary.embedding}.weight", f"{vocabulary.head}.weight"]
            candidates += tied if name in tied else []
        for candidate in candidates:
            found = self._files.parameter(candidate)
            if found is not None and found.shape == parameter.shape:
                return found.float()
        raise _Missing(name)
