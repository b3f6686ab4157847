"""Files that a trainer saves next to the weights become one bundle, or are refused by the name of file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_base import CHAT_TEMPLATE, byte_tokenizer, make_base
from transformers import AutoTokenizer

from loramux.catalog.validation.bundle import BaseText, examine
from loramux.catalog.validation.jobs import BundleJob, ValidationReport
from loramux.common.bundle import (
    BUNDLE_FILE,
    LENGTH_FILE,
    MODULES_FILE,
    POOLING_FILE,
    PROMPTS_FILE,
    Bundle,
    SamplingDefaults,
    is_ignored,
    is_pickled,
    read_bundle,
)
from loramux.serving.tokenizer import Tokenizer

ADDED = [f"<|tool_{i}|>" for i in range(3)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    return BaseText(make_base(tmp_path_factory.mktemp("base")))


def save_tokenizer(folder: Path, template: str | None = CHAT_TEMPLATE, added: list[str] = ADDED) -> Any:
    """Save a tokenizer as a trainer does: the base's, with added tokens and a template."""
    tokenizer = byte_tokenizer(template)
    if added:
        tokenizer.add_tokens([added[0]])
        tokenizer.add_special_tokens({"additional_special_tokens": added[1:]})
    tokenizer.save_pretrained(folder)
    return tokenizer


def bundle_of(folder: Path, base: BaseText, num_tokens: int = 300) -> Bundle:
    report = report_on(folder, base, num_tokens)
    assert report.refusal is None, report.refusal
    return read_bundle(folder)


def report_on(folder: Path, base: BaseText, num_tokens: int = 300) -> ValidationReport:
    return examine(BundleJob(folder=str(folder), num_tokens=num_tokens), base)


def test_bundle_of_the_base_s_own_files_is_empty(base: BaseText, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, added=[])
    assert bundle_of(tmp_path, base) == Bundle()
    assert not (tmp_path / BUNDLE_FILE).exists(), "its digest is that of the weights alone"


def test_bundle_tokenizer_with_added_tokens_encodes_as_the_saved_one(base: BaseText, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    bundle = bundle_of(tmp_path, base)
    assert [(token.id, token.content, token.special) for token in bundle.added_tokens] == [
        (258, ADDED[0], False),
        (259, ADDED[1], True),
        (260, ADDED[2], True),
    ]
    saved = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(byte_tokenizer()).extended(bundle.added_tokens)
    text = f"one{ADDED[0]} two {ADDED[1]}{ADDED[2]} naïve <|eos|>{ADDED[0]}"
    ids = ours.encode_now(text, 1000, add_special_tokens=True)
    assert ids == saved.encode(text)
    assert ours.decode(ids) == saved.decode(ids, skip_special_tokens=True)
    assert ours.token(258).text == ADDED[0]
    assert 258 not in Tokenizer(byte_tokenizer()).encode_now(text, 1000, add_special_tokens=False), "the base has none"


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_bundle_template_is_read_from_either_file(base: BaseText, tmp_path: Path, where: str) -> None:
    own = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    save_tokenizer(tmp_path, own, added=[])
    if where == "tokenizer_config.json":
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / where).read_text())
        (tmp_path / where).write_text(json.dumps(config | {"chat_template": own}))
    bundle = bundle_of(tmp_path, base)
    assert bundle.chat_template == own
    assert bundle.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_bundle_another_end_token_ends_its_answers(base: BaseText, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    assert bundle_of(tmp_path, base).eos_token_ids == (258,)


def test_bundle_defaults_come_from_generation_config_and_settings(base: BaseText, tmp_path: Path) -> None:
    generation = {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_new_tokens": 64,
        "eos_token_id": [256, 10],
        "num_beams": 1,
        "pad_token_id": 256,
        "transformers_version": "5.1",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "loramux.toml").write_text(
        'stop = ["###"]\nsystem_prompt = "Be terse."\ntool_parser = "hermes"\ndescription = "d"\nlicense = "mit"\n'
    )
    bundle = bundle_of(tmp_path, base)
    assert bundle.sampling == SamplingDefaults(temperature=0.3, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1)
    assert (bundle.max_tokens, bundle.eos_token_ids, bundle.stop) == (64, (10, 256), ("###",))
    assert (bundle.system_prompt, bundle.tool_parser, bundle.license) == ("Be terse.", "hermes", "mit")


def _json(name: str, document: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(old | document if isinstance(document, dict) else document))

    return write


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _other_model(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["merges"] = [["a", "b"]]
    document["model"]["vocab"]["ab"] = 261
    (folder / "tokenizer.json").write_text(json.dumps(document))


def _no_prefix(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(document))


def _named_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    _json(CONFIG, {"chat_template": [{"name": name, "template": "x"} for name in ("default", "rag")]})(folder)


def _broken_decoder(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    _json(CONFIG, {"added_tokens_decoder": {"x": 1}})(folder)


GENERATION, SETTINGS, CONFIG = "generation_config.json", "loramux.toml", "tokenizer_config.json"
REFUSED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "beams": (_json(GENERATION, {"num_beams": 4}), GENERATION, "num_beams"),
    "a field of the future": (_json(GENERATION, {"wonder": 2}), GENERATION, "wonder"),
    "bad words": (_json(GENERATION, {"bad_words_ids": [[3]]}), GENERATION, "bad_words_ids"),
    "a temperature out of range": (_json(GENERATION, {"temperature": 7}), GENERATION, "temperature"),
    "a temperature of text": (_json(GENERATION, {"temperature": "hot"}), GENERATION, "temperature"),
    "an end token beyond the rows": (_json(GENERATION, {"eos_token_id": 5000}), GENERATION, "5000"),
    "no JSON": (_text(GENERATION, "{"), GENERATION, "not JSON"),
    "deep JSON": (_text(GENERATION, "[" * 100_000), GENERATION, "not JSON"),
    "an unknown setting": (_text(SETTINGS, "tool_praser = 'x'"), SETTINGS, "tool_praser"),
    "an unknown tool parser": (_text(SETTINGS, "tool_parser = 'x'"), SETTINGS, "tool_parser"),
    "no TOML": (_text(SETTINGS, "= ="), SETTINGS, "not TOML"),
    "a stop string too long": (_text(SETTINGS, f"stop = ['{'x' * 600}']"), SETTINGS, "512"),
    "several templates": (_named_templates, CONFIG, "rag"),
    "a giant template": (_text("chat_template.jinja", "x" * 200_000), "chat_template.jinja", "131072"),
    "another vocabulary": (_other_model, "tokenizer.json", "model"),
    "another post-processor": (_no_prefix, "tokenizer.json", "post_processor"),
    "no tokenizer": (_text("tokenizer.json", "{}"), "tokenizer.json", "cannot read"),
    "tokens without a description": (_json("added_tokens.json", {"<|old|>": 258}), "added_tokens.json", "<|old|>"),
    "a broken decoder": (_broken_decoder, CONFIG, "added_tokens_decoder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bundle_that_cannot_be_served_is_refused_by_file_and_field(base: BaseText, tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path, added=[])
    spoil, file, named = REFUSED[name]
    spoil(tmp_path)
    refusal = report_on(tmp_path, base).refusal
    assert refusal is not None
    assert refusal.field == file
    assert named in refusal.message


SENTENCES: dict[str, tuple[dict[str, object], object]] = {
    "older mean": ({POOLING_FILE: {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}}, "mean"),
    "older last token": ({POOLING_FILE: {"pooling_mode_lasttoken": True, "include_prompt": False}}, "last"),
    "newer": ({POOLING_FILE: {"word_embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": True}}, "mean"),
    "no pooling": ({MODULES_FILE: [{"idx": 0, "name": "0", "path": "", "type": "a.models.Transformer"}]}, None),
    "first token": ({POOLING_FILE: {"pooling_mode_cls_token": True}}, POOLING_FILE),
    "two": ({POOLING_FILE: {"pooling_mode": ["mean", "max"]}}, POOLING_FILE),
    "older two": ({POOLING_FILE: {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}}, POOLING_FILE),
    "none": ({POOLING_FILE: {"word_embedding_dimension": 8}}, POOLING_FILE),
    "without the prompt": ({POOLING_FILE: {"pooling_mode": "mean", "include_prompt": False}}, POOLING_FILE),
    "another module": ({MODULES_FILE: [{"path": "2_Dense", "type": "a.models.Dense"}]}, MODULES_FILE),
    "pooling not sent": ({MODULES_FILE: [{"path": "1_Pooling", "type": "a.models.Pooling"}]}, MODULES_FILE),
    "no list": ({MODULES_FILE: {"a": 1}}, MODULES_FILE),
    "a prompt by itself": ({PROMPTS_FILE: {"prompts": {"q": "query: "}, "default_prompt_name": "q"}}, PROMPTS_FILE),
    "lower case": ({LENGTH_FILE: {"do_lower_case": True}}, LENGTH_FILE),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_bundle_reads_pooling_of_sentence_transformers_or_refuses_it(base: BaseText, tmp_path: Path, name: str) -> None:
    files, expected = SENTENCES[name]
    (tmp_path / "1_Pooling").mkdir()
    for file, document in files.items():
        (tmp_path / file).write_text(json.dumps(document))
    report = examine(BundleJob(folder=str(tmp_path), num_tokens=300, task="FEATURE_EXTRACTION"), base)
    if report.refusal is None:
        assert read_bundle(tmp_path).pooling == expected
    else:
        assert report.refusal.field == expected


def test_bundle_of_an_adapter_with_dense_modules_of_its_own_is_refused_with_the_way_out(
    base: BaseText, tmp_path: Path
) -> None:
    (tmp_path / MODULES_FILE).write_text(json.dumps([{"path": "2_Dense", "type": "a.models.Dense"}]))
    (tmp_path / "loramux.toml").write_text('pooling = "mean"\n')
    report = examine(BundleJob(folder=str(tmp_path), num_tokens=300, task="FEATURE_EXTRACTION"), base)
    assert report.refusal is not None
    assert (report.refusal.field, report.refusal.code) == (MODULES_FILE, "field_unsupported")
    assert "Dense modules of its base" in report.refusal.message


def test_bundle_notes_that_long_texts_are_not_cut(base: BaseText, tmp_path: Path) -> None:
    (tmp_path / LENGTH_FILE).write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    report = examine(BundleJob(folder=str(tmp_path), num_tokens=300, task="FEATURE_EXTRACTION"), base)
    assert report.refusal is None
    assert "512" in report.warnings[0].message


def test_bundle_added_tokens_without_rows_are_refused(base: BaseText, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    refusal = report_on(tmp_path, base, num_tokens=260).refusal
    assert refusal is not None
    assert refusal.code == "tokens_without_rows"
    assert ADDED[2] in refusal.message


def test_bundle_tokenizer_as_transformers_rebuilds_it_is_refused_if_it_makes_other_tokens(tmp_path: Path) -> None:
    """A trainer that loads the base with transformers saves the rebuilt tokenizer; served is the base's own file."""
    base_folder, folder = tmp_path / "base", tmp_path / "adapter"
    for made in (base_folder, folder):
        made.mkdir()
        byte_tokenizer().save_pretrained(made)  # without the normalizer that Qwen2Tokenizer brings
    (base_folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    base = BaseText(base_folder)
    assert bundle_of(folder, base) == Bundle()
    AutoTokenizer.from_pretrained(base_folder).save_pretrained(folder)
    report = report_on(folder, base)
    assert report.refusal is not None
    assert (report.refusal.code, report.refusal.field) == ("tokenizer_differs", "tokenizer.json")
    assert "the file makes the tokens" in report.refusal.message


def test_bundle_added_tokens_with_a_gap_are_refused(base: BaseText, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    _json(CONFIG, {"added_tokens_decoder": {"290": {"content": "<|far|>", "special": True}}})(tmp_path)
    refusal = report_on(tmp_path, base).refusal
    assert refusal is not None
    assert "do not continue the base's" in refusal.message


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt", "trainer_state.json"),
        *("special_tokens_map.json", "runs/x/events.out.tfevents.1", "checkpoint-50/optimizer.pt", "training_loss.png"),
        *("additional_config.json", "args.json", "Modelfile", "checkpoint_complete", "processor_config.json"),
        *("adapter_model.pt", "tokens_state.json", "training_params.json", "sentencepiece.bpe.model"),
        *("random_states_0.pkl", "pytorch_model_fsdp.bin"),
    ],
)
def test_bundle_files_of_the_trainer_s_own_are_ignored(name: str) -> None:
    assert is_ignored(name)


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.bin", "model.pkl"])
def test_bundle_pickles_are_not_ignored(name: str) -> None:
    assert is_pickled(name)
    assert not is_ignored(name)
