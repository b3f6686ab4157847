"""Encoders: vectors and classes of many adapters in one batch, equal to transformers and PEFT in float32."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import peft
import pytest
import torch
import transformers
from adapter_zoo import EXACT
from encoder_zoo import ENCODERS, EncoderZoo, run, write_dense, write_modules
from numpy.typing import NDArray

from loramux.catalog.validation.parity_encoders import peft_outputs
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.messages import Request, SamplingParams, TokenEvent
from loramux.engine.scheduling.sequence import Sequence, StepBuilder
from loramux_adapters import families
from loramux_adapters.base import describe_base
from loramux_adapters.errors import AdapterRejected, ConfigRejected
from loramux_adapters.plan import PlanLimits, inspect_adapter

TOLERANCE = 1e-5
ADAPTERS = {
    "vectors": {},
    "narrow": {"target_modules": ["query", "value", "Wqkv", "q_lin", "q_proj"], "r": 3},
    "three": {"num_labels": 3},
    "tokens": {
        "num_labels": 4,
        "of_tokens": True,
        "r": 5,
        "target_modules": ["query", "dense", "Wqkv", "q_lin", "lin1"],
    },
    "one": {"num_labels": 1, "r": 20, "target_modules": ["query", "dense", "Wo", "Wi", "out_lin", "o_proj", "up_proj"]},
}


def can_be_trained(zoo: EncoderZoo, fields: dict[str, object]) -> bool:
    """Has transformers a class of the family for the adapter's task?"""
    encoder = zoo.description.encoder
    return "num_labels" not in fields or bool(encoder.head_of_tokens if "of_tokens" in fields else encoder.head)


@pytest.fixture(scope="module", params=ENCODERS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EncoderZoo:
    made = EncoderZoo(request.param, tmp_path_factory.mktemp(request.param))
    for name, fields in ADAPTERS.items():
        if not can_be_trained(made, fields):
            continue
        others = {}
        if request.param == "embedding_gemma2":  # PEFT cannot wrap the linears of its vision tower
            others = {"exclude_modules": r".*vision_tower.*"}
        elif request.param == "distilbert" and name == "three":
            # PEFT's all-linear names one of this family's two linears of the head, which it then cannot save.
            others = {"target_modules": ["q_lin", "k_lin", "v_lin", "lin1"]}
        made.add(name, **fields, **others)
    return made


def prompts(count: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts without the padding token of any family."""
    rng = random.Random(7)
    return [[rng.randrange(5, 97) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def asked(zoo: EncoderZoo, texts: list[list[int]]) -> list[Request]:
    """One request a text: the base's and every adapter's, pooled in every way."""
    names = [None, *zoo.made]
    requests = []
    for i, text in enumerate(texts):
        adapter = names[i % len(names)]
        fields = {} if adapter is None else ADAPTERS[adapter]
        classify = "token_classify" if "of_tokens" in fields else "classify"
        pooling = classify if "num_labels" in fields else ("mean", "cls", "last")[i // len(names) % 3]
        requests.append(zoo.request(f"r{i}", adapter, text, pooling))
    return requests


@torch.no_grad()
def expected(zoo: EncoderZoo, request: Request, **inputs: list[int]) -> NDArray[np.float32]:
    """The numbers of transformers, and of PEFT on transformers' class for the adapter's task."""
    tensors = {name: torch.tensor([ids]) for name, ids in inputs.items()}
    tensors["input_ids"] = torch.tensor([request.prompt_token_ids])
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    model = zoo.plain if request.adapter is None else zoo.made[request.adapter.digest].model
    if request.pooling in ("classify", "token_classify"):
        return model(**tensors).logits[0].flatten().numpy()
    states = model(**tensors).last_hidden_state[0]
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[request.pooling].numpy()


def is_close(event: TokenEvent, wanted: NDArray[np.float32]) -> bool:
    assert event.finish_reason == "stop", event.fault
    found = np.frombuffer(event.pooled, dtype=np.float32)
    return found.shape == wanted.shape and np.abs(found - wanted).max() <= TOLERANCE * max(1.0, np.abs(wanted).max())


def test_every_served_encoder_is_in_the_zoo() -> None:
    made = {config_class().model_type for config_class, _ in ENCODERS.values()}
    assert made == families.ENCODERS.keys()


def test_encoder_mixes_of_adapters_with_odd_lengths_are_pefts(zoo: EncoderZoo) -> None:
    """Each request in steps with others of other adapters, and alone, is what PEFT computes."""
    requests = asked(zoo, prompts(40, (1, 7, 33, 2, 90, 128)))
    engine = zoo.engine()
    ends = run(engine, requests, arrivals=7)
    alone = run(engine, [msgspec.structs.replace(one, id=f"again {one.id}") for one in requests[:10]], arrivals=1)
    for request in requests:
        assert is_close(ends[request.id], expected(zoo, request)), (request.id, request.adapter, request.pooling)
    for request in requests[:10]:
        assert is_close(alone[f"again {request.id}"], expected(zoo, request))
    assert engine.stats().max_distinct_adapters > 1
    assert engine.stats().pages_kv == 0


def test_encoder_prompt_longer_than_a_step_gets_a_step_of_its_own(zoo: EncoderZoo) -> None:
    """`max_num_batched_tokens` is raised to the longest prompt: a prompt is never cut."""
    requests = asked(zoo, prompts(10, (128, 3)))
    ends = run(zoo.engine(max_num_batched_tokens=16), requests, arrivals=10)
    for request in requests:
        assert is_close(ends[request.id], expected(zoo, request)), request.id


def test_encoder_prompt_longer_than_the_positions_is_refused(zoo: EncoderZoo) -> None:
    engine = zoo.engine()
    assert engine.facts.max_model_len == 128 + (zoo.description.encoder.starts_after_padding is False) * 2
    (text,) = prompts(1, (engine.facts.max_model_len + 1,))
    event = run(engine, [zoo.request("x", None, text, "mean")])["x"]
    assert event.fault.code == "context_length_exceeded"
    assert f"{engine.facts.max_model_len} that this server can hold" in event.fault.message


def test_encoder_refuses_to_generate(zoo: EncoderZoo) -> None:
    request = msgspec.structs.replace(zoo.request("x", None, [5, 6], "mean"), pooling=None)
    assert run(zoo.engine(), [request])["x"].fault.code == "unsupported_task"


def test_encoder_classes_without_a_head_are_refused(zoo: EncoderZoo) -> None:
    requests = [zoo.request("x", "vectors", [5, 6], "classify"), zoo.request("y", None, [5, 6], "classify")]
    assert {event.fault.code for event in run(zoo.engine(), requests).values()} == {"not_a_classifier"}


def test_classifier_of_a_family_without_such_a_class_is_refused_at_upload(zoo: EncoderZoo) -> None:
    for task, names in (("SEQ_CLS", "head"), ("TOKEN_CLS", "head_of_tokens")):
        if getattr(zoo.description.encoder, names):
            continue
        config = json.loads((zoo.adapters / "narrow/adapter_config.json").read_bytes())
        folder = Path(tempfile.mkdtemp(dir=zoo.adapters))
        (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": task}))
        shutil.copy(zoo.adapters / "narrow/adapter_model.safetensors", folder)
        with pytest.raises(ConfigRejected, match="transformers has no class of this base") as refused:
            inspect_adapter(folder, zoo.description, PlanLimits())
        assert refused.value.field == "task_type"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> EncoderZoo:
    made = EncoderZoo("bert", tmp_path_factory.mktemp("bert"))
    for name, fields in ADAPTERS.items():
        made.add(name, **fields)
    return made


def test_texts_of_a_pair_have_their_token_types(bert: EncoderZoo) -> None:
    texts = prompts(6, (9, 40, 17))
    requests = [
        bert.request(f"p{i}", adapter, text, pooling, second_text_at=4)
        for i, text in enumerate(texts)
        for adapter, pooling in [((None, "mean"), ("one", "classify"))[i % 2]]
    ]
    ends = run(bert.engine(), requests)
    for request in requests:
        types = [0] * 4 + [1] * (len(request.prompt_token_ids) - 4)
        assert is_close(ends[request.id], expected(bert, request, token_type_ids=types)), request.id
        assert not is_close(ends[request.id], expected(bert, request))


def test_positions_skip_padding_tokens_as_transformers_does(tmp_path: Path) -> None:
    """A caller's token ids may hold the padding token, which has the position of its number."""
    zoo = EncoderZoo("roberta", tmp_path)
    request = zoo.request("x", None, [7, 1, 9, 1, 1, 12], "mean")
    others = [zoo.request("y", None, [5, 1], "mean"), zoo.request("z", None, [1, 8, 3], "mean")]
    ends = run(zoo.engine(), [*others, request], arrivals=3)
    for one in (request, *others):
        assert is_close(ends[one.id], expected(zoo, one))


def test_step_takes_a_whole_prompt_or_none_of_it() -> None:
    """One prompt of the background may exceed the background's tokens, because it cannot be cut; the next waits."""
    sampling = SamplingParams(max_tokens=1)
    texts = {"long": 90, "other": 90, "short": 5}
    sequences = {
        name: Sequence(
            Request(id=name, tenant="t", prompt_token_ids=[5] * length, sampling=sampling, pooling="mean"), 0.0
        )
        for name, length in texts.items()
    }
    builder = StepBuilder(tokens_left=100, rows_left=8, whole_prompts=True)
    assert builder.room_for(sequences["long"]) == 90
    builder.add(sequences["long"], 90)
    assert (builder.room_for(sequences["other"]), builder.room_for(sequences["short"])) == (0, 5)
    assert not builder.has_tokens_for(sequences["other"])
    background = sequences["long"].flow.group
    for sequence in sequences.values():
        sequence.flow.group = background
    builder = StepBuilder(100, 8, whole_prompts=True, background=background, background_left=16)
    assert builder.room_for(sequences["long"]) == 90
    builder.add(sequences["long"], 90)
    assert builder.is_background_full(sequences["short"])
    assert builder.room_for(sequences["short"]) == 0


def test_checkpoint_without_a_pooler_serves_vectors(tmp_path: Path) -> None:
    zoo = EncoderZoo("bert", tmp_path)
    transformers.BertForMaskedLM.from_pretrained(zoo.base).save_pretrained(zoo.base)
    request = zoo.request("x", None, [5, 6, 7], "mean")
    engine = zoo.engine()
    assert is_close(run(engine, [request])["x"], expected(zoo, request))
    assert engine.facts.weights == zoo.engine().facts.weights, "missing weights are not random"


def test_classifier_on_a_checkpoint_without_a_pooler_is_refused_at_upload(tmp_path: Path) -> None:
    zoo = EncoderZoo("bert", tmp_path)
    zoo.add("three", 3)
    transformers.BertForMaskedLM.from_pretrained(zoo.base).save_pretrained(zoo.base)
    with pytest.raises(ConfigRejected, match=r"no weights of bert\.pooler") as refused:
        inspect_adapter(zoo.adapters / "three", describe_base(zoo.base), PlanLimits())
    assert refused.value.field == "task_type"
    zoo.add("tokens", **ADAPTERS["tokens"])  # reads the states themselves
    assert inspect_adapter(zoo.adapters / "tokens", describe_base(zoo.base), PlanLimits()).absent == ()


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"modules_to_save": ["pooler"]}, "pooler"),
        ({"modules_to_save": ["LayerNorm"]}, "LayerNorm"),
        ({"trainable_token_indices": [5, 7]}, "trainable_token_indices"),
        ({"task_type": "CAUSAL_LM"}, "CAUSAL_LM"),
    ],
)
def test_adapter_parts_that_encoders_do_not_serve_are_refused(bert: EncoderZoo, recipe: dict, named: str) -> None:
    config = json.loads((bert.adapters / "narrow/adapter_config.json").read_bytes())
    folder = Path(tempfile.mkdtemp(dir=bert.adapters))
    (folder / "adapter_config.json").write_text(json.dumps(config | recipe))
    shutil.copy(bert.adapters / "narrow/adapter_model.safetensors", folder)
    with pytest.raises(AdapterRejected, match=named):
        inspect_adapter(folder, bert.description, PlanLimits())


def test_vectors_of_an_adapter_trained_around_the_head_are_pefts(tmp_path: Path) -> None:
    """Its names begin with the body's."""
    zoo = EncoderZoo("bert", tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(zoo.base, **EXACT)
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=4, target_modules=["query", "value"], bias="none")
    adapted = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(zoo.adapters / "around")
    request = zoo.request("x", "around", [5, 6, 7, 8], "mean")
    with torch.no_grad():
        wanted = model.bert(input_ids=torch.tensor([[5, 6, 7, 8]])).last_hidden_state[0].mean(0).numpy()
    assert is_close(run(zoo.engine(), [request])["x"], wanted)


def test_classifier_that_reads_the_mean_is_pefts(tmp_path: Path) -> None:
    zoo = EncoderZoo("modernbert", tmp_path, classifier_pooling="mean")
    zoo.add("three", 3)
    requests = [zoo.request(f"r{i}", "three", text, "classify") for i, text in enumerate(prompts(4, (40, 3)))]
    ends = run(zoo.engine(), requests, arrivals=4)
    for request in requests:
        assert is_close(ends[request.id], expected(zoo, request))


def test_local_attention_of_long_prompts_is_computed_in_parts(tmp_path: Path) -> None:
    zoo = EncoderZoo("modernbert", tmp_path, max_position_embeddings=1400)
    requests = [zoo.request(f"r{i}", None, text, "mean") for i, text in enumerate(prompts(3, (1399, 513, 17)))]
    ends = run(zoo.engine(), requests, arrivals=3)
    for request in requests:
        assert is_close(ends[request.id], expected(zoo, request)), request.id


def test_classifier_as_a_base_answers_with_its_own_head(tmp_path: Path) -> None:
    zoo = EncoderZoo("roberta", tmp_path)
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(zoo.base, num_labels=5).eval()
    model.save_pretrained(zoo.base)
    zoo.add("three", 5)
    texts = prompts(6, (9, 3))
    requests = [zoo.request(f"r{i}", (None, "three")[i % 2], text, "classify") for i, text in enumerate(texts)]
    ends = run(zoo.engine(), requests, arrivals=6)
    for request in requests:
        if request.adapter is None:
            with torch.no_grad():
                wanted = model(input_ids=torch.tensor([request.prompt_token_ids])).logits[0].numpy()
        else:
            wanted = expected(zoo, request)
        assert is_close(ends[request.id], wanted)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("gemma3_text", [(96, False, "torch.nn.modules.linear.Identity"), (40, False, "torch.nn.Identity")]),
        ("bert", [(31, True, "torch.nn.modules.activation.Tanh")]),
    ],
)
def test_vectors_go_through_the_dense_modules_of_the_folder(tmp_path: Path, family: str, parts: list) -> None:
    """sentence-transformers' formula: the mean of the states, then each linear with its activation."""
    zoo = EncoderZoo(family, tmp_path)
    zoo.add("vectors")
    plain = zoo.engine().facts
    write_modules(zoo.base, ["Transformer", "Pooling", *("Dense" for _ in parts), "Normalize"])
    dense, width = torch.nn.Sequential(), 48
    for i, (out, bias, activation) in enumerate(parts, 2):
        dense.append(write_dense(zoo.base / f"{i}_Dense", width, out, bias=bias, activation=activation))
        width = out
    requests = [
        zoo.request(f"r{i}", (None, "vectors")[i % 2], text, "mean") for i, text in enumerate(prompts(4, (40, 3)))
    ]
    engine = zoo.engine()
    ends = run(engine, requests, arrivals=3)
    for request in requests:
        assert is_close(ends[request.id], dense(torch.from_numpy(expected(zoo, request))).numpy()), request.id
    assert engine.facts.hidden_size == width
    assert engine.facts.weights != plain.weights
    text, uploaded = [7, 8, 9], zoo.adapters / "vectors uploaded"
    folder = uploaded if uploaded.exists() else zoo.adapters / "vectors"
    plan = inspect_adapter(zoo.adapters / "vectors", zoo.description, PlanLimits())
    encoder = zoo.description.encoder
    compared = peft_outputs(str(zoo.base), str(folder), encoder, "FEATURE_EXTRACTION", plan, [text])
    first = run(engine, [zoo.request("first", "vectors", text, "cls")])["first"]
    assert is_close(first, compared.adapted[0].numpy()), "uploads are compared through the modules too"


def test_upload_of_an_adapter_trained_on_the_whole_model_is_compared_on_its_text(tmp_path: Path) -> None:
    zoo = EncoderZoo("embedding_gemma2", tmp_path)
    zoo.add("vectors", exclude_modules=r".*vision_tower.*")
    plan = inspect_adapter(zoo.adapters / "vectors", zoo.description, PlanLimits())
    request, encoder = zoo.request("x", "vectors", [7, 8, 9], "cls"), zoo.description.encoder
    folder = str(zoo.adapters / "vectors")
    compared = peft_outputs(str(zoo.base), folder, encoder, "FEATURE_EXTRACTION", plan, [request.prompt_token_ids])
    assert is_close(run(zoo.engine(), [request])["x"], compared.adapted[0].numpy())
    assert not torch.allclose(compared.adapted, compared.plain)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"in_features": 47}, "asks for .*47"),
        ({"bias": True}, "linear.bias"),
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "activation_function is not served"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is not served"),
        ({"in_features": "many"}, "in_features"),
    ],
)
def test_dense_module_that_cannot_be_computed_is_refused_at_start(bert: EncoderZoo, change: dict, named: str) -> None:
    write_modules(bert.base, ["Transformer", "Pooling", "Dense"])
    write_dense(bert.base / "2_Dense", 48, 31, bias=False, activation="torch.nn.Identity")
    file = bert.base / "2_Dense/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=named):
        bert.engine()
    (bert.base / "modules.json").unlink()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"max_model_len": 400}, "max_model_len"),
    ],
)
def test_settings_that_an_encoder_cannot_have_are_refused(bert: EncoderZoo, fields: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        bert.engine(**fields)
