"""POST /v1/embeddings, /v1/classify, /pooling, /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from numpy.typing import NDArray

from loramux.common.units import TokenCounts
from loramux.serving.messages import Answer, Classes, Delta, PromptToken, TextPair
from loramux_api.answering import Inference, Writer
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.openapi import ApiController, ResponseSpec
from loramux_api.schemas.conversation import renamed_fields
from loramux_api.schemas.pooling import (
    INPUT,
    RERANKED,
    SCORED,
    Classification,
    ClassificationList,
    ClassifyBody,
    Document,
    Embedding,
    EmbeddingBody,
    EmbeddingList,
    Pooled,
    PooledList,
    PooledTexts,
    PoolingBody,
    Ranked,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    ScoreList,
    TokenClass,
    classify_request,
    embedding_request,
    input_usage,
    pooling_request,
    rerank_pairs,
    rerank_request,
    score_pairs,
    score_request,
    text_of,
    texts_of,
)

Numbers = NDArray[np.float32]
_encode = msgspec.json.Encoder().encode


class PoolingController(ApiController):
    """Vectors, classes and scores of texts."""

    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post(
        "/v1/embeddings",
        status_code=200,
        summary="Turn texts into vectors",
        responses={200: ResponseSpec(EmbeddingList, description="The vectors.")},
    )
    async def embed(self, data: JSONBody[EmbeddingBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Turn texts into vectors with one of your adapters, or with the base model."""
        with renamed_fields(INPUT):
            return await inference.answer(embedding_request(data), partial(EmbeddingWriter, data), stream=False)

    @post(
        ["/v1/classify", "/classify"],
        status_code=200,
        summary="Classify texts",
        responses={200: ResponseSpec(ClassificationList, description="The classes of each text.")},
    )
    async def classify(self, data: JSONBody[ClassifyBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Classify texts with an adapter of task type SEQ_CLS, or their tokens with one of task type TOKEN_CLS."""
        with renamed_fields(INPUT):
            return await inference.answer(classify_request(data), partial(ClassifyWriter, data), stream=False)

    @post(
        "/pooling",
        status_code=200,
        summary="Return a model's numbers for texts",
        responses={200: ResponseSpec(PooledTexts, description="The numbers of each text.")},
    )
    async def pool(self, data: JSONBody[PoolingBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Return the vectors of texts, the probabilities of their classes, or those of each of their tokens."""
        with renamed_fields(INPUT):
            return await inference.answer(pooling_request(data), partial(PoolingWriter, data), stream=False)

    @post(
        ["/v1/score", "/score"],
        status_code=200,
        summary="Score pairs of texts",
        responses={200: ResponseSpec(ScoreList, description="A score for each pair.")},
    )
    async def score(self, data: JSONBody[ScoreBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Score pairs of texts: with a classifier that has one label, otherwise by the cosine of two vectors."""
        with renamed_fields(SCORED):
            return await inference.answer(score_request(data), partial(ScoreWriter, data), stream=False)

    @post(
        ["/v1/rerank", "/rerank", "/v2/rerank"],
        status_code=200,
        summary="Order documents by their relevance",
        responses={200: ResponseSpec(Ranking, description="The documents, the most relevant first.")},
    )
    async def rerank(self, data: JSONBody[RerankBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Order documents by their relevance to a query, with the scores of POST /v1/score."""
        with renamed_fields(RERANKED):
            return await inference.answer(rerank_request(data), partial(RerankWriter, data), stream=False)


class PooledWriter(Writer):
    """Collects the numbers of each prompt. The numbers are never streamed."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._found: dict[int, Numbers] = {}

    def opening(self) -> Iterable[msgspec.Struct]:
        """Return nothing."""
        return ()

    def chunk(self, delta: Delta) -> Iterable[msgspec.Struct]:
        """Return nothing."""
        self.collect(delta)
        return ()

    def closing(self, usage: TokenCounts) -> Iterable[msgspec.Struct]:
        """Return the answer."""
        yield self.whole(usage)

    def collect(self, delta: Delta) -> None:
        """Collect a prompt's numbers."""
        if delta.pooled:
            self._found[delta.index] = np.frombuffer(delta.pooled, dtype="<f4")

    @property
    def numbers(self) -> list[Numbers]:
        """Numbers of all prompts, in order."""
        return [self._found[index] for index in sorted(self._found)]

    def head(self, usage: TokenCounts) -> dict[str, Any]:
        """Return the first fields of every answer."""
        answer = self._answer
        return {"id": answer.id, "created": answer.created, "model": answer.model, "usage": input_usage(usage)}


class EmbeddingWriter(PooledWriter):
    """Writes vectors in OpenAI's shape."""

    def __init__(self, body: EmbeddingBody, answer: Answer) -> None:
        super().__init__(answer)
        self._body = body
        self._encoded: dict[int, msgspec.Raw] = {}
        """Encoded vectors. Each vector is encoded when it arrives, because a request has many numbers."""

    def collect(self, delta: Delta) -> None:
        """Collect and encode a vector."""
        if delta.pooled:
            self._encoded[delta.index] = self._encode(np.frombuffer(delta.pooled, dtype="<f4"))

    def whole(self, usage: TokenCounts) -> PooledList:
        """Return all vectors."""
        vectors = [self._encoded[index] for index in sorted(self._encoded)]
        data = [Embedding(index=i, embedding=cast(list[float], one)) for i, one in enumerate(vectors)]
        return EmbeddingList(**self.head(usage), data=data)

    def _encode(self, vector: Numbers) -> msgspec.Raw:
        vector = vector[: self._body.dimensions]
        if self._body.normalize is not False:
            vector = _normalized(vector).astype("<f4")
        if self._body.encoding_format == "base64":
            return msgspec.Raw(b'"' + base64.b64encode(vector.tobytes()) + b'"')
        return msgspec.Raw(_encode(vector.tolist()))


class ClassifyWriter(PooledWriter):
    """Writes classes in vLLM's shape."""

    def __init__(self, body: ClassifyBody, answer: Answer) -> None:
        super().__init__(answer)
        self._activates = False not in (body.use_activation, body.activation, body.softmax)

        self._encoded: dict[int, list[msgspec.Raw]] = defaultdict(list)
        """Encoded classes of tokens. They are encoded as they arrive, because a text has many tokens."""

    def collect(self, delta: Delta) -> None:
        """Collect a text's classes, or encode those of some of its tokens."""
        if not delta.tokens:
            super().collect(delta)
            return
        logits = np.frombuffer(delta.pooled, dtype="<f4").reshape(len(delta.tokens), -1)
        best = logits.argmax(axis=1).tolist()
        probs = (_activated(logits, self._answer.classes) if self._activates else logits).tolist()
        rows = zip(delta.tokens, best, probs, strict=True)
        self._encoded[delta.index] += [msgspec.Raw(_encode(self._token(*row))) for row in rows]

    def whole(self, usage: TokenCounts) -> PooledList:
        """Return the classes of all inputs."""
        data = []
        for index, logits in enumerate(self.numbers):
            label = self._label(int(logits.argmax()))
            probs = (_activated(logits, self._answer.classes) if self._activates else logits).tolist()
            data.append(Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
        for index in sorted(self._encoded):
            tokens = cast(list[TokenClass], self._encoded[index])
            data.append(Classification(index=index, tokens=tokens, num_classes=self._answer.classes.count))
        return ClassificationList(**self.head(usage), data=data)

    def _token(self, token: PromptToken, best: int, probs: list[float]) -> TokenClass:
        return TokenClass(
            token=token.token.text,
            token_id=token.token.id,
            start=token.start,
            end=token.end,
            label=self._label(best),
            score=probs[best],
            probs=probs,
        )

    def _label(self, number: int) -> str:
        labels = self._answer.classes.labels
        return labels[number] if labels else f"LABEL_{number}"


class PoolingWriter(PooledWriter):
    """Writes numbers in vLLM's shape, and encodes them as they arrive."""

    def __init__(self, body: PoolingBody, answer: Answer) -> None:
        super().__init__(answer)
        self._body = body
        self._encoded: dict[int, list[bytes]] = defaultdict(list)
        """Encoded numbers of each input, in parts."""
        self._of_tokens = False

    def collect(self, delta: Delta) -> None:
        """Encode the numbers of an input, or of some of its tokens."""
        if not delta.pooled:
            return
        self._of_tokens = bool(delta.tokens)
        numbers = np.frombuffer(delta.pooled, dtype="<f4").reshape(len(delta.tokens) or 1, -1)
        numbers = numbers[:, : self._body.dimensions]
        if self._body.use_activation is not False:
            classes = self._answer.classes
            numbers = _activated(numbers, classes) if classes.count else _normalized(numbers[0])[None]
        if self._body.encoding_format == "base64":
            self._encoded[delta.index].append(numbers.astype("<f4").tobytes())
        else:
            self._encoded[delta.index] += map(_encode, numbers.tolist())

    def whole(self, usage: TokenCounts) -> PooledList:
        """Return the numbers of all inputs."""
        data = [
            Pooled(index=index, data=cast(str, msgspec.Raw(self._joined(self._encoded[index]))))
            for index in sorted(self._encoded)
        ]
        return PooledTexts(**self.head(usage), data=data)

    def _joined(self, parts: list[bytes]) -> bytes:
        if self._body.encoding_format == "base64":
            return b'"' + base64.b64encode(b"".join(parts)) + b'"'
        return b"[" + b",".join(parts) + b"]" if self._of_tokens else parts[0]


class ScoreWriter(PooledWriter):
    """Writes scores in vLLM's shape."""

    def __init__(self, body: ScoreBody, answer: Answer) -> None:
        super().__init__(answer)
        self._pairs = score_pairs(body)
        self._activates = False not in (body.use_activation, body.activation)

    def whole(self, usage: TokenCounts) -> PooledList:
        """Return the scores of all pairs."""
        scores = _scores(self._pairs, self.numbers, self._answer.classes, activates=self._activates)
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreList(**self.head(usage), data=data)


class RerankWriter(PooledWriter):
    """Writes an order of documents in vLLM's and Jina's shape."""

    def __init__(self, body: RerankBody, answer: Answer) -> None:
        super().__init__(answer)
        self._body = body
        self._activates = False not in (body.use_activation, body.activation)

    def whole(self, usage: TokenCounts) -> Ranking:
        """Return the best documents in order."""
        body, answer = self._body, self._answer
        scores = _scores(rerank_pairs(body), self.numbers, answer.classes, activates=self._activates)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [Ranked(index=index, relevance_score=scores[index]) for index in best]
        if body.return_documents is not False:
            for one in results:
                one.document = Document(text=text_of(body.documents[one.index]))
        return Ranking(id=answer.id, model=answer.model, usage=input_usage(usage), results=results)


def _scores(pairs: Sequence[TextPair], numbers: list[Numbers], classes: Classes, *, activates: bool) -> list[float]:
    """Return a score for each pair: a classifier's single number, or the cosine of the two texts' vectors.

    A classifier reads pairs, and gives one result per pair. Any other model reads each text once, and a pair has two
    vectors. If the texts of a pair are equal, it has one vector, and the cosine is 1.
    """
    if _reads_pairs(numbers):
        return [float((_activated(one, classes) if activates else one)[0]) for one in numbers]
    vectors = {text: _normalized(one) for text, one in zip(texts_of(pairs), numbers, strict=True)}
    return [float(vectors[pair.first] @ vectors[pair.second]) for pair in pairs]


def _reads_pairs(numbers: Sequence[Numbers]) -> bool:
    """Return whether the numbers come from a classifier with one label. Vectors always have several numbers."""
    return len(numbers[0]) == 1


def _activated(logits: Numbers, classes: Classes) -> NDArray[np.float64]:
    """Return probabilities along the last axis: by softmax for one class among several, by sigmoid for independent
    classes.
    """
    wide = logits.astype(np.float64)
    if classes.problem == "regression":
        return wide
    if classes.problem == "multi_label_classification" or wide.shape[-1] == 1:
        return np.asarray(1.0 / (1.0 + np.exp(-wide)))
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _normalized(vector: Numbers) -> NDArray[np.float64]:
    """Return the vector, scaled to length 1."""
    wide = vector.astype(np.float64)
    return np.asarray(wide / (np.linalg.norm(wide) or 1.0))
