"""Recommendations of the checkpoint's generation_config.json apply if the caller left a parameter out."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from gateway_harness import in_harness
from scripted_engine import FACTS

from loramux.common.bundle import SamplingDefaults
from loramux.engine.messages import SamplingParams
from loramux.serving.messages import GenerationRequest
from loramux_api.controllers.completions import CompletionBody
from loramux_api.controllers.completions import to_request as text_request
from loramux_api.schemas.chat import ChatBody
from loramux_api.schemas.chat import to_request as chat_request

RECOMMENDED = msgspec.structs.replace(FACTS, sampling_defaults=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20))


def chat(**fields: object) -> GenerationRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | fields
    return chat_request(msgspec.json.decode(json.dumps(body), type=ChatBody))


def text(**fields: object) -> GenerationRequest:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2} | fields
    return text_request(msgspec.json.decode(json.dumps(body), type=CompletionBody))


def sampled(asked: GenerationRequest, folder: Path, facts: object = RECOMMENDED) -> tuple[float, float, int]:
    """Return temperature, top_p and top_k of the request that reaches the engine."""
    found: list[SamplingParams] = []

    async def use(harness) -> None:
        generation = await harness.service.begin(harness.principal, asked)
        async for _ in generation:
            pass
        found.append(harness.engine.requests[-1].sampling)

    in_harness(use, folder, facts=facts)
    return found[0].temperature, found[0].top_p, found[0].top_k


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.6, 0.9, 20)),
        ({"temperature": 1}, (1.0, 0.9, 20)),
        ({"temperature": 0, "top_k": 0}, (0.0, 0.9, 0)),
        ({"top_p": 1.0, "top_k": -1}, (0.6, 1.0, 0)),
        ({"temperature": None}, (0.6, 0.9, 20)),
    ],
    ids=["nothing", "temperature", "greedy", "all tokens", "null"],
)
def test_recommended_sampling_fills_what_the_caller_left_out(tmp_path: Path, given, expected) -> None:
    assert sampled(text(**given), tmp_path) == expected


def test_without_a_recommendation_the_apis_defaults_apply(tmp_path: Path) -> None:
    assert sampled(text(), tmp_path, FACTS) == (1.0, 1.0, 0)


def test_chats_and_texts_say_what_they_left_out() -> None:
    for make in (chat, text):
        assert make().left_out == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
        assert make(temperature=0.5, top_k=3).left_out == {"top_p", "min_p", "repetition_penalty"}
