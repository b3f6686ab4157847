"""From logits to tokens: penalties, bias, temperature, top-k, top-p, min-p, and a generator of its own per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.engine.messages import TokenEvent, TopLogprob
from loramux.engine.request import SamplingParams
from loramux.engine.sequence import Sequence

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """A token and, where asked for, its log probability among its alternatives."""

    token_id: int
    logprob: float | None = None
    top: list[TopLogprob] | None = None


class Sampler:
    """Chooses one token for each row. A request's randomness comes from its own generator and nothing else."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self._generators: dict[str, torch.Generator] = {}

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[TokenEvent]:
        """One event for each of `sequences` from its row of `logits` `[len(sequences), vocab]`, any float dtype."""
        most_likely = logits.argmax(dim=-1).tolist() if sequences else []
        events = []
        for row, sequence in enumerate(sequences):
            if is_plain_greedy(sequence):
                choice = Choice(most_likely[row])
            else:
                choice = self._choose(logits[row].float(), sequence)
            events.append(token_event(sequence, choice, self.eos_token_ids))
        return events

    def forget(self, request_id: str) -> None:
        """The request has ended: drop its generator."""
        self._generators.pop(request_id, None)

    def _choose(self, logits: torch.Tensor, sequence: Sequence) -> Choice:
        params = sequence.request.sampling
        steered = self._forbid_early_end(steer(logits, sequence), sequence)
        if params.greedy:
            token_id = int(steered.argmax())
        else:
            token_id = draw(truncate(steered / params.temperature, params), self._generator(sequence))
        if params.logprobs is None:
            return Choice(token_id)
        logprobs = logits.log_softmax(dim=-1)
        values, ids = logprobs.topk(params.logprobs)
        top = [TopLogprob(i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        return Choice(token_id, float(logprobs[token_id]), top)

    def _forbid_early_end(self, logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        ends = [i for i in forbidden_ends(sequence, self.eos_token_ids) if i < logits.numel()]
        if not ends:
            return logits
        return logits.index_fill(0, torch.tensor(ends, dtype=torch.long, device=logits.device), _NEVER)

    def _generator(self, sequence: Sequence) -> torch.Generator:
        if sequence.id not in self._generators:
            generator = torch.Generator()
            seed = sequence.request.sampling.seed
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
            self._generators[sequence.id] = generator
        return self._generators[sequence.id]


def token_event(sequence: Sequence, choice: Choice, eos_token_ids: tuple[int, ...]) -> TokenEvent:
    """The news of one sampled token, with `stop` where it ends the answer."""
    params = sequence.request.sampling
    ended = choice.token_id in params.stop_token_ids or (choice.token_id in eos_token_ids and not params.ignore_eos)
    return TokenEvent(
        request_id=sequence.id,
        token_id=choice.token_id,
        logprob=choice.logprob,
        top_logprobs=choice.top,
        finish_reason="stop" if ended else None,
    )


def forbidden_ends(sequence: Sequence, eos_token_ids: tuple[int, ...]) -> set[int]:
    """Tokens that would end the answer before it has `min_tokens`."""
    params = sequence.request.sampling
    if sequence.num_output_tokens >= params.min_tokens:
        return set()
    return {*eos_token_ids, *params.stop_token_ids}


def is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the answer is simply the most likely token."""
    p = sequence.request.sampling
    return (
        p.greedy
        and p.logprobs is None
        and not p.logit_bias
        and (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
        and sequence.num_output_tokens >= p.min_tokens
    )


def steer(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Penalties and bias on one row of float32 logits `[vocab]`.

    Repetition (Keskar et al., 2019) looks at the prompt and the output; presence and frequency, as in the OpenAI API,
    at the output only.
    """
    p = sequence.request.sampling
    logits = logits.clone()
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        output = torch.tensor(sequence.token_ids[sequence.num_prompt_tokens :], dtype=torch.long, device=logits.device)
        counts = torch.bincount(output, minlength=logits.numel())
        logits -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    for token_id, bias in p.logit_bias.items():
        logits[token_id] += bias
    return logits


def truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Rule out the tokens that top_k, top_p and min_p exclude; the most likely one always stays."""
    if 0 < params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], _NEVER)
    if params.top_p < 1.0:
        ordered, ids = logits.sort(descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        # A token is out when those before it already hold top_p; the first never is.
        outside = probs.cumsum(dim=-1) - probs >= params.top_p
        outside[0] = False
        logits = logits.index_fill(0, ids[outside], _NEVER)
    if params.min_p > 0.0:
        logits = logits.masked_fill(logits < logits.max() + torch.tensor(params.min_p).log(), _NEVER)
    return logits


def draw(logits: torch.Tensor, generator: torch.Generator) -> int:
    """One token from softmax(logits) `[vocab]`, by exponential races: the arg max of p / Exp(1)."""
    noise = torch.empty(logits.numel()).exponential_(generator=generator)
    return int((logits.softmax(dim=-1).cpu() / noise).argmax())
