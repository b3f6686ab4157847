"""The memory plan: what is logged before loading is what loading takes; what cannot fit is refused."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapter_zoo import load, make_engine
from quantized_zoo import CHECKPOINTS, QuantizedZoo
from transformers import BertConfig, Gemma3Config, GptOssConfig, LlamaConfig, MixtralConfig, PretrainedConfig

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.execution import loader
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import load_checkpoint, read_config
from loramux.engine.execution.memory_plan import Card, MemoryPlan, limits_on, loading_alone, plan_memory, plan_on_card
from loramux.engine.messages import StepLimits
from loramux_adapters.base import auto_class, describe_base
from loramux_adapters.base_weights import QuantizedLinear
from loramux_adapters.sharding import Sharding

GB = 10**9


def test_plan_before_loading_counts_the_pages_and_weights_that_loading_finds(zoo_of, caplog) -> None:
    zoo = zoo_of("llama")
    with caplog.at_level(logging.INFO):
        loaded, _ = load(zoo.base)
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert f"= {loaded.facts.pages_total} pages" in line
    assert "adapters of rank 64" in line


def test_plan_of_two_ranks_has_half_the_weights_of_the_linears(zoo_of, caplog) -> None:
    zoo = zoo_of("llama")
    with caplog.at_level(logging.INFO):
        engine = make_engine(zoo.base, tensor_parallel_size=2)
    engine.close()
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert f"= {engine.facts.pages_total:,} pages" in line
    assert line.endswith("on each of 2 ranks")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "checkpoint", ["awq", *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS if name != "awq")]
)
def test_plan_of_a_quantized_checkpoint_counts_the_bytes_that_are_held(tmp_path, checkpoint: str, size: int) -> None:
    """Up to zero points that are all the same, which are not held, and groups that ranks cut."""
    directory = QuantizedZoo("llama", tmp_path, (), checkpoint).quantized
    config = read_config(directory)
    base, sharding = describe_base(directory), Sharding(config, size)
    plan = plan_memory(directory, base, sharding, 4, 1 << 20, EngineSettings(block_size=16))
    model = load_checkpoint(directory, "float32", torch.device("cpu"))
    plain = 4 * sum(parameter.numel() for parameter in model.parameters())
    held = sum(module.quantized.nbytes for module in model.modules() if isinstance(module, QuantizedLinear))
    assert plan.weight_bytes == pytest.approx((plain + held) / size, rel=0.12)


@pytest.mark.parametrize(
    ("plan", "way_out"),
    [
        (MemoryPlan(1, 15 * GB, 20 * GB, 10**6, 10**8), r"set engine.pool_bytes to 9000000000 or less"),
        (MemoryPlan(2, 8 * GB, 9 * GB, 10**6, 10**8), r"set engine.pool_bytes to 4000000000 or less"),
        (
            MemoryPlan(1, 15 * GB, 8 * GB, 10**6, 10**8, image_bytes=2 * GB),
            r"images 2\.0 GB do not fit .* set engine.pool_bytes and engine.image_bytes to 9000000000 or less together",
        ),
        (MemoryPlan(1, 40 * GB, GB, 10**6, 10**8), r'quantization = "int8" or "nf4"'),
        (MemoryPlan(2, 20 * GB, GB, 10**6, 10**8, is_quantized=True), r"a checkpoint of fewer bits"),
        (MemoryPlan(2, 20 * GB, GB, 10**6, 10**8), r"all ranks share this machine"),
    ],
)
def test_plan_that_does_not_fit_is_refused_with_what_would(plan: MemoryPlan, way_out: str) -> None:
    with pytest.raises(UnsupportedModel, match=way_out):
        plan.check(24 * GB)


def test_plan_is_said_in_one_sentence() -> None:
    plan = MemoryPlan(1, 15 * GB, 98 * GB, 1_960_000, 311 * 10**6)
    assert str(plan) == "weights 15.0 GB, pool 98.0 GB = 50,000 pages, or 315 adapters of rank 64 on all linears"


def checkpoint_of_holes(folder: Path, config: PretrainedConfig) -> Path:
    """Save a checkpoint whose weights take no space on the disk: its file has a header and is otherwise empty.

    If `config` names a quantization, the experts are those of MXFP4.
    """
    config.architectures = [auto_class(config)._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = auto_class(config).from_config(config).state_dict()
    saved: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 3 and getattr(config, "quantization_config", None):
            experts, columns, rows = tensor.shape
            saved[f"{name}_blocks"] = "U8", (experts, rows, columns // 32, 16)
            saved[f"{name}_scales"] = "U8", (experts, rows, columns // 32)
        else:
            saved[name] = "BF16", tuple(tensor.shape)
    header, end = {}, 0
    for name, (dtype, shape) in saved.items():
        begin, end = end, end + math.prod(shape) * (1 if dtype == "U8" else 2)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    return folder


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    return checkpoint_of_holes(tmp_path_factory.mktemp("llama-8b"), config)


class Read(Exception):
    """The weights would be read now."""


@pytest.fixture
def load_on_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """load_on_card(folder, total, free, ...): start loading on a GPU of so many bytes; returns the refusal, or None."""

    def read(*_: object, **__: object) -> None:
        raise Read

    monkeypatch.setattr(loader, "choose_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(loader, "load_checkpoint", read)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="card"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(folder: Path, total: float, free: float, quantization: str = "none", **engine: object) -> str | None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), int(total)))
        model = ModelSettings(path=str(folder), served_model_name="m", quantization=quantization)
        try:
            loader.load_model(Settings(model=model, engine=EngineSettings(num_threads=1, **engine)))
        except UnsupportedModel as refusal:
            return str(refusal)
        except Read:
            return None
        raise AssertionError("the weights are read after the plan")

    return start


@pytest.mark.parametrize(
    ("total", "free", "quantization", "engine", "said"),
    [
        (17.5, 17.3, "none", {}, r"set engine.gpu_memory_utilization to 0.94 or more"),
        (85, 84, "none", {"pool_bytes": 80 * GB}, r"set engine.pool_bytes to 67\d{9} or less"),
        (
            85,
            84,
            "none",
            {"max_num_batched_tokens": 10**6},
            r"set engine.max_num_batched_tokens to \d+ or less",
        ),
        (85, 84, "none", {"max_num_seqs": 10**6}, r"max_num_batched_tokens and engine.max_num_seqs to \d+ or less"),
        (85, 84, "none", {"engines_per_device": 6}, r"6 engines divide this GPU: let fewer use it"),
        (85, 12, "none", {}, r"85\.0 GB, of them 12\.0 GB free, .* other processes hold 73\.0 GB of it: end them"),
        (16.2, 16.1, "none", {}, r'set model.quantization = "int8" or "nf4"'),
        (12, 11.8, "none", {}, r"weights 16\.1 GB, largest step 0\.2 GB, .* give a quantized checkpoint, or a larger"),
        (12, 11.8, "int8", {}, r"also to be quantized there: give a quantized checkpoint, or a larger GPU"),
    ],
)
def test_base_that_does_not_fit_a_card_is_refused_before_its_weights_are_read_with_what_fits(
    load_on_card, llama_8b: Path, total: float, free: float, quantization: str, engine: dict[str, int], said: str
) -> None:
    total, free = total * GB, free * GB
    refusal = load_on_card(llama_8b, total, free, quantization, **engine)
    assert refusal is not None
    assert re.search(said, refusal), refusal
    if number := re.search(r"set (engine\..*) to ([0-9.]+) or (?:less|more)", refusal):
        names = re.findall(r"engine\.(\w+)", number[1])
        value = float(number[2]) if names == ["gpu_memory_utilization"] else int(number[2])
        assert load_on_card(llama_8b, total, free, quantization, **engine | dict.fromkeys(names, value)) is None


@pytest.mark.parametrize(
    ("total", "free", "engines", "step", "pool"),
    [
        (85, 84, None, "0.5", "58.9"),
        (85, 84, 2, "0.5", "21.6"),
        (85, 84, 4, "0.2", "2.9"),
        (24, 23.6, None, "0.2", "5.0"),
    ],
)
def test_plan_of_a_card_has_the_pool_that_weights_and_step_leave_of_the_share(
    load_on_card, llama_8b: Path, caplog, total: float, free: float, engines: int | None, step: str, pool: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert load_on_card(llama_8b, total * GB, free * GB, engines_per_device=engines) is None
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert f"weights 16.1 GB, largest step {step} GB, pool {pool} GB" in line


def test_weights_that_are_quantized_on_the_card_are_planned_whole(load_on_card, llama_8b: Path) -> None:
    assert load_on_card(llama_8b, 17 * GB, 16.5 * GB, "int8") is None


@pytest.fixture(scope="module")
def gpt_oss_20b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published checkpoint: transformers' defaults are its sizes but for the numbers of layers and experts."""
    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32, dtype="bfloat16")
    config.quantization_config = {"quant_method": "mxfp4"}
    return checkpoint_of_holes(tmp_path_factory.mktemp("gpt-oss-20b"), config)


def test_experts_in_mxfp4_are_planned_as_they_are_held(load_on_card, gpt_oss_20b: Path, caplog) -> None:
    """20.9 billion parameters: 13.8 GB, of which 10.2 GB are experts; in bfloat16 they would take 41.8 GB."""
    with caplog.at_level(logging.INFO):
        assert load_on_card(gpt_oss_20b, 16 * GB, 15.9 * GB, max_num_seqs=64, max_num_batched_tokens=256) is None
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert "weights 13.8 GB" in line
    refusal = load_on_card(gpt_oss_20b, 14 * GB, 13.7 * GB)
    assert refusal is not None
    assert "give a checkpoint of fewer bits, or a larger GPU" in refusal


@pytest.mark.parametrize("size", [1, 2, 4])
def test_plan_of_ranks_divides_the_experts_in_mxfp4(gpt_oss_20b: Path, size: int) -> None:
    """In four, 720 inputs a rank are not whole groups of 32: loading repeats the scales of `down_proj`."""
    sharding = Sharding(read_config(gpt_oss_20b), size)
    plan = plan_memory(gpt_oss_20b, describe_base(gpt_oss_20b), sharding, 2, 1 << 30, EngineSettings())
    assert plan.is_quantized
    assert size * plan.weight_bytes == pytest.approx(13.76 * GB, rel=0.003)


def test_plans_of_ranks_count_the_tower_on_rank_0s_card_alone(tmp_path: Path) -> None:
    """The tower of a Gemma 3 of 4 billion parameters, with a small text."""
    text = {"num_hidden_layers": 2, "hidden_size": 2560, "vocab_size": 1024}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    directory = checkpoint_of_holes(
        tmp_path, Gemma3Config(text_config=text, vision_config=vision | {"image_size": 896, "patch_size": 14})
    )
    sharding, base = Sharding(read_config(directory), 2), describe_base(directory)
    settings = Settings(model=ModelSettings(path=str(directory), served_model_name="m"))
    card, limits = Card("cuda:0", 24 * GB, 23 * GB, 0.9, 1), StepLimits(64, 256, 256)
    first, other = (plan_on_card(directory, base, sharding, 2, settings, card, limits, rank) for rank in (0, 1))
    assert first.tower_bytes == pytest.approx(0.87 * GB, rel=0.01)
    assert "vision tower 0.9 GB on rank 0" in str(first)
    assert (other.tower_bytes, "tower" in str(other)) == (0, False)
    assert other.pool_bytes - first.pool_bytes == first.tower_bytes


def test_two_engines_on_a_card_get_equal_pools() -> None:
    weights, total = 16 * GB, 85 * GB
    first = Card("cuda:0", total, total - weights, 0.9, 2).left(weights)
    second = Card("cuda:0", total, total - weights - first - weights, 0.9, 2).left(weights)
    assert abs(first - second) <= 1
    assert 2 * (weights + first) <= 0.9 * total


@pytest.mark.parametrize("engines", [1, 2])
def test_engines_that_divide_a_card_load_one_after_the_other(monkeypatch, tmp_path: Path, engines: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="card"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    card, settings = torch.device("cuda", 0), EngineSettings(engines_per_device=engines)
    second_loads = threading.Event()

    def load() -> None:
        with loading_alone(card, settings):
            second_loads.set()

    second = threading.Thread(target=load)
    with loading_alone(card, settings):
        second.start()
        assert second_loads.wait(60 if engines == 1 else 0.2) == (engines == 1)
    assert second_loads.wait(60)
    second.join()


@pytest.fixture(scope="module")
def large_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, dtype="float32"
    )
    return checkpoint_of_holes(tmp_path_factory.mktemp("bert-large"), config)


def test_encoder_on_a_card_is_planned_before_its_weights_are_read(load_on_card, large_encoder: Path, caplog) -> None:
    """A page holds tiles of adapters; a step has at least the longest text."""
    with caplog.at_level(logging.INFO):
        assert load_on_card(large_encoder, 24 * GB, 23.5 * GB) is None
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert "weights 1.3 GB, largest step 0.0 GB, pool 19.7 GB" in line


@pytest.mark.parametrize(
    ("total", "free", "engine", "said"),
    [
        (1.3, 1.2, {}, r"weights 1\.3 GB, .* the weights alone are too large"),
        (24, 1.2, {}, r"other processes hold 22\.8 GB of it: end them"),
        (24, 23.5, {"pool_bytes": 30 * GB}, r"set engine.pool_bytes to 22\d{9} or less"),
        (24, 23.5, {"max_num_batched_tokens": 10**6}, r"set engine.max_num_batched_tokens to \d+ or less"),
    ],
)
def test_encoder_that_does_not_fit_a_card_is_refused_with_what_fits(
    load_on_card, large_encoder: Path, total: float, free: float, engine: dict[str, int], said: str
) -> None:
    refusal = load_on_card(large_encoder, total * GB, free * GB, **engine)
    assert refusal is not None
    assert re.search(said, refusal), refusal


@pytest.mark.parametrize(
    ("config", "quantization", "said"),
    [
        (LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97), "int8", "quantized weights"),
        (MixtralConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97), "none", "experts"),
        (BertConfig(hidden_size=48, num_hidden_layers=1), "none", "an encoder's attention"),
    ],
    ids=["quantized", "mixture", "encoder"],
)
def test_batch_invariant_on_a_card_is_refused_from_the_config_for_what_it_does_not_cover(
    load_on_card, tmp_path: Path, config: PretrainedConfig, quantization: str, said: str
) -> None:
    checkpoint_of_holes(tmp_path, config)
    refusal = load_on_card(tmp_path, 24 * GB, 23 * GB, quantization, batch_invariant=True)
    assert refusal is not None
    assert re.search(f"engine.batch_invariant = true, and {said}", refusal), refusal


def test_limits_of_a_step_follow_the_part_of_a_card_that_an_engine_gets(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * GB, 80 * GB))
    card = torch.device("cuda", 0)
    rows = {count: limits_on(card, EngineSettings(engines_per_device=count)).max_num_seqs for count in (None, 2, 3)}
    assert rows == {None: 256, 2: 256, 3: 64}
    assert limits_on(torch.device("cpu"), EngineSettings()).max_num_seqs == 64
