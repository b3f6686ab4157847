"""A request's tokens and log probabilities are the same alone and with any other requests in the batch, in every
family.

A packed batch holds many requests. Whatever a model computes from the whole batch (the longest position, a chunk size,
a router's load) would let one tenant's request change another's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from adapter_zoo import FAMILIES, FIRST_FAMILIES, SERVED, Asked, Zoo, make_engine, serve, to_request

from loramux_adapters import families

TALK = tuple(range(5, 17))

PLAIN = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


@dataclass(frozen=True)
class Neighbours:
    """Requests that run together with the compared one."""

    prompts: tuple[tuple[int, ...], ...]
    output: int


NEIGHBOURS = {
    "one short": Neighbours(((9,),), 12),
    "one long": Neighbours((tuple(3 + i % 90 for i in range(120)),), 100),
    "one that grows long": Neighbours(((7, 8),), 230),
    "many": Neighbours(tuple(tuple(3 + (i * j) % 90 for i in range(j * 9)) for j in range(1, 7)), 24),
}


def answer(zoo: Zoo, beside: Neighbours | None, adapter: str | None, **settings: object) -> list[tuple[int, float]]:
    """Return tokens and log probabilities of one request that comes when its neighbours have begun."""
    engine = make_engine(zoo.base, **{"max_num_batched_tokens": 64, "prefix_cache": False} | settings)
    length = engine.facts.max_model_len
    for number, prompt in enumerate(beside.prompts if beside else ()):
        kept = prompt[: length - 2]
        output = min(beside.output, length - len(kept))
        engine.submit(to_request(zoo, Asked(f"n{number}", [None, "plain"][number % 2], kept, output)))
    for _ in range(4 if beside else 0):
        engine.step()
    engine.submit(to_request(zoo, Asked("looked at", adapter, TALK, 12), logprobs=3))
    told = []
    while not engine.is_idle:
        report = engine.step()
        for event in report.events if report else []:
            assert event.finish_reason != "error", event.fault
            if event.request_id == "looked at" and event.token_id is not None:
                told.append((event.token_id, event.logprob))
    return told


def check(zoo: Zoo, adapter: str | None, names: Sequence[str] = tuple(NEIGHBOURS), **settings: object) -> None:
    alone = answer(zoo, None, adapter, **settings)
    assert len(alone) == 12
    for name in names:
        neighbours = NEIGHBOURS[name]
        beside = answer(zoo, neighbours, adapter, **settings)
        assert [token for token, _ in beside] == [token for token, _ in alone], name
        assert [logprob for _, logprob in beside] == pytest.approx([logprob for _, logprob in alone], abs=2e-5), name


def test_every_supported_family_is_tried() -> None:
    tried = {FAMILIES[family][0]().model_type for family in SERVED}
    whole = {name for name, family in families.FAMILIES.items() if family.loads_text_alone}  # test_shared_kv.py
    assert tried == families.FAMILIES.keys() - whole


@pytest.mark.parametrize("family", FIRST_FAMILIES)
def test_neighbours_change_nothing(tmp_path, family: str) -> None:
    zoo = Zoo(family, tmp_path)
    zoo.make_adapter("plain", PLAIN, 1)
    check(zoo, None)
    check(zoo, "plain")


@pytest.mark.parametrize("family", [family for family in SERVED if family not in FIRST_FAMILIES])
def test_neighbours_of_a_newer_family_change_nothing(tmp_path, family: str) -> None:
    zoo = Zoo(family, tmp_path)
    # PhiMoE's router is a subclass of nn.Linear with another result: PEFT itself fails if it is adapted.
    zoo.make_adapter("plain", PLAIN | ({"target_modules": ["q_proj", "o_proj"]} if family == "phimoe" else {}), 1)
    zoo.rename_adapter("plain")
    check(zoo, "plain", ["many"])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("block_size", [16, 19])
def test_earlier_contents_of_pages_change_nothing(tmp_path, family: str, block_size: int) -> None:
    """A page's last owner may have left NaN there; 0 x NaN would carry it into another tenant's answer."""
    zoo = Zoo(family, tmp_path)
    zoo.make_adapter("plain", PLAIN | {"r": 5}, 1)
    engine = zoo.engine(block_size=block_size, prefix_cache=False)
    engine._runner.bank.pool.fill_(float("nan"))
    asked = [Asked(f"r{i}", [None, "plain"][i % 2], tuple(range(5, 6 + i * 5)), 9) for i in range(6)]
    got = serve(zoo, engine, asked)
    assert got == {request.name: zoo.answer(request) for request in asked}


ROPES = {
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize(("family", "rope"), [*(("llama", rope) for rope in ROPES), ("phi3", "longrope")])
def test_neighbours_change_nothing_under_any_rope(tmp_path, family: str, rope: str) -> None:
    parameters = ROPES[rope] | {"rope_theta": 10000.0}
    original = {"original_max_position_embeddings": 32} if family == "phi3" else {}
    zoo = Zoo(family, tmp_path, rope_parameters=parameters, **original)
    zoo.make_adapter("plain", PLAIN, 1)
    check(zoo, None)
    asked = Asked("a", "plain", TALK, 12)
    assert [token for token, _ in answer(zoo, NEIGHBOURS["many"], "plain")] == zoo.answer(asked)
