"""Requests of every kind next to each other on a base with a head, and what an engine tells of each.

The base reads images and keeps states of linear attention. So one step may hold drafts next to images, grammars,
adapters of every kind and all parameters of sampling. The oracle of an engine with drafts is the same engine without.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from adapter_zoo import Asked, to_request
from drafting_heads import draft_what_follows, mtp_engine
from eager_drafts import draft_always
from formats import FormatZoo
from image_prompts import PAD, TEXT, ImageZoo, Pictured, picture
from llguidance import LLMatcher
from msgspec.structs import replace
from multi_token_reference import ReferenceHead, base_of
from preempting import preempting
from tiny_base import byte_tokenizer

from loramux.engine.engine import Engine
from loramux.engine.messages import Constraint, Request

TOKENS, ADDED, EOS = 260, 8, 256
"""Tokens of the base, tokens that an adapter adds, and the token that ends an answer."""
INVOKE = [7, 8]
LORA = TEXT | {"r": 5, "lora_alpha": 10, "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "plain": peft.LoraConfig(**LORA),
    "dora": peft.LoraConfig(**LORA | {"r": 9}, use_dora=True),
    "activated": peft.LoraConfig(**LORA, alora_invocation_tokens=INVOKE),
    "added": peft.LoraConfig(**LORA, modules_to_save=["embed_tokens", "lm_head"]),
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
THOUGHT, OPENING, MARK = ord("."), ord("("), ord("k")
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"grammar": LLMatcher.grammar_from_regex("[0-9]{12}")},
    {"grammar": LLMatcher.grammar_from_regex("(ab|cd){2,8}")},
    {"grammar": LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))},
    {"grammar": LLMatcher.grammar_from_regex("[a-f]{3,9}"), "after": THOUGHT},
    {"grammar": LLMatcher.grammar_from_regex("[a-f]{3,9}"), "after": THOUGHT, "opening": OPENING},
    {"grammar": LLMatcher.grammar_from_regex("k[0-9]{2,9}"), "after": THOUGHT, "entry": MARK},
)
"""Constraints, also of tools: after a thought, with a thought that may be left out, and with the mark of a call."""
TO_THOUGHT_END = {THOUGHT: 6.0, OPENING: 6.0, MARK: 6.0}
"""Bias without which random weights think to the end of their answers."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3, "ignore_eos": False},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 2},
    {"frequency_penalty": 0.4, "min_tokens": 5, "stop_token_ids": tuple(range(3, 250, 7)), "logprobs": 0},
    {"temperature": 0.9, "seed": 8, "allowed_token_ids": tuple(range(40, 90)), "logprobs": 1},
    {"prompt_logprobs": 1, "logprobs": 1, "logprob_token_ids": (40, 50)},
)


class MixedZoo(FormatZoo):
    """A base of text and images with a head of random weights, and an adapter of each kind in `ADAPTERS`."""

    def __init__(self, root: Path, **fields: Any) -> None:
        super().__init__("qwen3_5_images", root, (), vocab_size=TOKENS, eos_token_id=EOS, **fields)
        byte_tokenizer().save_pretrained(self.base)
        self._makes_added = False
        for seed, (name, config) in enumerate(ADAPTERS.items()):
            self._makes_added = name == "added"
            self.make_format(name, config, seed)
        ReferenceHead.random(base_of(self.base)).save(self.base)
        self.images = ImageZoo(self)

    def _base(self) -> Any:
        model = super()._base()
        if self._makes_added:
            model.resize_token_embeddings(TOKENS + ADDED)
            with torch.no_grad():  # so that answers have them
                model.get_output_embeddings().weight[TOKENS:] *= 3.0
        return model


def mixed_requests(
    zoo: MixedZoo, seed: int, count: int, lengths: tuple[int, ...] = (6, 11, 16), longest_prompt: int = 33
) -> list[Request]:
    """Return requests of kinds that a seed draws; each kind of `SAMPLING` and adapter, and constraints and images."""
    rng, found = random.Random(seed), []
    adapters, kinds = [None, *ADAPTERS], [*SAMPLING]
    rng.shuffle(adapters)
    rng.shuffle(kinds)
    for number in range(count):
        adapter, steer = adapters[number % len(adapters)], dict(kinds[number % len(kinds)])
        ids = tuple(rng.randrange(10, 80) for _ in range(rng.choice((1, 5, 18, longest_prompt))))
        if adapter == "added":
            ids = (*ids, *range(TOKENS, TOKENS + ADDED), *ids[:2], TOKENS, TOKENS + 1)
        if adapter == "activated":
            ids = (*ids, *INVOKE, 9)
        bound = rng.choice(GRAMMARS) if rng.random() < 0.5 and "allowed_token_ids" not in steer else None
        if bound is not None and "after" in bound:
            steer["logit_bias"] = TO_THOUGHT_END
        output = rng.choice(lengths)
        if rng.random() < 0.4 and "prompt_logprobs" not in steer:
            pictured = Pictured("", adapter, ((11, 12), picture(number, 24, rng.choice((8, 20))), ids), output)
            request = zoo.images.request(pictured, **steer)
        else:
            request = to_request(zoo, Asked("", adapter, ids, output), **steer)
        constraint = None if bound is None else Constraint(field="f", **bound)
        names = [f"r{number}"] if rng.random() < 0.7 else [f"r{number} {choice}" for choice in range(2)]
        found += [replace(request, id=name, group_id=names[0], constraint=constraint) for name in names]
    return found


class Told(NamedTuple):
    """Output of an engine for one token of an answer."""

    token_id: int | None
    logprob: Any
    top: Any
    finish_reason: str | None
    counted: int | None
    """Tokens that the answer's end counts."""


@dataclass
class Answer:
    """Everything that an engine tells of one request, in whichever parts."""

    told: list[Told] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)
    """Log probabilities of the prompt's tokens."""

    @property
    def tokens(self) -> list[int]:
        return [one.token_id for one in self.told if one.token_id is not None]


def answers_of(engine: Engine, requests: list[Request], arrivals: list[int]) -> dict[str, Answer]:
    """Run `requests` to their ends, the i-th arriving before step `arrivals[i]`."""
    found = {request.id: Answer() for request in requests}
    turn = 0
    while turn <= max(arrivals) or not engine.is_idle:
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == turn:
                engine.submit(request)
        for event in report.events if (report := engine.step()) else []:
            assert event.finish_reason != "error", event.fault
            answer = found[event.request_id]
            if event.prompt_logprobs is not None:
                answer.prompt += [near(one.logprob) for one in event.prompt_logprobs.tokens]
            if event.token_id is None and event.finish_reason is None:
                continue
            top = sorted((one.token_id, one.logprob) for one in event.top_logprobs or ())
            logprob = None if event.logprob is None else near(event.logprob)
            counted = None if event.count is None or event.finish_reason is None else event.count.tokens.output
            near_top = [(token_id, near(value)) for token_id, value in top]
            answer.told.append(Told(event.token_id, logprob, near_top, event.finish_reason, counted))
        turn += 1
    return found


def near(value: float) -> Any:
    return pytest.approx(value, abs=2e-3)


def drafting_engine(zoo: MixedZoo, source: str, answers: dict[str, Answer], seed: int, **settings: Any) -> Engine:
    """Return an engine that drafts in every step, from its head or copies; half of the drafts are as in `answers`."""
    right = {name: answer.tokens for name, answer in answers.items()}
    if source == "mtp":
        engine = mtp_engine(zoo, seed=seed, **settings)
        draft_what_follows(engine, right)
    else:
        engine = zoo.engine(**settings, speculation="ngram", max_draft_tokens=4)
        draft_always(engine.scheduler, lambda own: right[own.id], seed, most=4)
    engine.scheduler.memory.swap.pays = lambda sequence: True  # type: ignore[method-assign]
    return engine


def check_drafts_change_nothing(
    zoo: MixedZoo, source: str, seed: int, requests: list[Request], every: int, **settings: Any
) -> None:
    """Compare the answers of an engine with drafts with those without; before each `every`-th step of the former a
    sequence is preempted."""
    arrivals = [number // 3 for number in range(len(requests))]
    alone = answers_of(zoo.engine(**settings), requests, arrivals)
    engine = drafting_engine(zoo, source, alone, seed, **settings)
    found = answers_of(preempting(engine, every), requests, arrivals)
    for request in requests:
        assert found[request.id] == alone[request.id], request
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions > 0
    assert stats.pages_kv == 0


class PlacedHead(ReferenceHead):
    """Qwen's head in a text with images: its pairs have the angles of their tokens' places in three dimensions."""

    cos, sin = torch.empty(0), torch.empty(0)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


@torch.no_grad()
def drafts_in_images(zoo: MixedZoo, asked: Pictured, token_ids: list[int], count: int) -> torch.Tensor:
    """Return the logits `[count, vocabulary]` of the head's drafts after `token_ids`, which begin with the prompt of
    `asked`, from transformers' own embeddings, places and hidden states."""
    model = zoo._model(asked.adapter)
    seen: dict[str, Any] = {}
    text = next(module for name, module in model.named_modules() if name.endswith("language_model"))
    hook = text.register_forward_hook(
        lambda _module, _args, inputs, output: seen.update(inputs, hidden=output.last_hidden_state), with_kwargs=True
    )
    ids = torch.tensor([token_ids])
    model(input_ids=ids, mm_token_type_ids=(ids == PAD).int(), **zoo.images.pixels_of(asked))
    hook.remove()
    base = base_of(zoo.base)
    head = PlacedHead(base, ReferenceHead.read(base, zoo.base).weights)
    embeddings, hidden = seen["inputs_embeds"][0, 1:], seen["hidden"][0, :-1]
    last = seen["position_ids"][-3:, :, -1:]  # of time, height and width
    places = torch.cat((seen["position_ids"][-3:, :, 1:], *(last + 1 + ahead for ahead in range(count))), dim=-1)
    head.cos, head.sin = (part[0] for part in text.rotary_emb(hidden[None], places))
    found = []
    for _ in range(count):
        g = head.results(embeddings, hidden)[-1:]
        found.append(g[0] @ head.output.T)
        embeddings = torch.cat((embeddings, head.embedding[found[-1].argmax()][None]))
        hidden = torch.cat((hidden, g))
    return torch.stack(found)
