"""Every format that PEFT saves and this server serves, token for token as PEFT, alone and mixed with all others."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
from adapter_zoo import Asked, serve
from eager_drafts import draft_always
from formats import FORMATS, OF_LATENTS, FormatZoo
from preempting import preempting

ON_LINEARS = ("lora_bias", "biases", "biases_dora", "dora", "ia3")
TIED = tuple(name for name in FORMATS if name.startswith("tied_"))
TOKENS = ("head_tokens", "same_tokens", "only_head_tokens")
ON_TIED = ("embedding", "both", "saved", "saved_head", "saved_embedding", "one_norm", "tokens", *TOKENS, *TIED)

BASES = {
    "llama": ("llama", tuple(FORMATS), False),
    "tied": ("qwen2", (*ON_LINEARS, *ON_TIED), True),  # its linears have biases
    "head norms": ("qwen3", ("saved_norms", "one_norm", "plain"), False),
    # Its embeddings are scaled.
    "scaled": ("gemma3", ("embedding", "saved_embedding", "saved_norms", "tokens", "dora"), False),
    "scaled and tied": ("gemma3", ("tied_saved", "tied_pair"), True),
    # Its cache is compressed: queries and results are multiplied instead of keys and values.
    "latent": ("deepseek_v3", tuple(OF_LATENTS), False),
}


@pytest.fixture(scope="session")
def formats_of(tmp_path_factory: pytest.TempPathFactory):
    """formats_of("llama"): made once a session."""
    made: dict[str, FormatZoo] = {}

    def get(base: str) -> FormatZoo:
        if base not in made:
            family, formats, tied = BASES[base]
            made[base] = FormatZoo(family, tmp_path_factory.mktemp(base), formats, tied)
            made[base].make_adapters()
        return made[base]

    return get


def some_requests(zoo: FormatZoo, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    prompts = (tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 4, 17]))) for _ in range(100))
    return [
        Asked(f"{name} {i}", name, prompt, rng.randrange(4, 9))
        for i, (name, prompt) in enumerate(zip([*zoo.formats, None], prompts, strict=False))
    ]


@pytest.mark.parametrize("base", BASES)
def test_every_format_in_one_batch_answers_as_peft_does(formats_of, base: str) -> None:
    zoo = formats_of(base)
    asked = some_requests(zoo, seed=3)
    engine = zoo.engine(max_num_batched_tokens=23)
    got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == zoo.answer(request), request.adapter
    again = serve(zoo, engine, asked, arrivals=[0] * len(asked))  # however long the loads took: now they are there
    assert again == got
    assert engine.stats().max_distinct_adapters_beside_base >= 2


@pytest.mark.parametrize("base", ["llama", "tied"])
def test_every_format_with_drafts_answers_as_peft_does(formats_of, base: str) -> None:
    zoo = formats_of(base)
    asked = some_requests(zoo, seed=3)
    answers = {request.name: zoo.answer(request) for request in asked}
    engine = zoo.engine(max_num_batched_tokens=41)
    draft_always(engine.scheduler, lambda own: answers[own.id])
    got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == answers[request.name], request.adapter
    assert engine.stats().accepted_tokens > 20


@pytest.mark.parametrize(
    ("base", "size", "seed"),
    [
        ("llama", 2, 3),
        ("tied", 2, 3),
        ("latent", 2, 3),
        *(
            pytest.param(base, size, seed, marks=pytest.mark.slow)
            for base, size in (("llama", 2), ("llama", 4), ("tied", 2), ("head norms", 2), ("scaled", 2))
            for seed in (7, 8, 9)
        ),
    ],
)
def test_ranks_every_format_with_drafts_preempted_answers_as_peft_does(
    formats_of, base: str, size: int, seed: int
) -> None:
    """In random order. The tied base has biases, which DoRA and trained biases meet; its head is divided with its
    embedding."""
    zoo = formats_of(base)
    asked = some_requests(zoo, seed)
    random.Random(seed).shuffle(asked)
    answers = {request.name: zoo.answer(request) for request in asked}
    with closing(zoo.engine(max_num_batched_tokens=41, tensor_parallel_size=size)) as engine:
        preempting(engine)
        draft_always(engine.scheduler, lambda own: answers[own.id])
        got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
        for request in asked:
            assert got[request.name] == answers[request.name], request.adapter
        assert engine.stats().accepted_tokens > 5
        assert engine.stats().preemptions > 0


def test_every_format_alone_answers_as_peft_does(formats_of) -> None:
    zoo = formats_of("llama")
    engine, answers = zoo.engine(max_num_batched_tokens=7), []
    for name in zoo.formats:
        asked = Asked(f"{name} alone", name, tuple(range(5, 20)), 6)
        assert serve(zoo, engine, [asked])[asked.name] == zoo.answer(asked), name
        answers.append(zoo.answer(asked))
    assert len({tuple(answer) for answer in answers}) == len(zoo.formats), "each of them matters"


def test_reused_slot_keeps_nothing_of_its_last_adapter(formats_of) -> None:
    """In a pool for two or three of them: pages and slots go from one format to another."""
    zoo = formats_of("llama")
    asked = some_requests(zoo, seed=5)
    engine = zoo.engine(pool_bytes=36 * 16 * 3 * 2 * 2 * 16 * 4)
    got = serve(zoo, engine, asked)
    for request in asked:
        assert got[request.name] == zoo.answer(request), request.adapter
    assert engine.stats().adapter_evictions >= 5
