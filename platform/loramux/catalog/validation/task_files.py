"""The task of a base, from its files, and a classifier's config.json. Fields that are not served are refused."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from loramux.common.bundle import MODEL_FILE, NO_BUNDLE, Bundle, ProblemType
from loramux.common.sentence_files import BundleRejected, dense_modules, read_object, refuse_dense, sentence_pooling
from loramux_adapters.checkpoint_config import is_classifier
from loramux_adapters.families import encoder_of

logger = logging.getLogger(__name__)


class ModelFields(msgspec.Struct, kw_only=True):
    """The fields of a classifier's config.json that are served."""

    id2label: dict[str, str] | None = None
    problem_type: ProblemType | None = None


def is_encoder(model_dir: Path) -> bool:
    """Return whether the checkpoint in `model_dir` is an encoder."""
    return encoder_of(read_object(model_dir, MODEL_FILE)) is not None


def bundle_of_base(model_dir: Path) -> Bundle:
    """Return the base's own task, if it generates no text, and its pooling. Raises BundleRejected.

    An encoder pools by the mean unless its files say otherwise, as sentence-transformers does. If another base's files
    ask for what is not served, its vectors are those of the last token. The engine computes an encoder's Dense modules.
    """
    if not is_encoder(model_dir):
        try:
            refuse_dense(model_dir, "Such modules are served on encoders.")
            return Bundle(pooling=sentence_pooling(model_dir, is_encoder=False))
        except BundleRejected as rejected:
            logger.warning("vectors of the base in %s are those of the last token: %s", model_dir, rejected)
            return NO_BUNDLE
    config = of_model(model_dir)
    if not is_classifier(read_object(model_dir, MODEL_FILE)):
        pooling = sentence_pooling(model_dir, is_encoder=True) or "mean"
        dense_modules(model_dir)
        return Bundle(task="FEATURE_EXTRACTION", pooling=pooling)
    labels = labels_of(config) or ("LABEL_0", "LABEL_1")
    return Bundle(task="SEQ_CLS", num_labels=len(labels), labels=labels, problem_type=config.problem_type)


def of_model(folder: Path) -> ModelFields:
    """Read a classifier's config.json. Raises BundleRejected."""
    document = read_object(folder, MODEL_FILE)
    try:
        return msgspec.convert({name: document.get(name) for name in ModelFields.__struct_fields__}, ModelFields)
    except msgspec.ValidationError as error:
        raise BundleRejected(MODEL_FILE, f"{error}.") from None


def labels_of(config: ModelFields) -> tuple[str, ...]:
    """Return the names of `id2label`, in order. Raises BundleRejected."""
    names = config.id2label or {}
    try:
        named = {int(number): name for number, name in names.items()}
    except ValueError:
        raise BundleRejected(MODEL_FILE, "id2label has a key that is no number.") from None
    if sorted(named) != list(range(len(named))):
        raise BundleRejected(MODEL_FILE, "id2label does not number its labels from 0 on.")
    return tuple(named[number] for number in range(len(named)))
