"""The task and the pooling of a base, from its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loramux.catalog.validation.task_files import bundle_of_base
from loramux.common.bundle import Bundle
from loramux.common.sentence_files import BundleRejected, sentence_pooling

MODULES = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}


def folder_of(root: Path, config: dict[str, Any], pooling: dict[str, Any] | None = None, **others: Any) -> Path:
    """A base's folder with its config.json and sentence-transformers' files."""
    (root / "1_Pooling").mkdir()
    (root / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        (root / "1_Pooling/config.json").write_text(json.dumps(pooling))
        (root / "modules.json").write_text(json.dumps([*MODULES, POOLING]))
    for name, value in others.items():
        (root / f"{name}.json").write_text(json.dumps(value))
    return root


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (None, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_encoder_base_pools_as_its_files_say(tmp_path: Path, pooling: dict[str, Any] | None, expected: str) -> None:
    folder = folder_of(tmp_path, {"model_type": "bert", "architectures": ["BertModel"]}, pooling)
    assert bundle_of_base(folder) == Bundle(task="FEATURE_EXTRACTION", pooling=expected)


DENSE = {"path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}


def with_dense(root: Path, model_type: str = "bert", **fields: Any) -> Path:
    (root / "2_Dense").mkdir()
    config = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}
    (root / "2_Dense/config.json").write_text(json.dumps(config | fields))
    (root / "2_Dense/model.safetensors").write_bytes(b"")
    return folder_of(root, {"model_type": model_type}, {"pooling_mode": "mean"}, modules=[*MODULES, POOLING, DENSE])


def test_encoder_base_with_dense_modules_pools_before_them(tmp_path: Path) -> None:
    assert bundle_of_base(with_dense(tmp_path)).pooling == "mean"
    (tmp_path / "2_Dense/model.safetensors").unlink()
    with pytest.raises(BundleRejected, match=r"no 2_Dense/model\.safetensors"):
        bundle_of_base(tmp_path)


def test_base_that_generates_has_no_dense_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert bundle_of_base(with_dense(tmp_path, "qwen3")) == Bundle()
    assert "Such modules are served on encoders" in caplog.text


NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([*MODULES, POOLING, {"path": "2_LSTM", "type": "a.LSTM"}], "'LSTM'"),
        ([*MODULES, POOLING, NORMALIZE, DENSE], "Its modules are Transformer, Pooling, Normalize, Dense"),
        ([*MODULES, DENSE, POOLING], "Its modules are Transformer, Dense, Pooling"),
        ([*MODULES, POOLING, POOLING], "Its modules are"),
        ([*MODULES, POOLING, DENSE | {"path": "../2_Dense"}], "no folder's name"),
    ],
)
def test_encoder_base_with_modules_that_are_not_served_is_refused(tmp_path: Path, modules: list, message: str) -> None:
    (with_dense(tmp_path) / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(BundleRejected, match=message):
        bundle_of_base(tmp_path)


def test_classifier_base_has_the_labels_of_its_config(tmp_path: Path) -> None:
    config = {"model_type": "roberta", "architectures": ["RobertaForSequenceClassification"]}
    named = {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "problem_type": "single_label_classification"}
    (tmp_path / "three").mkdir()
    (tmp_path / "two").mkdir()
    three = bundle_of_base(folder_of(tmp_path / "three", config | named))
    assert (three.task, three.num_labels, three.labels) == ("SEQ_CLS", 3, ("bad", "fair", "good"))
    assert three.problem_type == "single_label_classification"
    assert bundle_of_base(folder_of(tmp_path / "two", config)).num_labels == 2


def test_base_that_generates_has_the_pooling_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "mean").mkdir()
    (tmp_path / "first").mkdir()
    assert bundle_of_base(folder_of(tmp_path / "mean", {"model_type": "qwen3"}, {"pooling_mode": "mean"})) == Bundle(
        pooling="mean"
    )
    first = folder_of(tmp_path / "first", {"model_type": "qwen3"}, {"pooling_mode": "cls"})
    assert bundle_of_base(first) == Bundle()


def test_adapter_of_an_encoder_may_pool_the_first_token(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {}, {"pooling_mode_cls_token": True})
    assert sentence_pooling(folder, is_encoder=True) == "cls"
    with pytest.raises(BundleRejected, match="has not seen the text"):
        sentence_pooling(folder, is_encoder=False)
