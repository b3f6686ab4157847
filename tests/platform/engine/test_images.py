"""Prompts with images, token for token with transformers' own class and PEFT, in float32."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from adapter_zoo import Asked, Zoo, load
from eager_drafts import draft_always
from image_prompts import PAD, RECIPES, ImageZoo, Pictured, mixed_prompts, picture, save_processor, serve
from msgspec.structs import replace
from preempting import preempting
from quantized_zoo import CHECKPOINTS
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from loramux.common.settings.serving import ClassDeadlines, EngineSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import load_checkpoint, read_config
from loramux.engine.execution.memory_plan import plan_memory
from loramux.engine.execution.sharded_checkpoint import CheckpointShare
from loramux.engine.execution.vision import Tower, images_refused, open_tower, rotary_positions
from loramux.engine.messages import ImageInput, Request, SamplingParams, ServiceClass, TokenEvent
from loramux.engine.scheduling.sequence import Sequence, Step, StepBuilder
from loramux.engine.worker import request_fault
from loramux_adapters.base import describe_base
from loramux_adapters.base_weights import fit_to_base
from loramux_adapters.components import PREFIX
from loramux_adapters.families import reads_other_inputs
from loramux_adapters.names import TensorNames
from loramux_adapters.plan import PlanLimits
from loramux_adapters.sharding import Sharding
from loramux_adapters.tower import changed_linears
from loramux_adapters.weights import AdapterWeights, load_adapter

WHOLE = ("gemma3_images", "gemma4_images")
"""Families in which tokens of an image see later ones."""
FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5_images",
    "mistral3_images",
    *WHOLE,
    "qwen3_vl_moe",
    "qwen3_5_moe_images",
)
OTHER_TEXTS = ("qwen3_vl_moe", "qwen3_5_moe_images")
"""Families whose images are those of another family, with a mixture as text."""


def without(*left_out: str) -> list[Any]:
    """Return the families but some, as parameters."""
    found = [name for name in FAMILIES if name not in left_out]
    return [pytest.param(name, marks=pytest.mark.slow) if name in OTHER_TEXTS else name for name in found]


ON_THE_TOWER: dict[str, dict[str, object]] = {
    "tower": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "eyes": {
        "r": 12,
        "lora_alpha": 5,
        "use_rslora": True,
        "use_dora": True,
        "target_modules": r".*\.(blocks|merger|deepstack_merger_list|vision_tower|multi_modal_projector|embed_vision)"
        r"\..*(qkv|proj|fc1|fc2|mlp\.[02]|linear_1|linear_2|merging_layer|embedding_projection)",
        "rank_pattern": {"qkv": 20},
        "alpha_pattern": {"proj": 3},
    },
}
"""Adapters of the whole model, and of the tower with its connector alone."""


@pytest.fixture(scope="module", params=without())
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageZoo:
    made = Zoo(request.param, tmp_path_factory.mktemp(request.param), max_position_embeddings=512)
    for seed, (name, recipe) in enumerate((RECIPES | ON_THE_TOWER).items()):
        made.make_adapter(name, recipe, seed)
    return ImageZoo(made)


@pytest.fixture(scope="module")
def answers(zoo: ImageZoo) -> dict[str, list[int]]:
    return {one.name: zoo.answer(one) for one in mixed_prompts(20)}


def test_answers_to_images_next_to_text_and_other_adapters_are_transformers(
    zoo: ImageZoo, answers: dict[str, list[int]]
) -> None:
    asked = mixed_prompts(20)
    engine = zoo.zoo.engine(max_num_batched_tokens=64)
    try:
        assert engine.facts.images
        assert serve(zoo, engine, asked, [i // 3 for i in range(20)]) == answers
    finally:
        engine.close()


def test_chunks_cut_inside_images_and_preemptions_change_no_answer(
    zoo: ImageZoo, answers: dict[str, list[int]]
) -> None:
    asked = mixed_prompts(9)
    engine = preempting(zoo.zoo.engine(max_num_batched_tokens=13, prefix_cache=False, swap_bytes=0), every=8)
    try:
        served = serve(zoo, engine, asked, [i // 2 for i in range(9)])
        stats = engine.stats()
    finally:
        engine.close()
    assert served == {one.name: answers[one.name] for one in asked}
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert stats.images_encoded == sum(len(zoo.request(one).images) for one in asked), "once, in spite of preemptions"


@pytest.mark.parametrize("zoo", ["qwen3_vl", pytest.param("gemma3_images", marks=pytest.mark.slow)], indirect=True)
def test_images_over_two_ranks_are_answered_as_transformers_answers_them(
    zoo: ImageZoo, answers: dict[str, list[int]]
) -> None:
    """Rank 0 has computed them, also as an adapter changes the tower."""
    of_tower = [Pictured(name, name, ((5, 6), picture(4, 20, 28), (7, 8)), 5) for name in ON_THE_TOWER]
    asked = [*mixed_prompts(6), *of_tower]
    engine = zoo.zoo.engine(max_num_batched_tokens=13, tensor_parallel_size=2)
    try:
        assert engine.facts.images
        served = serve(zoo, engine, asked, [i // 2 for i in range(8)])
        assert served == {one.name: answers.get(one.name) or zoo.answer(one) for one in asked}
    finally:
        engine.close()


@pytest.mark.parametrize("zoo", without(), indirect=True)
def test_tower_is_read_by_rank_0_alone_and_planned_once(zoo: ImageZoo) -> None:
    base, sharding = describe_base(zoo.zoo.base), Sharding(read_config(zoo.zoo.base), 2)
    of_tower, of_text = [], []
    for rank in (0, 1):
        share = CheckpointShare(base, sharding, rank)
        parameters = dict(load_checkpoint(zoo.zoo.base, "float32", torch.device("cpu"), share).named_parameters())
        of_tower.append(4 * sum(one.numel() for name, one in parameters.items() if reads_other_inputs(name)))
        of_text.append({name: one.shape for name, one in parameters.items() if not reads_other_inputs(name)})
    plan = plan_memory(zoo.zoo.base, base, sharding, 4, 1 << 20, EngineSettings(block_size=16))
    assert of_tower == [plan.tower_bytes, 0]
    assert plan.tower_bytes > 0
    assert of_text[0] == of_text[1]
    alone = plan_memory(zoo.zoo.base, base, Sharding(sharding.config, 1), 4, 1 << 20, EngineSettings(block_size=16))
    assert alone.tower_bytes == plan.tower_bytes
    assert plan.total_bytes == 2 * (plan.weight_bytes + (1 << 20) + plan.expansion_bytes) + plan.tower_bytes


@pytest.mark.parametrize("zoo", without(), indirect=True)
def test_largest_blank_image_is_one_that_the_tower_computes(zoo: ImageZoo) -> None:
    """A GPU computes it at start."""
    loaded, _ = load(zoo.zoo.base)
    assert loaded.tower is not None
    image = loaded.tower.blank_image(100)
    assert loaded.tower.fault_of(image) is None
    assert 9 <= image.num_placeholders <= 100
    assert loaded.tower.encode(image).shape[1] == image.num_placeholders


@pytest.mark.parametrize("zoo", WHOLE, indirect=True)
def test_image_whose_tokens_see_ahead_is_computed_in_one_step(zoo: ImageZoo, answers: dict[str, list[int]]) -> None:
    """Next to decoding rows, of class batch too, and although an image has more tokens than a step is to have."""
    asked = mixed_prompts(9)
    for one, service_class in zip(asked, 3 * tuple(ServiceClass), strict=True):
        if isinstance(one, Pictured):
            asked[asked.index(one)] = dataclasses.replace(one, service_class=service_class)
    engine = zoo.zoo.engine(max_num_batched_tokens=8, max_mixed_prefill_tokens=4, max_num_seqs=4)
    plan, inside = engine.scheduler.plan, []

    def recorded() -> Step:
        step = plan()
        for chunk in step.chunks:
            images = [(one.start, one.start + one.num_tokens) for one in chunk.sequence.request.images]
            inside.extend(chunk for first, end in images if first < chunk.end < end)
        return step

    engine.scheduler.plan = recorded
    try:
        assert engine.scheduler.state.limits.whole_tokens == engine.facts.limits.max_mixed_prefill_tokens
        assert serve(zoo, engine, asked, [2 * i for i in range(9)]) == {one.name: answers[one.name] for one in asked}
        assert not inside
    finally:
        engine.close()


def test_step_takes_the_whole_of_an_image_whose_tokens_see_ahead_or_none_of_it() -> None:
    """Bounds of a kind of prompt tokens that are not used up are exceeded by an image that they would cut first."""
    image = ImageInput(digest="d", patches=b"", grid=(1, 4, 5), start=10, num_tokens=20)
    prompt = Request(
        id="r", tenant="t", prompt_token_ids=[5] * 40, images=(image,), sampling=SamplingParams(max_tokens=1)
    )
    sequence = Sequence(prompt, 0.0)

    def room(tokens_left: int, computed: int, **fields: Any) -> int:
        sequence.num_computed = computed
        return StepBuilder(tokens_left, 8, whole_images=True, **fields).room_for(sequence)

    assert [room(tokens, 0) for tokens in (9, 10, 11, 29, 30, 31, 99)] == [9, 10, 10, 10, 30, 31, 40]
    assert [room(tokens, 10) for tokens in (1, 19, 20, 21)] == [0, 0, 20, 21]
    assert [room(tokens, 17) for tokens in (1, 12, 13, 14)] == [0, 0, 13, 14], "after a page that ends inside it"
    background = {"background": sequence.flow.group}
    assert [room(99, 10, background_left=left, **background) for left in (0, 1, 25)] == [0, 20, 25]
    assert room(19, 10, background_left=1, **background) == 0
    sequence.num_computed = 10
    assert not StepBuilder(19, 8, whole_images=True).has_tokens_for(sequence)
    assert StepBuilder(20, 8, whole_images=True).has_tokens_for(sequence)


@pytest.mark.parametrize(
    ("processor", "vision", "why"),
    [
        ({"do_pan_and_scan": True}, {}, "do_pan_and_scan"),
        ({"size": {"height": 28, "width": 28}}, {}, "vision_config.image_size 24"),
        ({}, {"image_size": 28}, "mm_tokens_per_image = 9 does not divide"),
    ],
)
def test_squares_that_the_tower_would_read_otherwise_than_the_processor_makes_them_are_refused_at_start(
    tmp_path: Path, processor: dict[str, Any], vision: dict[str, Any], why: str
) -> None:
    made = ImageZoo(Zoo("gemma3_images", tmp_path)).zoo
    for name, changes in (("preprocessor_config.json", processor), ("config.json", {"vision_config": vision})):
        facts = json.loads((made.base / name).read_text())
        for key, value in changes.items():
            facts[key] = facts[key] | value if isinstance(value, dict) else value
        (made.base / name).write_text(json.dumps(facts))
    model = read_config(made.base)
    with pytest.raises(UnsupportedModel) as refused:
        open_tower(transformers.AutoModelForImageTextToText.from_config(model), made.base)
    assert why in str(refused.value)


def test_tower_opens_next_to_one_that_hears(tmp_path: Path) -> None:
    sound = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4]}
    config: Any = transformers.Gemma4Config(
        text_config={"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 97, "vocab_size_per_layer_input": 97},
        vision_config={"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "patch_size": 4},
        audio_config=sound,
    )
    config.save_pretrained(tmp_path)
    save_processor(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert open_tower(model, tmp_path).whole_tokens == 0
    assert images_refused(tmp_path, config) is None
    config.vision_config = None
    assert images_refused(tmp_path, config) == "the checkpoint has no vision tower"


@pytest.mark.slow
def test_images_of_a_gemma_4_without_attention_ahead_are_cut_and_answered_as_transformers(tmp_path: Path) -> None:
    """The last layers read the keys and values of earlier ones, as in the small sizes."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    fields = layers | {"num_kv_shared_layers": 2, "use_bidirectional_attention": None, "max_position_embeddings": 512}
    made = Zoo("gemma4_images", tmp_path, **fields)
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        made.make_adapter(name, recipe, seed)
    zoo, asked = ImageZoo(made), mixed_prompts(6)
    engine = made.engine(max_num_batched_tokens=13)
    try:
        assert engine.scheduler.state.limits.max_num_batched_tokens == 13
        assert serve(zoo, engine, asked, [i // 2 for i in range(6)]) == {one.name: zoo.answer(one) for one in asked}
    finally:
        engine.close()


@pytest.mark.parametrize("zoo", without("qwen3_5_images", "qwen3_5_moe_images"), indirect=True)
def test_drafts_after_images_change_no_answer(zoo: ImageZoo, answers: dict[str, list[int]]) -> None:
    asked = [one for one in mixed_prompts(9) if isinstance(one, Pictured)]
    engine = zoo.zoo.engine(max_num_batched_tokens=48, speculation="ngram")
    draft_always(engine.scheduler, lambda sequence: answers[sequence.id])
    try:
        assert serve(zoo, engine, asked) == {one.name: answers[one.name] for one in asked}
        assert engine.stats().accepted_tokens > 0
    finally:
        engine.close()


def test_prefix_of_an_equal_image_is_found_and_of_another_image_of_its_size_is_not(zoo: ImageZoo) -> None:
    """The second request begins like the first. The third differs after the image: its found pages end inside it. The
    last has the tokens of the second with another image."""
    text, more = tuple(range(3, 29)), tuple(range(30, 41))
    first, other = picture(1, 40, 24), picture(2, 40, 24)
    asked = [
        Pictured("first", "plain", (text, first, more), 5),
        Pictured("again", "plain", (text, first, (*more, 50, 51, 52)), 5),
        Pictured("after", "plain", (text, first, (60, 61, 62)), 5),
        Pictured("other", "plain", (text, other, (*more, 50, 51, 52)), 5),
    ]
    whole = zoo.request(asked[0])
    (image,) = whole.images
    end = image.start + image.num_tokens
    equal = {"first": 0, "again": len(whole.prompt_token_ids), "after": end + 1, "other": image.start}
    found = 0
    assert zoo.zoo.family not in WHOLE or image.start < equal["after"] // 16 * 16 < end
    assert equal["again"] >= 32
    engine = zoo.zoo.engine()
    try:
        for one in asked:
            assert serve(zoo, engine, [one]) == {one.name: zoo.answer(one)}
            found += equal[one.name] // 16 * 16
            cached = engine.stats().cached_tokens
            assert cached <= found if zoo.keeps_states else cached == found
        assert cached > 0
        assert engine.stats().images_encoded == 2
        assert engine.stats().images_found == 2
    finally:
        engine.close()


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (5, 70)])
def test_tower_computes_one_image_as_transformers_computes_it_next_to_another(zoo: ImageZoo, size: Any) -> None:
    asked = Pictured("one", None, (picture(1, *size), picture(2, 16, 20)), 1)
    first, _ = zoo.request(asked).images
    loaded, _ = load(zoo.zoo.base)
    assert loaded.tower is not None
    model = zoo.zoo.auto.from_pretrained(zoo.zoo.base)
    with torch.no_grad():
        wanted = model.get_image_features(**zoo.pixels_of(asked)).pooler_output[0]
    assert loaded.tower.fault_of(first) is None
    assert torch.allclose(loaded.tower.encode(first)[0], wanted, atol=1e-5)


class LargestResult(TorchDispatchMode):
    """Counts the elements of the largest result of any operator."""

    num_elements = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **kwargs or {})
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self.num_elements = max(self.num_elements, one.numel())
        return result


@pytest.mark.parametrize("zoo", ["mistral3_images"], indirect=True)
def test_tower_computes_a_large_image_without_a_number_for_each_pair_of_patches(zoo: ImageZoo) -> None:
    loaded, _ = load(zoo.zoo.base)
    assert loaded.tower is not None
    lines, pixels = 16, np.random.default_rng(1).integers(0, 256, 3 * 64 * 64, dtype=np.uint8)
    image = ImageInput(
        digest="d" * 64,
        patches=pixels.tobytes(),
        grid=(1, 2 * lines, 2 * lines),
        start=0,
        num_tokens=lines * (lines + 1),
        num_lines=lines,
    )
    assert loaded.tower.fault_of(image) is None
    with LargestResult() as largest:
        loaded.tower.encode(image)
    assert largest.num_elements < math.prod(image.grid) ** 2 / 4


def test_choices_share_an_image_and_tenants_do_not(zoo: ImageZoo) -> None:
    image = picture(5, 30, 30)
    asked = [
        Pictured(f"{tenant}{choice}", None, ((5, 6, 7), image, (8, 9)), 4, tenant)
        for tenant in ("a", "b")
        for choice in range(3)
    ]
    engine = zoo.zoo.engine()
    try:
        served = serve(zoo, engine, asked)
        assert set(map(tuple, served.values())) == {tuple(zoo.answer(asked[0]))}
        assert engine.stats().images_encoded == 2
        assert engine.stats().images_found == 4
    finally:
        engine.close()


def test_quantized_text_keeps_its_tower(zoo: ImageZoo) -> None:
    asked = mixed_prompts(4)
    engine = zoo.zoo.engine(quantization="int8")
    try:
        assert engine.facts.images
        assert all(len(tokens) == 7 for tokens in serve(zoo, engine, asked).values())
    finally:
        engine.close()


def test_answers_with_adapters_of_the_tower_next_to_others_are_peft(zoo: ImageZoo) -> None:
    image, small = picture(3, 30, 20), picture(4, 9, 24)
    asked: list[Any] = [
        Pictured(f"{adapter}{i}", adapter, ((5, 6, 7 + i), image, (8, 9), small), 6)
        for i in range(2)
        for adapter in (None, "plain", *ON_THE_TOWER)
    ]
    asked += [Asked(f"text {adapter}", adapter, tuple(range(3, 19)), 5) for adapter in ON_THE_TOWER]
    wanted = {one.name: zoo.answer(one) for one in asked}
    assert len({tuple(tokens) for tokens in list(wanted.values())[:4]}) == 4, "each adapter matters"
    engine = zoo.zoo.engine(max_num_batched_tokens=64)
    try:
        assert serve(zoo, engine, asked) == wanted
        stats = engine.stats()
        assert stats.images_encoded == 2 * 3, "once for the base and the adapter off the tower, once for each other"
        again = [Pictured("again", "eyes", asked[3].parts, 6), Pictured("off", "wide", asked[0].parts, 6)]
        assert serve(zoo, engine, again) == {one.name: zoo.answer(one) for one in again}
        assert engine.stats().images_encoded == stats.images_encoded
    finally:
        engine.close()


def test_dora_of_the_tower_is_fitted_to_the_base_alone_while_an_image_is_computed(zoo: ImageZoo) -> None:
    loaded, _ = load(zoo.zoo.base)
    limits = PlanLimits(max_rank=64)

    def fitted(name: str) -> AdapterWeights:
        folder = zoo.zoo.adapters / name
        return fit_to_base(load_adapter(folder, loaded.base, limits, torch.float32), loaded.weights)

    wanted = fitted("eyes").columns
    with changed_linears(loaded.tower_linears, fitted("tower")):
        found = fitted("eyes").columns
    assert wanted.keys() == found.keys()
    assert all(torch.equal(columns, found[name]) for name, columns in wanted.items())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_names_of_tower_linears_are_read_in_the_spelling_of_transformers_4_and_unknown_ones_are_not_dropped(
    family: str, tmp_path: Path
) -> None:
    names, tail = TensorNames(describe_base(Zoo(family, tmp_path).base)), "lora_A.weight"
    place = names.read(f"{PREFIX}visual.blocks.1.attn.qkv.{tail}")
    assert place is not None
    assert place.key == f"{PREFIX}model.visual.blocks.1.attn.qkv.{tail}"
    assert names.read(f"{PREFIX}model.vision_tower.layers.1.qkv.{tail}") is None, "an upload names it as unexpected"


def test_new_revision_on_the_tower_and_another_tenant_get_rows_of_their_own(zoo: ImageZoo) -> None:
    parts = ((5, 6), picture(3, 30, 20), (7, 8))
    engine = zoo.zoo.engine()
    try:
        for count, (adapter, tenant) in enumerate((("tower", "a"), ("eyes", "a"), ("eyes", "b"), (None, "b")), 1):
            one = Pictured(f"r{count}", adapter, parts, 6, tenant)
            assert serve(zoo, engine, [one]) == {one.name: zoo.answer(one)}
            assert engine.stats().images_encoded == count
        held = engine.stats().image_bytes
        engine.retire(zoo.zoo.ref("eyes").digest)
        assert engine.stats().image_bytes == held / 2, "of both tenants"
    finally:
        engine.close()


def test_adapter_that_replaces_a_norm_of_the_tower_answers_text_and_refuses_images_by_name(tmp_path: Path) -> None:
    zoo = ImageZoo(Zoo("qwen2_5_vl", tmp_path))
    zoo.zoo.make_adapter("norm", RECIPES["plain"] | {"modules_to_save": ["merger.ln_q"]}, 7)
    text = Asked("text", "norm", tuple(range(3, 19)), 5)
    engine = zoo.zoo.engine()
    try:
        assert serve(zoo, engine, [text]) == {"text": zoo.answer(text)}
        engine.submit(zoo.request(Pictured("image", "norm", ((5, 6), picture(3, 16, 16), (7,)), 5)))
        ended = [event for event in until_ended(engine, "image") if event.finish_reason]
    finally:
        engine.close()
    assert ended[0].fault is not None
    assert ended[0].fault.code == "images_not_supported"
    assert "visual.merger.ln_q" in ended[0].fault.message


def test_images_larger_than_their_memory_are_refused_with_the_setting(zoo: ImageZoo) -> None:
    engine = zoo.zoo.engine(image_bytes=2_000)
    try:
        engine.submit(zoo.request(Pictured("large", None, ((5, 6), picture(3, 32, 32), (7,)), 5)))
        ended = [event for event in until_ended(engine, "large") if event.finish_reason]
        assert ended[0].fault is not None
        assert "engine.image_bytes" in ended[0].fault.message
    finally:
        engine.close()


def test_request_that_waits_for_memory_of_images_goes_on_without_a_command(zoo: ImageZoo) -> None:
    """The engine waits as its worker does: for a command, of which there is none, or for a wake-up."""
    woken = threading.Semaphore(0)
    asked = [Pictured(f"r{i}", None, ((5, 6), picture(i, 32, 32), (7,)), 3) for i in range(3)]
    image_bytes = max(3 * 16, zoo.request(asked[0]).images[0].num_tokens) * 64 * 4
    loaded, settings = load(zoo.zoo.base, image_bytes=image_bytes)
    engine = build_engine(loaded, settings, wake=woken.release)
    ended = set()
    try:
        for one in asked:
            engine.submit(zoo.request(one))
        while not engine.is_idle:
            if engine.wait_seconds > 0:
                assert woken.acquire(timeout=10)
            report = engine.step()
            ended |= {event.request_id for event in (report.events if report else []) if event.finish_reason}
        assert ended == {"r0", "r1", "r2"}
        assert engine.stats().images_encoded == 3
    finally:
        engine.close()


def test_deadline_of_a_class_ends_a_request_whose_image_is_computed_without_a_command_or_a_wake_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo, go_on, woken = ImageZoo(Zoo("qwen2_5_vl", tmp_path)), threading.Event(), threading.Semaphore(0)
    loaded, settings = load(zoo.zoo.base)
    settings = replace(settings, scheduler=replace(settings.scheduler, deadlines_ms=ClassDeadlines(standard=200)))
    encode = Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda self, image: go_on.wait(60) and encode(self, image))
    engine = build_engine(loaded, settings, wake=woken.release)
    events: list[TokenEvent] = []
    try:
        engine.submit(zoo.request(Pictured("late", None, ((5, 6), picture(3, 16, 16), (7,)), 5)))
        while not engine.is_idle:
            assert engine.wait_seconds < 1
            woken.acquire(timeout=engine.wait_seconds)
            report = engine.step()
            events += report.events if report else []
    finally:
        go_on.set()
        engine.close()
    faults = [event.fault for event in events if event.fault]
    assert [fault.code for fault in faults] == ["deadline_exceeded"]
    assert "deadline passed" in faults[0].message


def test_engine_refuses_requests_whose_images_have_no_place(zoo: ImageZoo) -> None:
    engine = zoo.zoo.engine()
    valid = zoo.request(mixed_prompts(3)[2])
    first, second = valid.images[:2]
    try:
        assert request_fault(valid, engine.facts) is None
        for images in ((second, first), (replace(first, num_tokens=999),), (replace(first, digest="0"),)):
            fault = request_fault(replace(valid, images=images), engine.facts)
            assert fault is not None
            assert "placeholders" in fault.message
        fault = request_fault(valid, replace(engine.facts, images=False))
        assert fault is not None
        assert fault.message == "The model reads no images."
        engine.submit(replace(valid, images=(replace(first, patches=b"short"), *valid.images[1:])))
        ended = [event for event in until_ended(engine, valid.id) if event.finish_reason]
        assert ended[0].fault is not None
        assert "and 5 bytes" in ended[0].fault.message
    finally:
        engine.close()


def test_cancelled_request_releases_its_image(zoo: ImageZoo) -> None:
    engine = zoo.zoo.engine()
    try:
        engine.submit(zoo.request(Pictured("gone", None, ((5, 6), picture(3, 32, 32), (7,)), 5)))
        engine.cancel("gone")
        ended = [event.finish_reason for event in until_ended(engine, "gone") if event.finish_reason]
        assert ended == ["cancelled"]
        assert engine.is_idle
        assert serve(zoo, engine, mixed_prompts(1)) == {"r0": zoo.answer(mixed_prompts(1)[0])}
    finally:
        engine.close()


def until_ended(engine: Engine, name: str) -> list[TokenEvent]:
    """Step until the request has ended; return all events."""
    events: list[TokenEvent] = []
    while not any(event.request_id == name and event.finish_reason for event in events):
        report = engine.step()
        events += report.events if report else []
    return events


@pytest.mark.parametrize(
    ("family", "chosen", "reason"),
    [
        ("qwen2_5_vl", {"without": "preprocessor_config.json"}, "the checkpoint holds no preprocessor_config.json"),
        ("mistral3_images", {"without": "processor_config.json"}, "the checkpoint holds no processor_config.json"),
    ],
    ids=["no processor", "no tokens after lines"],
)
def test_images_are_refused_with_a_reason_at_start_and_text_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, chosen: dict[str, Any], reason: str
) -> None:
    made = Zoo(family, tmp_path)
    save_processor(made.base)
    settings = dict(chosen)
    if missing := settings.pop("without", None):
        (made.base / missing).unlink()
    engine = made.engine(**settings)
    try:
        assert not engine.facts.images
        assert f"images in prompts of base are refused: {reason}" in caplog.text
    finally:
        engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_quantized_tower_refuses_images_and_text_is_answered_by_every_number_of_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    zoo = ImageZoo(Zoo("qwen2_5_vl", tmp_path))
    made = zoo.zoo
    model = made.auto.from_pretrained(made.base)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings, write = CHECKPOINTS["int8"]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parts, _ = write(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, made.base / "model.safetensors", {"format": "pt"})
    facts = json.loads((made.base / "config.json").read_text()) | {"quantization_config": settings}
    (made.base / "config.json").write_text(json.dumps(facts))
    engine = made.engine(tensor_parallel_size=size)
    try:
        assert not engine.facts.images
        assert len(serve(zoo, engine, [Asked("text", None, (5, 6, 7), 5)])["text"]) == 5
    finally:
        engine.close()
    assert "the checkpoint's vision tower is quantized" in caplog.text


@pytest.mark.parametrize("zoo", without(*OTHER_TEXTS), indirect=True)  # tiny experts are padded when they are packed
def test_plan_of_memory_counts_images_and_the_tower(zoo: ImageZoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loaded, _ = load(zoo.zoo.base, image_bytes=300_000_000)
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert line.endswith("on all linears, vision tower 0.0 GB, images 0.3 GB")
    config, base = read_config(zoo.zoo.base), describe_base(zoo.zoo.base)
    plan = plan_memory(zoo.zoo.base, base, Sharding(config, 1), 4, 1 << 20, EngineSettings(block_size=16))
    parameters = loaded.runner._forward.model.named_parameters()
    tower = 4 * sum(part.numel() for name, part in parameters if reads_other_inputs(name))
    assert plan.tower_bytes == tower > 0
    panels = 3 * 4 * 64 * 32 if zoo.zoo.family == "gemma4_images" else 0  # each layer has a linear of 10 columns
    assert loaded.weight_bytes <= plan.weight_bytes + panels, "a step does not read the tower"


@pytest.mark.parametrize("zoo", without(*WHOLE, "mistral3_images"), indirect=True)
def test_positions_are_transformers_for_every_cut(zoo: ImageZoo) -> None:
    model = zoo.zoo.auto.from_pretrained(zoo.zoo.base).model
    request = zoo.request(mixed_prompts(20)[14])
    prompt = torch.tensor([request.prompt_token_ids])
    assert len(request.images) > 1
    wanted, delta = model.get_rope_index(
        prompt,
        mm_token_type_ids=(prompt == PAD).int(),
        image_grid_thw=torch.tensor([image.grid for image in request.images]),
    )
    size = prompt.shape[1]
    after = np.arange(size, size + 5) + int(delta)
    wanted = np.concatenate((wanted[:, 0].numpy(), np.tile(after, (3, 1))), axis=1)
    for cut in range(1, size + 4):
        parts = rotary_positions(request.images, 0, cut), rotary_positions(request.images, cut, size + 5)
        assert np.array_equal(np.concatenate(parts, axis=1), wanted)
