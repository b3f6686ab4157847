"""Prompts with images over ranks on the path of a GPU: rank 0 has the tower, and the rows are broadcast in each step.

In the interpreter the ranks are threads, and gloo is their collective.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from adapter_zoo import Asked
from image_prompts import ImageZoo, Pictured, mixed_prompts, picture, serve
from interpreted import INTERPRETED
from preempting import preempting

from loramux.engine.engine import Engine
from loramux.engine.execution.cuda_graphs import count_recordings
from loramux.engine.execution.gpu_runner import GpuRunner
from loramux.engine.execution.vision import Tower
from loramux.engine.messages import ImageInput, TokenEvent

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="ranks are threads in the interpreter alone")

DEEP, PLACES, WHOLE, LINES = "qwen3_vl", "qwen2_vl", "gemma3_images", "mistral3_images"
"""A family that adds rows of images after its first layers, one with positions in time, height and width, one whose
images are seen ahead, and one with tokens after the lines of an image."""
FAMILIES = (
    DEEP,
    WHOLE,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (PLACES, LINES, "qwen2_5_vl", "gemma4_images", "qwen3_5_images", "qwen3_vl_moe")
    ),
)


def ranked(zoo: ImageZoo, **settings: object) -> Engine:
    sizes = {"device": "cpu", "tensor_parallel_size": 2, "max_num_seqs": 3, "max_model_len": 256}
    engine = zoo.zoo.engine(**sizes | {"max_num_batched_tokens": 13} | settings)
    assert isinstance(engine._runner, GpuRunner)
    engine._runner.bank.pool.fill_(float("nan"))
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_ranks_answer_images_next_to_text_and_adapters_as_transformers_does(
    images_of, collectives, family, caplog
) -> None:
    """Cut into chunks, preempted, with an adapter of the tower, and then from cached prefixes."""
    zoo = images_of(family)
    asked = [*mixed_prompts(4), Pictured("tower", "tower", ((5, 6), picture(4, 20, 28), (7, 8)), 4)]
    answers = {one.name: zoo.answer(one) for one in asked}
    engine = preempting(ranked(zoo), every=8)
    at_start = {rank: len(those) for rank, those in collectives.items()}
    with closing(engine):
        assert engine.facts.images
        assert serve(zoo, engine, asked, [0, 1, 2, 3, 4]) == answers
        first = engine.stats()
        assert serve(zoo, engine, asked[2:3]) == {"r2": answers["r2"]}
        again = engine.stats()
    assert first.preemptions > 0
    assert again.images_encoded == first.images_encoded == sum(len(zoo.request(one).images) for one in asked)
    assert again.cached_tokens > first.cached_tokens
    assert collectives[0] == collectives[1]
    assert at_start[0] == at_start[1], "both ranks record the same steps"
    assert [shape for name, shape in collectives[0][at_start[0] :] if name == "broadcast" and len(shape) == 3]
    assert "without CUDA graphs" not in caplog.text


def test_gpu_ranks_tower_without_memory_for_an_image_ends_its_request_alone(
    images_of, collectives, monkeypatch
) -> None:
    """Rank 0 computes images next to the steps; a failure there has sent nothing to the other rank."""
    zoo = images_of(DEEP)
    failing = Pictured("failing", "plain", ((5, 6), picture(9, 24, 24), (7, 8)), 4)
    asked = [*mixed_prompts(2), Asked("text", "wide", (5, 6, 7, 8), 9)]
    (image,) = zoo.request(failing).images
    encode = Tower.encode

    def encode_unless_full(tower: Tower, one: ImageInput) -> torch.Tensor:
        if one.digest == image.digest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return encode(tower, one)

    monkeypatch.setattr(Tower, "encode", encode_unless_full)
    events: list[TokenEvent] = []
    with closing(ranked(zoo)) as engine:
        for one in (asked[0], failing, *asked[1:]):
            engine.submit(zoo.request(one))
        while not engine.is_idle:
            report = engine.step()
            events += report.events if report else []
    faults = {event.request_id: event.fault for event in events if event.fault}
    assert [*faults] == ["failing"]
    assert faults["failing"].message == "An image of the request could not be computed."
    served = {
        one.name: [event.token_id for event in events if event.request_id == one.name and event.token_id is not None]
        for one in asked
    }
    assert served == {one.name: zoo.answer(one) for one in asked}
    assert collectives[0] == collectives[1]


@pytest.mark.parametrize("family", [DEEP, WHOLE])
def test_gpu_ranks_without_memory_for_the_tower_record_the_steps_of_text_alone(
    images_of, collectives, monkeypatch, caplog, family
) -> None:
    """Only rank 0 measures the tower; the others record neither steps with images nor steps for a whole image."""

    def measure(_tower: Tower, _most_tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Tower, "measure", measure)
    zoo, text = images_of(family), Asked("text", "plain", (5, 6, 7, 8), 5)
    with closing(ranked(zoo, max_num_seqs=1, max_num_batched_tokens=2)) as engine:
        assert not engine.facts.images
        assert serve(zoo, engine, [text]) == {"text": zoo.answer(text)}
        stats = engine.stats()
    assert "such an image does not fit the GPU's memory" in caplog.text
    assert stats.step_graphs + stats.step_graphs_missing == 2 * count_recordings(1, 2)
    assert collectives[0] == collectives[1]
