"""Compare a few greedy tokens with PEFT's forward: the tokens of the check's own engine, or of the serving engine.

`WholeModel` is for bases that are small enough to be held twice: an engine answers in float32, and PEFT's forward runs
on a second copy.

`StreamedModel` is PEFT's forward of a base that is too large to be held: one decoder layer's weights are in memory at a
time. The model is built without weights. Before a unit (a decoder layer, the embedding, the head, a norm) runs, its
weights are read from the checkpoint in float32; after the unit they are dropped. The adapter's own weights stay in
memory. The forward's result is compared with the serving engine's answers, in that engine's dtype (`compare_answers`).

The tolerances decide if two computations count as equal: LOGPROB_TOLERANCE for tokens, OUTPUT_TOLERANCE for vectors and
for the outputs of single linears.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import peft
import torch
from peft.tuners.lora.variants import calculate_alora_offsets
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import init_empty_weights
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import LogitsProcessorList, PreTrainedModel

from loramux.catalog.validation.checkpoint_files import BaseFiles
from loramux.catalog.validation.jobs import EngineAnswer, ParityJob, ParitySetup
from loramux.catalog.validation.parity_encoders import peft_outputs
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings, SchedulerSettings
from loramux.engine.engine import build_engine
from loramux.engine.execution.checkpoint import load_checkpoint
from loramux.engine.execution.loader import LoadedModel, load_model
from loramux.engine.execution.runner import decoder_of
from loramux.engine.messages import AdapterRef, Pooling, Request, SamplingParams, TokenEvent
from loramux_adapters.base import (
    BaseDescription,
    VocabularyShape,
    auto_class,
    expert_parameters,
    expert_weights,
    mixtures,
    served_config,
)
from loramux_adapters.components import AdapterPlan
from loramux_adapters.config import AdapterConfig, LoraConfig, Task
from loramux_adapters.families import family_of
from loramux_adapters.latent import rows_expanded
from loramux_adapters.plan import WEIGHTS_NAME, inspect_adapter, read_config, task_of
from loramux_adapters.weights import read_tensor
from loramux_adapters.weights_file import read_header
from loramux_kernels.quantized_weight import quantize

LOGPROB_TOLERANCE = 2e-3
"""The allowed difference of log probabilities in nats: far above float32 rounding, below the effect of any fault."""
OUTPUT_TOLERANCE = 1e-3
"""The allowed difference, as a share of the adapter's largest contribution to a linear's output."""
ROUNDING = 2e-5
"""The allowed rounding, as a share of the output itself: float32 sums depend on the order of their terms."""

PARITY_FAILED = "parity_failed"
OUTPUTS_NOT_FINITE = "outputs_not_finite"
PROMPT_LENGTHS = (3, 21)
OUTPUT_TOKENS = 12
SPECIAL_TOKENS = 8
"""Maximum number of tokens with trained embeddings in a prompt."""
SPARE_BYTES = 64 << 20
METHOD = f"{len(PROMPT_LENGTHS)} x {OUTPUT_TOKENS} greedy tokens of the engine against PEFT's forward, in float32"
_HEADS = ("classifier", "score")
"""PEFT's names in modules_to_save for the head of a classifier."""
_POOLINGS: Mapping[str, Pooling] = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}
"""Poolings of classifiers, by task."""


@dataclass(frozen=True, slots=True)
class ParityFault:
    """The reason for an adapter's refusal: PARITY_FAILED or OUTPUTS_NOT_FINITE, and a sentence with the numbers."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The method, the numbers and the possible fault of one comparison."""

    method: str
    figures: dict[str, float]
    fault: ParityFault | None = None


@dataclass(frozen=True, slots=True)
class NotRun:
    """The reason why no tokens were compared."""

    reason: str


def compare_tokens(
    ours: list[int], our_logprobs: list[float], logits: torch.Tensor, tolerance: float = LOGPROB_TOLERANCE
) -> dict[str, float]:
    """Compare greedy tokens and their log probabilities with PEFT's float32`[tokens, vocab]` at the same positions.

    `differing` counts tokens that PEFT would not have chosen. A tie within the tolerance is counted separately, because
    rounding decides which of two equally likely tokens comes first.
    """
    reference = logits.double().log_softmax(-1)
    theirs = reference.gather(1, torch.tensor(ours)[:, None])[:, 0]
    behind = reference.max(-1).values - theirs
    error = (torch.tensor(our_logprobs, dtype=torch.float64) - theirs).abs()
    return {
        "tokens": len(ours),
        "differing": int((behind > tolerance).sum()),
        "ties": int(((behind > 0) & (behind <= tolerance)).sum()),
        "largest_logprob_error": float(error.max()),
    }


def compare_outputs(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor) -> float:
    """Return the distance of two outputs of one linear in units of the allowed distance. Above 1 is a fault.

    All three tensors are float32`[rows, out_features]`; `base` is the output without the adapter.
    """
    allowed = OUTPUT_TOLERANCE * (theirs - base).abs().max() + ROUNDING * theirs.abs().max()
    apart = (ours - theirs).abs().max()
    return float(apart / allowed) if allowed > 0 else float(apart > 0)


class GreedyOutput(NamedTuple):
    """The engine's answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, events: Iterable[TokenEvent]) -> GreedyOutput:
        """Return the tokens of an answer's events."""
        return cls(
            [event.token_id for event in events if event.token_id is not None],
            [event.logprob for event in events if event.token_id is not None and event.logprob is not None],
        )


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Two copies of the base in float32: one in the served form, the other for PEFT."""

    served: LoadedModel
    settings: Settings
    reference: PreTrainedModel
    base: BaseDescription

    @classmethod
    def load(cls, setup: ParitySetup, files: BaseFiles) -> WholeModel:
        """Load both copies from the checkpoint."""
        reference = _reference(setup, files)
        weight_bytes = sum(parameter.numel() * 4 for parameter in reference.parameters())
        settings = Settings(
            model=ModelSettings(
                path=setup.model_dir, served_model_name="base", dtype="float32", quantization=setup.quantization
            ),
            engine=EngineSettings(
                device="cpu",
                num_threads=1,
                block_size=setup.block_size,
                pool_bytes=2 * weight_bytes + SPARE_BYTES,
                max_num_batched_tokens=16,
                prefix_cache=False,
            ),
            scheduler=SchedulerSettings(),
            adapters=msgspec.structs.replace(setup.adapters, host_bytes=0, preload=()),
        )
        return cls(load_model(settings), settings, reference, setup.base)

    def compare(self, job: ParityJob) -> Verdict | NotRun:
        """Run the adapter in the engine and in PEFT. Returns NotRun if the adapter would fill the engine's pool."""
        if self._fills_the_pool(job):
            return NotRun("the adapter is too large beside its base to be run whole in a check")
        plan = inspect_adapter(Path(job.served), self.base, job.limits)
        prompts = prompts_of(job, plan, self.served.facts.vocab_size)
        if task_of_job(job, self.base) != "CAUSAL_LM":
            return self._compare_vectors(job, plan, prompts)
        events = self._answers(job.served, prompts)
        if isinstance(events, ParityFault):
            return Verdict(METHOD, {}, events)
        ours = [GreedyOutput.of(one) for one in events]
        asked = list(zip(prompts, ours, strict=True))
        if plan.num_tokens is not None:
            self.reference.resize_token_embeddings(plan.num_tokens, mean_resizing=False)  # the file has all rows
        base = torch.cat([logits_of(self.reference, *one) for one in asked])  # before an adapter changes the weights
        config = peft.PeftConfig.from_pretrained(job.uploaded)
        if getattr(config, "init_lora_weights", True) is False:
            config.init_lora_weights = True  # modules that the file lacks would get random weights otherwise
        with every_linear_allowed(self.reference):
            model = peft.PeftModel.from_pretrained(self.reference, job.uploaded, config=config).eval()
        logits = torch.cat([logits_of(model, *one) for one in asked])
        if not torch.isfinite(logits).all():
            return Verdict(METHOD, {}, ParityFault(OUTPUTS_NOT_FINITE, "PEFT's own forward gives NaN or infinity"))
        tokens = [token for answer in ours for token in answer.tokens]
        figures = compare_tokens(tokens, [logprob for answer in ours for logprob in answer.logprobs], logits)
        return Verdict(METHOD, figures | {"mean_divergence_from_base": divergence(logits, base)}, token_fault(figures))

    def _compare_vectors(self, job: ParityJob, plan: AdapterPlan, prompts: list[list[int]]) -> Verdict:
        """Compare the vectors of the last tokens, or a classifier's numbers: for these tokens, or for every token."""
        method = f"{len(prompts)} vectors of the engine against PEFT's forward, in float32"
        task = task_of_job(job, self.base)
        pooling = _POOLINGS.get(task, "last" if self.base.encoder is None else "cls")
        events = self._answers(job.served, prompts, pooling)
        if isinstance(events, ParityFault):
            return Verdict(method, {}, events)
        numbers = b"".join(event.pooled or b"" for one in events for event in one)
        if (encoder := self.base.encoder) is not None:
            theirs, base = peft_outputs(self.settings.model.path, job.uploaded, encoder, task, plan, prompts)
        else:
            theirs, base = self._peft_vectors(job, plan, prompts, slice(None if task == "TOKEN_CLS" else -1, None))
        ours = torch.frombuffer(bytearray(numbers), dtype=torch.float32).view(base.shape)
        if not torch.isfinite(theirs).all():
            return Verdict(method, {}, ParityFault(OUTPUTS_NOT_FINITE, "PEFT's own forward gives NaN or infinity"))
        apart = compare_outputs(ours, theirs, base)
        figures = {"vectors": float(len(prompts)), "largest_error": apart}
        if apart <= 1:
            return Verdict(method, figures)
        sentence = f"the vectors are {apart:.3g} times as far from PEFT's as rounding explains"
        return Verdict(method, figures, ParityFault(PARITY_FAILED, sentence))

    def _peft_vectors(
        self, job: ParityJob, plan: AdapterPlan, prompts: list[list[int]], read: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the tokens `read` of each prompt with PEFT's adapter, and with the own layers alone."""
        if plan.num_tokens is not None:
            self.reference.resize_token_embeddings(plan.num_tokens, mean_resizing=False)  # the file has all rows
        through = _head_of(plan, Path(job.served))
        base = through(torch.cat([states_of(self.reference, prompt)[read] for prompt in prompts]))
        config = peft.PeftConfig.from_pretrained(job.uploaded)
        config.task_type = "CAUSAL_LM"  # the layers are the same; the head is applied here
        trained = [name for name in getattr(config, "modules_to_save", None) or () if name not in _HEADS]
        config.modules_to_save = trained or None
        with every_linear_allowed(self.reference):
            model = peft.PeftModel.from_pretrained(self.reference, job.uploaded, config=config).eval()
        return through(torch.cat([states_of(model.get_base_model(), prompt)[read] for prompt in prompts])), base

    def _answers(
        self, folder: str, prompts: Sequence[list[int]], pooling: Pooling | None = None
    ) -> list[list[TokenEvent]] | ParityFault:
        """Let the engine answer every prompt, in one batch with a row of the base; return the events of each prompt."""
        ref = AdapterRef(digest="candidate", path=folder)
        asked = [_request(str(index), prompt, ref, pooling) for index, prompt in enumerate(prompts)]
        known = [token for token in prompts[0] if token < self.served.facts.vocab_size]
        beside = _request("base", known, None, None if self.base.encoder is None else "mean")
        events = _run(self.served, self.settings, [*asked, beside])
        return events if isinstance(events, ParityFault) else [events[one.id] for one in asked]

    def _fills_the_pool(self, job: ParityJob) -> bool:
        tensors = read_header(Path(job.served) / WEIGHTS_NAME).tensors.values()
        needed = sum(4 * math.prod(tensor.shape) for tensor in tensors)
        return 2 * needed > (self.settings.engine.pool_bytes or 0)


def _reference(setup: ParitySetup, files: BaseFiles) -> PreTrainedModel:
    """Load the base in float32 for PEFT, with the dequantized weights of quantized linears."""
    if files.form is None:
        config = served_config(Path(setup.model_dir))
        model: PreTrainedModel = auto_class(config).from_pretrained(setup.model_dir, config=config, dtype=torch.float32)
        model.eval()
    else:
        model = load_checkpoint(Path(setup.model_dir), "float32", torch.device("cpu")).eval()
    if files.form is None and files.quantization == "none":
        return model
    for name in setup.base.modules:
        if (linear := files.linear(name)) is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, linear)
    if files.quantization != "none":
        stacks = (one.module.experts for one in mixtures(model))
        for weights in (expert_weights(experts, name) for experts in stacks for name in expert_parameters(experts)):
            for expert in weights:
                expert.copy_(quantize(expert, files.quantization).dequantize())
    return model


@contextmanager
def every_linear_allowed(model: PreTrainedModel) -> Iterator[None]:
    """Let PEFT put pairs on `out_proj`, which it refuses by the base's `model_type`, in this block."""
    known = model.config.model_type
    if family_of(model.config).peft_refuses_out_proj:
        model.config.model_type += " in torch"
    try:
        yield
    finally:
        model.config.model_type = known


def task_of_job(job: ParityJob, base: BaseDescription) -> Task:
    """Return the task for which the adapter was trained."""
    return task_of(read_config(Path(job.served)), base)


def prompts_of(job: ParityJob, plan: AdapterPlan, vocab_size: int) -> list[list[int]]:
    """Return the prompts that show the adapter's effect."""
    special = _special_tokens(read_config(Path(job.served)), plan)
    num_tokens = min(vocab_size, plan.num_tokens or vocab_size)
    return [_prompt(length, num_tokens, special) for length in PROMPT_LENGTHS]


def _prompt(length: int, num_tokens: int, special: Sequence[int]) -> list[int]:
    """Return `length` random tokens with the `special` tokens in the middle."""
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(num_tokens, (length,), generator=generator).tolist()
    return [*tokens[: length // 2], *special, *tokens[length // 2 :]]


def _special_tokens(config: AdapterConfig, plan: AdapterPlan) -> Sequence[int]:
    """Return the tokens that show the adapter's effect: an activated LoRA's invocation, trained or added tokens."""
    if not isinstance(config, LoraConfig):
        return ()
    if copied := [token for part in plan.rows if part.copied is not None for token in part.copied.token_ids]:
        return tuple(dict.fromkeys(copied))[:SPECIAL_TOKENS]
    trained = config.trainable_token_indices or ()
    ids = trained if isinstance(trained, tuple) else [one for ids in trained.values() for one in ids]
    return config.alora_invocation_tokens or ids[:SPECIAL_TOKENS]


def _request(name: str, prompt: list[int], adapter: AdapterRef | None, pooling: Pooling | None = None) -> Request:
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    return Request(id=name, tenant="t", prompt_token_ids=prompt, sampling=sampling, adapter=adapter, pooling=pooling)


def _run(
    served: LoadedModel, settings: Settings, requests: Iterable[Request]
) -> dict[str, list[TokenEvent]] | ParityFault:
    """Answer the requests by a separate engine, in one batch."""
    woken = threading.Event()
    engine = build_engine(served, settings, wake=woken.set)
    for request in requests:
        engine.submit(request)
    answers: dict[str, list[TokenEvent]] = {}
    while not engine.is_idle:
        woken.clear()
        report = engine.step()
        if report is None:
            woken.wait(0.1)
            continue
        for event in report.events:
            if event.fault is not None:
                return ParityFault(PARITY_FAILED, f"the engine did not take it: {event.fault.message}")
            answers.setdefault(event.request_id, []).append(event)
    return answers


def _head_of(plan: AdapterPlan, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a classifier's head; for other adapters, a function that returns the states as they are."""
    head = plan.classifier
    if head is None:
        return lambda states: states
    path = folder / WEIGHTS_NAME
    with path.open("rb") as file:
        weight, *bias = (read_tensor(file, read_header(path).tensors[key]).float() for key in head.shapes)
    return lambda states: nn.functional.linear(states, weight, *bias)


@torch.inference_mode()
def states_of(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Return float32`[tokens, hidden]`: the hidden states after the last norm."""
    states: torch.Tensor = decoder_of(model)(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state
    return states[0].float()


@torch.inference_mode()
def logits_of(model: peft.PeftModel | PreTrainedModel, prompt: list[int], answer: GreedyOutput) -> torch.Tensor:
    """Return float32`[tokens, vocab]`: the model's logits at the position of each token of `answer`."""
    if family_of(model.config).states is not None:
        return _generated_logits(model, prompt, answer)
    ids = torch.tensor([prompt + answer.tokens[:-1]])
    offset = None
    if isinstance(model, peft.PeftModel):
        [offset] = calculate_alora_offsets(model.peft_config, model.active_adapter, ids[:, : len(prompt)])
    # Offsets count from the end. PEFT's generate searches for the invocation in the prompt; PEFT's forward searches in
    # the whole input.
    keywords = {} if offset is None else {"alora_offsets": [offset + len(answer.tokens) - 1]}
    with rows_expanded(model) if keywords else nullcontext():
        return model(input_ids=ids, use_cache=False, **keywords).logits[0, len(prompt) - 1 :].float()


def _generated_logits(model: peft.PeftModel | PreTrainedModel, prompt: list[int], answer: GreedyOutput) -> torch.Tensor:
    """Return `logits_of` as `generate` computes them, one token after the other: some layers with states compute a
    prompt's token otherwise than a generated one (`mamba2` in `loramux_kernels`).
    """

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -math.inf)
        forced[:, answer.tokens[ids.shape[1] - len(prompt)]] = 0
        return forced

    made: Any = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=len(answer.tokens),
        logits_processor=LogitsProcessorList([force]),
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(made.logits).float()


def divergence(logits: torch.Tensor, base: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence from the base's next-token distribution, in nats."""
    adapted, unchanged = logits.double().log_softmax(-1), base.double().log_softmax(-1)
    return float((adapted.exp() * (adapted - unchanged)).sum(-1).mean())


def token_fault(figures: dict[str, float], tolerance: float = LOGPROB_TOLERANCE) -> ParityFault | None:
    """Return the fault in the result of compare_tokens; None if there is no fault."""
    error = figures["largest_logprob_error"]
    if not figures["differing"] and math.isfinite(error) and error <= tolerance:
        return None
    sentence = (
        f"{figures['differing']:g} of {figures['tokens']:g} greedy tokens are not PEFT's, and their log probabilities "
        f"are up to {error:.2g} apart, where {tolerance:.2g} is allowed"
    )
    return ParityFault(PARITY_FAILED, sentence)


ROUNDING_FACTOR = 16
"""The largest allowed ratio of two distances: engine to PEFT with the adapter, and without it.

The distances are those of log probabilities. Random models and adapters in bfloat16 reached 6."""
ROUNDED_TOLERANCE = 0.1
"""The difference in nats that is always allowed for an engine in 16 bits. The answers of a different adapter differ by
0.7 or more.
"""
TAKES_FROM_THE_BASE = ("pissa", "olora")
BYTES_PER_ENTRY = 6
"""Bytes per weight while a unit is read: 2 bytes as saved in 16 bits, and 4 bytes in float32."""


class _Missing(Exception):
    """The checkpoint has a parameter under another name."""


def compare_answers(streamed: StreamedModel, setup: ParitySetup, job: ParityJob) -> Verdict | NotRun:
    """Compare the serving engine's `job.answers`, of which the last is the base's own, with PEFT's forward.

    The engine rounds to its own dtype. The effect on log probabilities is measured on the base's answer, which no
    adapter changes.
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
        config = served_config(Path(setup.model_dir))
        with init_empty_weights(include_buffers=False):
            self._model: nn.Module = auto_class(config).from_config(config, dtype=torch.float32).eval()
        self._layer_classes = frozenset(self._model._no_split_modules or ())
        self._names: dict[nn.Parameter, str] = {}
        """The base's parameters and their names. All entries of a parameter are the same zero in memory."""
        for module_name, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                own = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
                module._parameters[name] = own
                self._names[own] = f"{module_name}.{name}"
        self._held: list[tuple[nn.Module, str, nn.Parameter]] = []
        """The parameters that were read: the module, the parameter's name in it, and its former parameter."""

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the largest unit while it is read."""
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
        with every_linear_allowed(self._model):
            self._model = peft.get_peft_model(self._model, config).eval()
        state = peft.utils.load_peft_weights(str(folder), device="cpu")
        # Copies of the base's embedding and head equal those of this base: see `check_base_copies`.
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
