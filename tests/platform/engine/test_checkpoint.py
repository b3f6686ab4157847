"""Checkpoints that would be served wrong are refused in one sentence; the dtype and the device are chosen and said."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_zoo import SMALL, Asked, Zoo, make_engine, serve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.execution import checkpoint, loader
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import SamplingDefaults, max_positions, read_config, sampling_defaults
from loramux.engine.execution.loader import load_model
from loramux_adapters.modules import LoraLinear
from loramux_adapters.sharding import CannotShard
from loramux_kernels import format_choice
from loramux_kernels.native.loader import native_library
from loramux_kernels.packed_linear import FORMATS, Plain

Tensors = dict[str, torch.Tensor]


def settings_of(base: Path, dtype: str = "float32", **engine: object) -> Settings:
    return Settings(
        model=ModelSettings(path=str(base), served_model_name="m", dtype=dtype),
        engine=EngineSettings(**{"num_threads": 1, "pool_bytes": 4 << 20} | engine),
    )


@pytest.fixture
def base(zoo_of, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo_of("llama").base, tmp_path / "base"))


def rewrite_weights(base: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = base / "model.safetensors"
    changed = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(changed, path, metadata={"format": "pt"})


def rewrite_config(base: Path, **fields: object) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal_of(base: Path, **engine: object) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        load_model(settings_of(base, **engine))
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"num_key_value_heads": 3}, "4 heads and 3 key-value heads"),
        ("gpt_oss", {"num_key_value_heads": 3}, "4 heads and 3 key-value heads"),
        ("olmoe", {"num_attention_heads": 3}, "cannot run on a packed batch"),
        ("olmoe", {"head_dim": 24}, "cannot run on a packed batch"),
        ("qwen2", {"num_attention_heads": 3}, "cannot run on a packed batch"),
    ],
)
def test_odd_config_is_refused_in_one_sentence(
    family: str, fields: dict[str, int], reason: str, tmp_path: Path
) -> None:
    assert reason in refusal_of(Zoo(family, tmp_path, **fields).base)


@pytest.mark.parametrize("fields", [{"head_dim": 128}, {"num_attention_heads": 2, "num_key_value_heads": 1}])
def test_config_of_other_shapes_than_the_weights_is_refused_in_one_sentence(base: Path, fields: dict[str, int]) -> None:
    rewrite_config(base, head_dim=16)
    rewrite_config(base, **fields)
    assert "model.layers.0.self_attn" in refusal_of(base)


def test_ranks_of_weights_in_other_shapes_than_the_config_are_refused_in_one_sentence(base: Path) -> None:
    rewrite_config(base, head_dim=128)
    with pytest.raises(CannotShard, match=r"has a dimension of (32|64), .* Correct config\.json"):
        load_model(settings_of(base, tensor_parallel_size=2))


def test_weights_of_a_fine_tune_are_not_those_of_its_base(base: Path) -> None:
    """Engines of one base compare them: equal shapes do not make equal answers."""
    mine, again = (load_model(settings_of(base)).facts for _ in range(2))
    rewrite_weights(
        base, lambda tensors: {name: tensor + 0.01 * ("q_proj" in name) for name, tensor in tensors.items()}
    )
    tuned = load_model(settings_of(base)).facts
    assert mine.weights == again.weights != tuned.weights


@pytest.mark.parametrize(("wanted", "form"), [("auto", None), ("measure", None), ("torch", Plain)])
def test_linear_format_of_the_settings_is_used_and_told(
    base: Path, wanted: str, form: type | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    caplog.set_level(logging.INFO)
    native_library()  # from the machine's cache
    monkeypatch.setenv("LORAMUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(format_choice, "BANDWIDTH_BYTES", 1 << 20)
    loaded = load_model(settings_of(base, linear_format=wanted))
    told, model = loaded.facts.linears, loaded.runner._forward.model
    assert told is not None
    groups = [module.group.linear for module in model.modules() if isinstance(module, LoraLinear)]
    assert {type(one) for linear in groups for one in linear._formats} == {form or FORMATS[told.format]}
    is_measured = wanted == "measure"
    assert [number is not None for number in (told.gflops, told.bandwidth, told.floor_s)] == [is_measured] * 3
    assert ("a decode step takes at least" in caplog.text) == is_measured
    assert ("linears in the format" in caplog.text) == is_measured
    if told.bandwidth is not None:
        assert told.floor_s == pytest.approx(loaded.weight_bytes / told.bandwidth)


def test_linear_format_that_the_machine_lacks_is_refused_with_those_it_has(base: Path) -> None:
    refusal = refusal_of(base, linear_format="onednn")
    assert refusal.startswith("engine.linear_format: onednn does not multiply torch.float32 here; this machine has ")
    assert refusal.endswith("torch; name one of these, or auto.")


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("layers.1.mlp.down_proj"), ["lacks weights", "model.layers.1.mlp.down_proj.weight"]),
        (without("lm_head"), ["lacks weights", "lm_head.weight"]),
        (lambda tensors: without("lm_head")(tensors) | {"score.weight": torch.ones(2, 64)}, ["lacks", "lm_head"]),
        (lambda tensors: tensors | {"score.weight": torch.ones(2, 64)}, ["no place", "score.weight"]),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(32)},
            ["other shapes", "model.norm.weight"],
        ),
    ],
    ids=["a linear", "an untied head", "another task", "another task's head beside ours", "another shape"],
)
def test_incomplete_checkpoint_is_refused(base: Path, change, words: list[str]) -> None:
    rewrite_weights(base, change)
    message = refusal_of(base)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("layers", "words"), [(5, "lacks weights"), (2, "no place")])
def test_checkpoint_of_another_depth_than_its_config_is_refused(base: Path, layers: int, words: str) -> None:
    rewrite_config(base, num_hidden_layers=layers)
    message = refusal_of(base)
    assert words in message
    assert "more" in message, "not all of the names are listed"


def test_tied_head_and_leftover_rotary_tables_are_accepted(tmp_path: Path, zoo_of) -> None:
    zoo = Zoo("llama", tmp_path, tie_word_embeddings=True)
    rewrite_weights(
        zoo.base,
        lambda tensors: (
            tensors
            | {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(8, 8),
            }
        ),
    )
    load_model(settings_of(zoo.base))


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal_of(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refusal_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "weights cannot be loaded" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "su2", "factor": 2.0}, "rope_parameters": None}, "su2"),
        ({"is_causal": False}, "is_causal"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    ],
    ids=["unknown rope", "not causal", "quantized"],
)
def test_config_that_the_engine_would_not_follow_is_refused(base: Path, fields: dict, words: str) -> None:
    rewrite_config(base, **fields)
    assert words in refusal_of(base)


def to_mxfp4(base: Path) -> None:
    """Save the experts as gpt-oss is published: blocks of 32 four-bit floats, and an exponent for each."""

    def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(121, 127, shape, dtype=torch.uint8)
        return tensors

    rewrite_weights(base, packed)
    rewrite_config(base, quantization_config={"quant_method": "mxfp4"})


def test_gpt_oss_in_mxfp4_answers_as_transformers_does_with_its_weights_unpacked(tmp_path: Path, caplog) -> None:
    zoo = Zoo("gpt_oss", tmp_path)
    to_mxfp4(zoo.base)
    unpacked = AutoModelForCausalLM.from_pretrained(
        zoo.base, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).eval()
    prompt = tuple(range(5, 30))
    wanted = unpacked.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with caplog.at_level(logging.INFO):
        got = serve(zoo, make_engine(zoo.base), [Asked("a", None, prompt, 8)])["a"]
    assert got == wanted[0, len(prompt) :].tolist()
    assert "6 weights are MXFP4 in the checkpoint, and stay so in memory" in caplog.text


def test_mxfp4_of_another_family_is_refused(base: Path) -> None:
    rewrite_config(base, quantization_config={"quant_method": "mxfp4"})
    assert "quantized" in refusal_of(base)


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    zoo = Zoo("gemma4", tmp_path, use_bidirectional_attention="all")
    assert "use_bidirectional_attention" in refusal_of(zoo.base)


def test_what_attention_would_ignore_is_refused_by_the_probe(zoo_of, monkeypatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda self, *args, **kwargs: forward(self, *args, attention_bias=1.0, **kwargs)
    )
    assert "attention_bias" in refusal_of(zoo_of("llama").base)
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    init = LlamaAttention.__init__

    def make_bidirectional(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.is_causal = False

    monkeypatch.setattr(LlamaAttention, "__init__", make_bidirectional)
    assert "is_causal=False" in refusal_of(zoo_of("llama").base)


LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "original_max_position_embeddings": 32,
}


def test_longrope_is_served_up_to_its_short_factors_reach(tmp_path: Path, caplog) -> None:
    zoo = Zoo("phi3", tmp_path, **LONG)
    assert max_positions(read_config(zoo.base)) == 32 < SMALL["max_position_embeddings"]
    loaded = load_model(settings_of(zoo.base))
    assert loaded.facts.max_model_len == 32
    assert "max_model_len is 32, not the 256" in caplog.text
    assert "32 or less" in refusal_of(zoo.base, max_model_len=33)
    assert load_model(settings_of(zoo.base, max_model_len=16)).facts.max_model_len == 16


@pytest.fixture
def no_bf16(monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "multiplies_in_hardware", lambda dtype: dtype == torch.float32)


def saved_in(base: Path, dtype: torch.dtype, *, named: bool) -> Path:
    rewrite_weights(base, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    config = json.loads((base / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (base / "config.json").write_text(
        json.dumps(config | ({"dtype": str(dtype).removeprefix("torch.")} if named else {}))
    )
    return base


@pytest.mark.usefixtures("no_bf16")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_where_the_processor_would_emulate_it(base, caplog, dtype, named) -> None:
    assert load_model(settings_of(saved_in(base, dtype, named=named), "auto")).facts.dtype == "float32"
    assert "computing in float32" in caplog.text


@pytest.mark.usefixtures("no_bf16")
def test_dtype_that_was_asked_for_is_kept_with_a_warning(base: Path, caplog) -> None:
    assert load_model(settings_of(saved_in(base, torch.bfloat16, named=True), "bfloat16")).facts.dtype == "bfloat16"
    assert "emulated" in caplog.text


def test_half_precision_is_kept_where_the_processor_multiplies_it(base: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "multiplies_in_hardware", lambda dtype: True)
    with caplog.at_level(logging.WARNING):
        assert load_model(settings_of(saved_in(base, torch.bfloat16, named=True), "auto")).facts.dtype == "bfloat16"
    assert "float32" not in caplog.text


def test_a_named_gpu_becomes_the_current_device(monkeypatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loader.choose_device("cuda:1") == torch.device("cuda", 1)
    assert loader.choose_device("cuda") == loader.choose_device("auto") == torch.device("cuda", 0)
    assert loader.choose_device("cpu") == torch.device("cpu")
    assert chosen == [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 0)]
    with pytest.raises(UnsupportedModel, match="2 GPUs"):
        loader.choose_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "cpu:1", "gpu", "cuda:x", "cuda:", "", "auto:1"])
def test_device_that_is_not_there_is_refused(base: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "engine.device" in refusal_of(base, device=name)


def test_pool_larger_than_the_machines_memory_is_refused(base: Path) -> None:
    assert "engine.pool_bytes" in refusal_of(base, pool_bytes=1 << 50)


def test_config_that_asks_for_more_outputs_answers_the_same(base: Path, zoo_of) -> None:
    zoo = zoo_of("llama")
    rewrite_config(base, return_dict=False, output_hidden_states=True, output_attentions=True)
    asked = Asked("a", None, (5, 6, 7), 6)
    assert serve(zoo, make_engine(base), [asked])["a"] == zoo.answer(asked)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (
            '{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": true}',
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20),
        ),
        ('{"min_p": 0.05, "repetition_penalty": 1.1}', SamplingDefaults(min_p=0.05, repetition_penalty=1.1)),
        ('{"temperature": 1, "top_k": 20.0}', SamplingDefaults(temperature=1.0, top_k=20)),
        ('{"temperature": -1, "top_p": 0, "top_k": -5, "repetition_penalty": 0}', SamplingDefaults()),
        ('{"temperature": "hot", "top_p": true, "top_k": [1], "min_p": 2}', SamplingDefaults()),
        ("[]", SamplingDefaults()),
        ("{", SamplingDefaults()),
        (None, SamplingDefaults()),
    ],
)
def test_recommended_sampling_is_read_and_what_no_request_may_have_is_ignored(tmp_path: Path, saved, expected) -> None:
    if saved is not None:
        (tmp_path / "generation_config.json").write_text(saved)
    assert sampling_defaults(tmp_path) == expected


def test_facts_carry_the_recommended_sampling(base: Path) -> None:
    (base / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2}')
    assert load_model(settings_of(base)).facts.sampling_defaults == SamplingDefaults(temperature=0.6)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what a process has mapped")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loaded_model_keeps_no_part_of_the_checkpoint_mapped(tmp_path: Path, tied: bool) -> None:
    """One small tensor in the file would keep all of it in memory, in addition to the packed weights."""
    zoo = Zoo("llama", tmp_path, tie_word_embeddings=tied)
    with_weights = load_model(settings_of(zoo.base))
    gc.collect()
    assert str(zoo.base) not in Path("/proc/self/maps").read_text()
    assert with_weights.weight_bytes > 0
