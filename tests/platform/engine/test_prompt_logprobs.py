"""Log probabilities of prompts compared with transformers and PEFT, together with other requests, in every order of
steps."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from adapter_zoo import RECIPES, Asked, Zoo, to_request
from delayed_runner import late_engine

from loramux.engine.engine import Engine
from loramux.engine.messages import PromptLogprob
from loramux.engine.scheduling import scheduler
from loramux.engine.scheduling import sequence as sequences

PROMPT = tuple(range(3, 40))
ASKED = [
    Asked("base", None, PROMPT, 3),
    Asked("plain", "plain", PROMPT, 3),
    Asked("again", "plain", PROMPT, 2),
    Asked("silent", "rslora", PROMPT[:20], 4),
    Asked("short", "rslora", PROMPT[:2], 1),
    Asked("single", None, PROMPT[:1], 1),
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    zoo = Zoo("llama", tmp_path_factory.mktemp("zoo"))
    zoo.make_adapter("plain", RECIPES["plain"], 100)
    zoo.make_adapter("rslora", RECIPES["rslora"], 101)
    return zoo


@torch.no_grad()
def reference(zoo: Zoo, asked: Asked) -> torch.Tensor:
    """Log probabilities `[len(prompt) - 1, vocab]` by PEFT."""
    model, ids = zoo._reference, torch.tensor([asked.prompt])
    assert model is not None
    if asked.adapter is None:
        with model.disable_adapter():
            return model(ids).logits[0, :-1].log_softmax(-1)
    model.set_adapter(asked.adapter)
    return model(ids).logits[0, :-1].log_softmax(-1)


def serve(
    zoo: Zoo, engine: Engine, *, preempts: bool = False
) -> tuple[dict[str, list[PromptLogprob]], dict[str, list[int]]]:
    """Run ASKED; all but "silent" want the logprobs of their prompts, which come before their first token."""
    scores: dict[str, list[PromptLogprob]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    for asked in ASKED:
        wanted = None if asked.name == "silent" else 2
        engine.submit(to_request(zoo, asked, prompt_logprobs=wanted))
    ended, turn = 0, 0
    while ended < len(ASKED):
        report = engine.step()
        turn += 1
        for event in report.events if report else []:
            if (part := event.prompt_logprobs) is not None:
                assert part.start == len(scores[event.request_id]) + 1
                assert not tokens[event.request_id]
                scores[event.request_id] += part.tokens
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
            ended += event.finish_reason is not None
        if preempts and turn in (2, 4):
            engine.scheduler.state.preempt(engine.scheduler.running[-1])
    return scores, tokens


@pytest.mark.parametrize(
    "way",
    [
        *("synchronous", "one step ahead", "three rows a step", "preempted"),
        pytest.param("two ranks", marks=pytest.mark.slow),
        pytest.param("two ranks preempted", marks=pytest.mark.slow),
    ],
)
def test_prompt_logprobs_equal_pefts_with_other_requests(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "three rows a step":
        builder = sequences.StepBuilder
        monkeypatch.setattr(scheduler, "StepBuilder", partial(builder, scored_left=3))
    ranks = 2 if way.startswith("two ranks") else 1
    ahead = way == "one step ahead"
    engine = late_engine(zoo)[0] if ahead else zoo.engine(max_num_batched_tokens=24, tensor_parallel_size=ranks)
    scores, tokens = serve(zoo, engine, preempts=way.endswith("preempted"))
    engine.close()
    assert set(scores) == {"base", "plain", "again", "short"}
    for asked in ASKED:
        assert tokens[asked.name] == zoo.answer(asked)
        if asked.name not in scores:
            continue
        expected = reference(zoo, asked)
        assert len(scores[asked.name]) == len(asked.prompt) - 1
        for row, token, one in zip(expected, asked.prompt[1:], scores[asked.name], strict=True):
            assert one.logprob == pytest.approx(row[token].item(), abs=2e-5)
            assert one.rank == int((row > row[token]).sum()) + 1
            assert [top.token_id for top in one.top] == row.topk(2).indices.tolist()
            assert [top.logprob for top in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=2e-5)
