"""The task that a revision was trained for, and the requests that it answers.

    trained for                    chat, completions   embeddings   classify   score, rerank
    text (CAUSAL_LM), the base     yes                 yes          -          cosine of two vectors
    vectors (FEATURE_EXTRACTION)   -                   yes          -          cosine of two vectors
    classes (SEQ_CLS)              -                   -            yes        with one label: of both texts together

What is not answered is refused with the endpoint that is: a head that was not trained gives numbers that mean nothing.
"""

from __future__ import annotations

from dataclasses import replace

from loramux.bundle import Bundle
from loramux.gateway.errors import InvalidRequest
from loramux.gateway.messages import GenerationRequest

UNSUPPORTED_TASK = "unsupported_task"


def as_answered_by(asked: GenerationRequest, bundle: Bundle, width: int) -> GenerationRequest:
    """Return the request as a model with this bundle answers it; `width`: of its vectors. Raises InvalidRequest."""
    if asked.pairs and bundle.task == "SEQ_CLS":
        return _pairs_for_classifier(asked, bundle)
    if asked.pooling == "classify" and bundle.task != "SEQ_CLS":
        raise _refused("is no classifier (task type SEQ_CLS). Call /v1/embeddings, or name an adapter that is one.")
    if asked.pooling != "classify" and bundle.task == "SEQ_CLS":
        raise _refused(
            "was trained for classes (task type SEQ_CLS). Call /v1/classify, or /v1/score and /v1/rerank where it has "
            "one label; or name another model."
        )
    if asked.pooling is None and bundle.task == "FEATURE_EXTRACTION":
        raise _refused(
            "was trained for vectors (task type FEATURE_EXTRACTION). Call /v1/embeddings, /v1/score or /v1/rerank; or "
            "name another model."
        )
    _check_dimensions(asked.dimensions, bundle, width)
    return replace(asked, pooling=bundle.pooling or "last") if asked.pooling == "own" else asked


def _pairs_for_classifier(asked: GenerationRequest, bundle: Bundle) -> GenerationRequest:
    if bundle.num_labels != 1:
        raise _refused(
            f"is a classifier with {bundle.num_labels} labels, and texts are scored by one. Call /v1/classify, or "
            "train it with num_labels=1."
        )
    return replace(asked, prompts=asked.pairs, pairs=(), pooling="classify")


def _check_dimensions(dimensions: int | None, bundle: Bundle, width: int) -> None:
    if dimensions in (None, width, *bundle.matryoshka_dimensions):
        return
    known = ", ".join(map(str, (*bundle.matryoshka_dimensions, width)))
    raise InvalidRequest(
        f"'dimensions' is {dimensions}, and this model's vectors have {known} numbers: leave it out. Of an adapter "
        "that was trained for shorter ones, loramux.toml lists them (matryoshka_dimensions).",
        field="dimensions",
        code="unsupported_parameter",
    )


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"This 'model' {why}", field="model", code=UNSUPPORTED_TASK)
