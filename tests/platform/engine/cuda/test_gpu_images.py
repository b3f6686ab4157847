"""Prompts with images as a GPU serves them, token for token with transformers and PEFT."""

from __future__ import annotations

import pytest
import torch
from eager_drafts import draft_always
from image_prompts import ImageZoo, Pictured, mixed_prompts, picture, serve
from msgspec.structs import replace
from preempting import preempting
from recorded_steps import recorded
from specializations import specialization

from loramux.engine.execution import cuda_graphs, step_buffers
from loramux.engine.execution.cuda_graphs import DecoderGraphs, Recording
from loramux.engine.execution.gpu_runner import GpuRunner, warm_up
from loramux_adapters.bank import AdapterBank
from loramux_adapters.prepared import prepare_pages
from loramux_kernels.cuda.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEEP, WINDOWS = "qwen3_vl", "gemma4_images"
"""A family that adds rows of images after its first layers, and one whose images are seen ahead in windows alone."""
FAMILIES = (
    (DEEP, 5),
    (WINDOWS, 2),
    *(
        pytest.param(name, 5, marks=pytest.mark.slow)
        for name in (
            WINDOWS,
            "gemma3_images",
            "qwen2_5_vl",
            "qwen2_vl",
            "mistral3_images",
            "qwen3_5_images",
            "qwen3_vl_moe",
            "qwen3_5_moe_images",
        )
    ),
)
OWN_RECORDINGS = ("qwen3_vl", "qwen3_vl_moe", "gemma3_images", "gemma4_images")
"""Families whose layers treat rows of images differently."""


def small_engine(zoo: ImageZoo, **settings: object):
    sizes = {"device": DEVICE, "max_num_seqs": 3, "max_model_len": 256, "max_num_batched_tokens": 48}
    engine = zoo.zoo.engine(**sizes | settings)
    assert isinstance(engine._runner, GpuRunner)
    assert engine.facts.images
    engine._runner.bank.pool.fill_(float("nan"))
    return engine


def watched(graphs: DecoderGraphs) -> list[object]:
    """Return the kinds of the steps from now on; None: the step was not recorded."""
    stage, kinds = graphs.stage, []

    def noted(packed, ranks, extras, images=None):
        decode = stage(packed, ranks, extras, images)
        is_own = graphs._has_images and images is not None
        kinds.append(None if decode is None else cuda_graphs.kind_of(packed.segments, ranks, extras, has_images=is_own))
        return decode

    graphs.stage = noted
    return kinds


@pytest.mark.parametrize(("family", "count"), FAMILIES)
def test_gpu_engine_answers_images_next_to_text_and_adapters_as_transformers_does(
    images_of, family, count, caplog
) -> None:
    """In recorded steps: prompts with images of the base and of two adapters, next to text that decodes."""
    zoo, asked = images_of(family), mixed_prompts(count)
    engine = small_engine(zoo)
    kinds = watched(engine._runner._decoder_graphs)
    try:
        assert serve(zoo, engine, asked, [0, 1, 2, 3, 5][:count]) == {one.name: zoo.answer(one) for one in asked}
    finally:
        engine.close()
    assert None not in kinds
    assert ("images" in kinds) == (family in OWN_RECORDINGS)
    assert count < 5 or "base" in kinds or "pairs" in kinds
    assert "without CUDA graphs" not in caplog.text


@pytest.mark.parametrize("family", [DEEP, pytest.param(WINDOWS, marks=pytest.mark.slow)])
def test_gpu_engine_steps_larger_than_recorded_ones_answer_images_as_transformers_does(
    images_of, family, monkeypatch
) -> None:
    for module in (cuda_graphs, step_buffers):
        monkeypatch.setattr(module, "MOST_RECORDED_ROWS", 8)
    zoo, asked = images_of(family), mixed_prompts(3)[1:]
    engine = small_engine(zoo)
    kinds = watched(engine._runner._decoder_graphs)
    try:
        assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}
    finally:
        engine.close()
    assert None in kinds


@pytest.mark.slow
@pytest.mark.parametrize("family", [DEEP, WINDOWS])
def test_gpu_engine_preemptions_drafts_and_short_chunks_change_no_answer_to_images(images_of, family) -> None:
    zoo, asked = images_of(family), mixed_prompts(5)
    answers = {one.name: zoo.answer(one) for one in asked}
    sizes = {"max_num_batched_tokens": 13, "prefix_cache": False, "swap_bytes": 0}
    engine = preempting(small_engine(zoo, speculation="ngram", max_draft_tokens=3, **sizes), every=8)
    draft_always(engine.scheduler, lambda sequence: answers[sequence.id], most=3)
    try:
        assert serve(zoo, engine, asked, [0, 1, 2, 3, 5]) == answers
        assert engine.stats().preemptions > 0
        assert engine.stats().accepted_tokens > 0
    finally:
        engine.close()


def test_gpu_engine_prompt_that_ends_with_an_image_is_computed_from_its_rows(images_of) -> None:
    """The last step of the prompt has one row, as a step that decodes; the answer's tokens have places after it."""
    zoo, image = images_of(DEEP), picture(3, 24, 24)
    whole = zoo.request(Pictured("whole", None, ((5, 6, 7), image), 4))
    prompt = whole.prompt_token_ids[:-1]
    engine = small_engine(zoo, max_num_batched_tokens=len(prompt) - 1, max_num_seqs=1)
    steps, launch = [], engine._runner.launch
    engine._runner.launch = lambda step: steps.append([chunk.length for chunk in step.chunks]) or launch(step)
    cut = zoo.zoo.engine(max_num_batched_tokens=len(prompt), device="cpu")
    try:
        found = []
        for one in (engine, cut):
            tokens: list[int] = []
            one.submit(replace(whole, prompt_token_ids=prompt))
            while not one.is_idle:
                report = one.step()
                tokens += [event.token_id for event in (report.events if report else []) if event.token_id is not None]
            found.append(tokens)
    finally:
        engine.close()
        cut.close()
    assert steps[:2] == [[len(prompt) - 1], [1]]
    assert found[0] == found[1]


def test_gpu_engine_adapter_of_the_tower_is_read_although_the_host_keeps_pages_alone(images_of, monkeypatch) -> None:
    monkeypatch.setattr(AdapterBank, "prepare", lambda bank, w: prepare_pages(w, bank.plan_layout(w.plan), bank.pool))
    zoo = images_of(DEEP)
    asked = [Pictured(f"r{i}", "tower", ((5, 6), picture(i, 24, 16), (7, 8)), 5) for i in range(2)]
    engine = small_engine(zoo)
    try:
        for one in asked:  # the host has the adapter's pages when the second begins
            assert serve(zoo, engine, [one]) == {one.name: zoo.answer(one)}
    finally:
        engine.close()


def record_and_run(function, inputs) -> Recording:
    """Record as a card does: what is recorded is compiled."""
    function()
    return Recording(function, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_images", DEEP])
def test_kernels_of_steps_with_images_were_compiled_at_the_start(images_of, monkeypatch, family) -> None:
    for module in (cuda_graphs, step_buffers):
        monkeypatch.setattr(module, "MOST_RECORDED_ROWS", 24)
    seen: set[tuple[object, ...]] = set()
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: seen.add(specialization(launch)) or run(launch))
    zoo = images_of(family)
    engine = small_engine(zoo)
    runner = engine._runner
    recorded(runner, record_and_run)
    with torch.inference_mode():
        warm_up(runner._forward, runner._buffers, runner._sampler, runner._decoder_graphs._attention.shapes)
    at_start = set(seen)
    try:
        serve(zoo, engine, mixed_prompts(5), [0, 1, 2, 3, 5])
    finally:
        engine.close()
    late = sorted(str(one) for one in seen - at_start)
    assert not late, "\n".join(late)
