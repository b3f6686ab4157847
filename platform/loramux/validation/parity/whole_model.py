"""A few greedy tokens of the engine itself, held against PEFT's forward."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import peft
import torch
from peft.tuners.lora.variants import calculate_alora_offsets
from transformers import AutoModelForCausalLM, PreTrainedModel

from loramux.engine.engine import Engine
from loramux.engine.messages import TokenEvent
from loramux.engine.model import LoadedModel, load_model
from loramux.engine.request import AdapterRef, Request, SamplingParams
from loramux.settings import EngineSettings, ModelSettings, SchedulerSettings, Settings
from loramux.validation.parity.jobs import ParityJob, ParitySetup
from loramux.validation.parity.verdict import (
    LOGPROB_TOLERANCE,
    OUTPUTS_NOT_FINITE,
    PARITY_FAILED,
    Fault,
    NotRun,
    Verdict,
    compare_tokens,
)
from loramux_adapters import WEIGHTS_NAME, AdapterConfig, LoraConfig, read_header
from loramux_adapters.validate import read_config

PROMPT_LENGTHS = (3, 21)
OUTPUT_TOKENS = 12
SPECIAL_TOKENS = 8
"""Of those whose embeddings an adapter brings, at most so many are in a prompt."""
BLOCK_SIZE = 16
SPARE_BYTES = 64 << 20
METHOD = f"{len(PROMPT_LENGTHS)} x {OUTPUT_TOKENS} greedy tokens of the engine against PEFT's forward, in float32"


class Answer(NamedTuple):
    """What the engine said to one prompt."""

    tokens: list[int]
    logprobs: list[float]

    def add(self, event: TokenEvent) -> None:
        """Take a token that an event may bring."""
        if event.token_id is not None and event.logprob is not None:
            self.tokens.append(event.token_id)
            self.logprobs.append(event.logprob)


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Two copies of the base in float32: one as it is served, one for PEFT."""

    served: LoadedModel
    settings: Settings
    reference: PreTrainedModel

    @classmethod
    def load(cls, setup: ParitySetup) -> WholeModel:
        """Load both from the checkpoint."""
        reference = AutoModelForCausalLM.from_pretrained(setup.model_dir, dtype=torch.float32).eval()
        weight_bytes = sum(parameter.numel() * 4 for parameter in reference.parameters())
        settings = Settings(
            model=ModelSettings(path=setup.model_dir, served_model_name="base", dtype="float32"),
            engine=EngineSettings(
                device="cpu",
                num_threads=1,
                block_size=BLOCK_SIZE,
                pool_bytes=2 * weight_bytes + SPARE_BYTES,
                max_num_batched_tokens=16,
                prefix_cache=False,
            ),
            scheduler=SchedulerSettings(),
            adapters=msgspec.structs.replace(setup.adapters, host_bytes=0, preload=()),
        )
        return cls(load_model(settings), settings, reference)

    def compare(self, job: ParityJob) -> Verdict | NotRun:
        """Run the adapter both ways. A pool that it would fill is a reason not to."""
        if self._fills_the_pool(job):
            return NotRun("the adapter is too large beside its base to be run whole in a check")
        special = _special_tokens(read_config(Path(job.served)))
        prompts = [self._prompt(length, special) for length in PROMPT_LENGTHS]
        ours = _Greedy(self.served, self.settings).answers(job.served, prompts)
        if isinstance(ours, Fault):
            return Verdict(METHOD, {}, ours)
        model = peft.PeftModel.from_pretrained(self.reference, job.uploaded).eval()
        logits = torch.cat([_logits(model, *asked) for asked in zip(prompts, ours, strict=True)])
        if not torch.isfinite(logits).all():
            return Verdict(METHOD, {}, Fault(OUTPUTS_NOT_FINITE, "PEFT's own forward gives NaN or infinity"))
        with model.disable_adapter():
            base = torch.cat([_logits(model, *asked) for asked in zip(prompts, ours, strict=True)])
        tokens = [token for answer in ours for token in answer.tokens]
        figures = compare_tokens(tokens, [logprob for answer in ours for logprob in answer.logprobs], logits)
        return Verdict(METHOD, figures | {"mean_divergence_from_base": _divergence(logits, base)}, _fault(figures))

    def _fills_the_pool(self, job: ParityJob) -> bool:
        tensors = read_header(Path(job.served) / WEIGHTS_NAME).tensors.values()
        needed = sum(4 * math.prod(tensor.shape) for tensor in tensors)
        return 2 * needed > (self.settings.engine.pool_bytes or 0)

    def _prompt(self, length: int, special: Sequence[int]) -> list[int]:
        """`length` random tokens, and in their midst the `special` ones."""
        generator = torch.Generator().manual_seed(length)
        tokens: list[int] = torch.randint(self.served.facts.vocab_size, (length,), generator=generator).tolist()
        return [*tokens[: length // 2], *special, *tokens[length // 2 :]]


def _special_tokens(config: AdapterConfig) -> Sequence[int]:
    """Tokens without which nothing would be seen: what switches an activated LoRA on, or those that were trained."""
    if not isinstance(config, LoraConfig):
        return ()
    trained = config.trainable_token_indices or ()
    ids = trained if isinstance(trained, tuple) else [one for ids in trained.values() for one in ids]
    return config.alora_invocation_tokens or ids[:SPECIAL_TOKENS]


class _Greedy:
    """The engine itself, for a moment."""

    def __init__(self, served: LoadedModel, settings: Settings) -> None:
        self._woken = threading.Event()
        self._engine = Engine(served, settings, wake=self._woken.set)

    def answers(self, folder: str, prompts: Sequence[list[int]]) -> list[Answer] | Fault:
        """The answer to every prompt, in one batch beside a row of the base."""
        for index, prompt in enumerate(prompts):
            self._submit(str(index), prompt, AdapterRef(digest="candidate", path=folder))
        self._submit("base", prompts[0], None)
        answers: dict[str, Answer] = {}
        while not self._engine.idle:
            self._woken.clear()
            report = self._engine.step()
            if report is None:
                self._woken.wait(0.1)
                continue
            for event in report.events:
                if event.fault is not None:
                    return Fault(PARITY_FAILED, f"the engine did not take it: {event.fault.message}")
                answers.setdefault(event.request_id, Answer([], [])).add(event)
        return [answers[str(index)] for index in range(len(prompts))]

    def _submit(self, name: str, prompt: list[int], adapter: AdapterRef | None) -> None:
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
        self._engine.submit(Request(id=name, tenant="t", prompt_token_ids=prompt, sampling=sampling, adapter=adapter))


@torch.inference_mode()
def _logits(model: peft.PeftModel, prompt: list[int], answer: Answer) -> torch.Tensor:
    """float32`[tokens, vocab]`: what each token of `answer` was chosen from."""
    ids = torch.tensor([prompt + answer.tokens[:-1]])
    [offset] = calculate_alora_offsets(model.peft_config, model.active_adapter, ids[:, : len(prompt)])
    # Counted from the end; PEFT's generate looks for the invocation in the prompt, its forward in all that it is given.
    keywords = {} if offset is None else {"alora_offsets": [offset + len(answer.tokens) - 1]}
    return model(input_ids=ids, use_cache=False, **keywords).logits[0, len(prompt) - 1 :].float()


def _divergence(logits: torch.Tensor, base: torch.Tensor) -> float:
    """Nats: the mean Kullback-Leibler divergence from the base's next-token distribution."""
    adapted, unchanged = logits.double().log_softmax(-1), base.double().log_softmax(-1)
    return float((adapted.exp() * (adapted - unchanged)).sum(-1).mean())


def _fault(figures: dict[str, float]) -> Fault | None:
    error = figures["largest_logprob_error"]
    if not figures["differing"] and math.isfinite(error) and error <= LOGPROB_TOLERANCE:
        return None
    sentence = (
        f"{figures['differing']:g} of {figures['tokens']:g} greedy tokens are not PEFT's, and their log probabilities "
        f"are up to {error:.2g} apart, where {LOGPROB_TOLERANCE:g} is allowed"
    )
    return Fault(PARITY_FAILED, sentence)
