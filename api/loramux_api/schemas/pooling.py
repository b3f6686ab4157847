"""Vectors, classes and scores of texts: /v1/embeddings in OpenAI's shape; /v1/classify, /pooling, /v1/score and
/v1/rerank in vLLM's shape, which Jina's and Cohere's clients read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.common.bundle import VectorPooling
from loramux.common.units import TokenCounts
from loramux.engine.messages import SamplingParams
from loramux.serving.checks import canonical_tags
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import AskedPooling, GenerationRequest, Prompt, TextPair, Truncation
from loramux_api.bodies import MAX_STRINGS, InferenceBody, Unsupported
from loramux_api.schemas.bounds import ModelName, Tags, Text
from loramux_api.schemas.chat import PromptTokensDetails
from loramux_api.schemas.conversation import renamed_fields
from loramux_api.schemas.sampling import MAX_USER_LENGTH, Positive, Promptlike, chosen_tier, read_prompts

MAX_INPUTS = 2048
"""Maximum number of texts of a request; this is OpenAI's limit."""
INPUT = {"prompt": "input"}
SCORED = {"prompt": "text_2"}
RERANKED = {"prompt": "documents"}
"""Names of this endpoint for a completion's fields, used in error messages."""


class PooledBody(InferenceBody, kw_only=True):
    """Fields that all these endpoints share."""

    model: ModelName
    add_special_tokens: bool | None = None
    """Put the tokenizer's own special tokens around each text; this is the default."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Shorten each text to this many tokens; -1: to the maximum that the model accepts. Without this field, a longer
    text is refused.
    """
    truncation_side: Literal["left", "right"] | None = None
    """End of a text that is shortened: at its end (`right`, the default) or at its beginning."""
    metadata: Tags | None = None
    """Up to 16 tags by which the bill can be divided."""
    user: Annotated[str, Meta(max_length=MAX_USER_LENGTH)] | None = None
    """The caller's name for its end user. If an alias has several revisions, one user always gets the same revision."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """Urgency and price of the request; auto is the same as default. The answer is 403 if your plan does not include
    the tier.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"request_id", "safety_identifier"})
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "cache_salt": Unsupported("the prefix cache is never shared between tenants; use a project for each group."),
        "messages": Unsupported("send texts, or the token ids that POST /tokenize gives."),
        "mm_processor_kwargs": Unsupported("this server reads text.", (None, {})),
        "priority": Unsupported("ask for a 'service_tier'.", (None, 0)),
    }

    def request(self, kind: str, prompts: tuple[Prompt, ...], pooling: AskedPooling) -> GenerationRequest:
        """Return the request of the serving layer. Raises InvalidRequest."""
        cut = self.truncate_prompt_tokens
        left = self.truncation_side == "left"
        return GenerationRequest(
            kind=kind,
            model=self.model,
            is_streamed=False,
            prompts=prompts,
            pooling=pooling,
            sampling=SamplingParams(max_tokens=1),
            add_special_tokens=self.add_special_tokens is not False,
            truncation=None if cut is None else Truncation(None if cut < 0 else cut, keeps_end=left),
            user=self.user or None,
            tags=canonical_tags(self.metadata),
            service_tier=chosen_tier(self.service_tier),
        )


class EmbeddingBody(PooledBody, kw_only=True):
    """OpenAI's fields, and the pooling."""

    input: Promptlike
    """A text, several texts, token ids, or several lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: the float32s of a vector, little-endian. `float` is the default."""
    dimensions: Positive | None = None
    """Number of leading numbers of each vector that are returned. The adapter's loramux.toml must list
    `matryoshka_dimensions`.
    """
    pooling: VectorPooling | None = None
    """`last`: the last token's hidden state. `mean`: the mean over all tokens. `cls`: the first token's, of an encoder.
    The default is the value in the adapter's files, then the value in the base's sentence-transformers files; without
    them it is `last`, or `mean` for an encoder.
    """
    normalize: bool | None = None
    """True, the default: scale vectors to length 1. False: return them as the model makes them."""


class ClassifyBody(PooledBody, kw_only=True):
    """vLLM's fields."""

    input: Promptlike
    """A text, several texts, token ids, or several lists of token ids."""
    use_activation: bool | None = None
    """False: return the classifier's own numbers instead of probabilities."""
    activation: bool | None = None
    """The older name of `use_activation`; `softmax` is another."""
    softmax: bool | None = None


class PoolingBody(PooledBody, kw_only=True):
    """vLLM's fields."""

    input: Promptlike
    """A text, several texts, token ids, or several lists of token ids."""
    task: Literal["embed", "classify", "token_classify"] | None = None
    """`embed`: a vector of each text. `classify`: the probabilities of its classes. `token_classify`: those of each of
    its tokens. The default is the task of the model's training.
    """
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: the float32s of an input, little-endian. `float` is the default."""
    dimensions: Positive | None = None
    """Number of leading numbers of each vector that are returned. The adapter's loramux.toml must list
    `matryoshka_dimensions`.
    """
    use_activation: bool | None = None
    """False: return the model's own numbers instead of probabilities, or instead of vectors of length 1."""


Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_STRINGS)]


class ScoreBody(PooledBody, kw_only=True):
    """vLLM's fields."""

    text_1: Texts | None = None
    """A text, which is compared with each text of `text_2`, or a list of the same length as `text_2`."""
    text_2: Texts | None = None
    """A text or several."""
    queries: Texts | None = None
    """Another name of `text_1`, like `data_1`."""
    documents: Texts | None = None
    """Another name of `text_2`, like `data_2`."""
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool | None = None
    """False: return the classifier's own number instead of a number between 0 and 1. Cosines are not changed."""
    activation: bool | None = None
    """The older name of `use_activation`."""


class Document(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: Text


class RerankBody(PooledBody, kw_only=True):
    """The fields that vLLM, Jina and Cohere share."""

    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_STRINGS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Number of results, best first; 0 or absent: all results."""
    return_documents: bool | None = None
    """False: results without the documents' texts."""
    use_activation: bool | None = None
    """False: return the classifier's own number instead of a number between 0 and 1. Cosines are not changed."""
    activation: bool | None = None
    """The older name of `use_activation`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **PooledBody.unsupported,
        "max_chunks_per_doc": Unsupported("documents are read whole; send the parts as documents."),
        "max_tokens_per_doc": Unsupported("shorten each text with 'truncate_prompt_tokens'."),
        "rank_fields": Unsupported("documents are texts."),
    }


def embedding_request(body: EmbeddingBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    return replace(body.request("embd-", _inputs(body.input), body.pooling or "own"), dimensions=body.dimensions)


def classify_request(body: ClassifyBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    return body.request("classify-", _inputs(body.input), "classes")


def pooling_request(body: PoolingBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    pooling: AskedPooling = "own" if body.task == "embed" else body.task or "trained"
    return replace(body.request("pool-", _inputs(body.input), pooling), dimensions=body.dimensions)


def score_request(body: ScoreBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    return _compared(body, "score-", score_pairs(body), "text_2")


def rerank_request(body: RerankBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    return _compared(body, "rerank-", rerank_pairs(body), "documents")


def score_pairs(body: ScoreBody) -> tuple[TextPair, ...]:
    """Return the texts that are compared. Raises InvalidRequest."""
    first = _one_of(body, "text_1", "queries", "data_1")
    second = _one_of(body, "text_2", "documents", "data_2")
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"'text_1' has {len(first)} texts and 'text_2' {len(second)}; send one 'text_1', or as many as 'text_2'.",
            field="text_1",
        )
    return tuple(map(TextPair, first * (len(second) if len(first) == 1 else 1), second))


def rerank_pairs(body: RerankBody) -> tuple[TextPair, ...]:
    """Return the query with each document."""
    return tuple(TextPair(body.query, text_of(document)) for document in body.documents)


def text_of(document: str | Document) -> str:
    """Return a document's text."""
    return document if isinstance(document, str) else document.text


def texts_of(pairs: Iterable[TextPair]) -> tuple[str, ...]:
    """Return each text of `pairs` once: the prompts of a model that reads texts one by one."""
    return tuple(dict.fromkeys(text for pair in pairs for text in (pair.first, pair.second)))


def _inputs(given: Promptlike) -> tuple[Prompt, ...]:
    with renamed_fields(INPUT):
        prompts = read_prompts(given)
    if len(prompts) > MAX_INPUTS:
        raise _too_many(len(prompts), "input")
    return prompts


def _compared(body: PooledBody, kind: str, pairs: tuple[TextPair, ...], field: str) -> GenerationRequest:
    if len(pairs) > MAX_INPUTS:
        raise _too_many(len(pairs), field)
    return replace(body.request(kind, texts_of(pairs), "own"), pairs=pairs)


def _one_of(body: ScoreBody, *names: str) -> list[str]:
    """Return the texts of the only field of `names` that is set. Raises InvalidRequest."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        message = f"Missing required parameter: '{names[0]}'."
        raise InvalidRequest(message, field=names[0], code="missing_required_parameter")
    if len(given) > 1:
        raise InvalidRequest(f"'{given[1]}' is another name of '{given[0]}'; send one of them.", field=given[1])
    texts: Texts = getattr(body, given[0])
    return [texts] if isinstance(texts, str) else texts


def _too_many(count: int, field: str) -> InvalidRequest:
    message = f"'{field}' holds {count} texts, and at most {MAX_INPUTS} are allowed; send several requests."
    return InvalidRequest(message, field=field)


class InputUsage(msgspec.Struct, kw_only=True):
    """Tokens that are charged."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails


def input_usage(usage: TokenCounts) -> InputUsage:
    """Return the usage in the form of the API."""
    details = PromptTokensDetails(cached_tokens=usage.cached)
    return InputUsage(prompt_tokens=usage.prompt, total_tokens=usage.prompt, prompt_tokens_details=details)


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class PooledList(msgspec.Struct, kw_only=True):
    """Results in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    usage: InputUsage


class EmbeddingList(PooledList, kw_only=True):
    """The vectors."""

    data: list[Embedding]


class TokenClass(msgspec.Struct, kw_only=True):
    """The classes of one token."""

    token: str
    token_id: int
    start: int | None
    """Beginning of the token in the text, in characters; null for special tokens around the text, and for token ids."""
    end: int | None
    """End of the token in the text."""
    label: str
    """Name of the likeliest class, or `LABEL_` and its number."""
    score: float
    """Probability of the likeliest class."""
    probs: list[float]
    """Probabilities of all classes."""


class Classification(msgspec.Struct, kw_only=True):
    """The classes of one input, or of each of its tokens."""

    index: int
    label: str | UnsetType = UNSET
    """Name of the likeliest class, or `LABEL_` and its number."""
    probs: list[float] | UnsetType = UNSET
    """Probabilities of all classes."""
    tokens: list[TokenClass] | UnsetType = UNSET
    """The tokens in order, instead of `label` and `probs`, if the adapter's task type is TOKEN_CLS."""
    num_classes: int


class ClassificationList(PooledList, kw_only=True):
    """The classes."""

    data: list[Classification]


class Pooled(msgspec.Struct, kw_only=True):
    """The numbers of one input."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str
    """A vector, the probabilities of all classes, or those of each token in order; or all numbers in base64."""


class PooledTexts(PooledList, kw_only=True):
    """The numbers."""

    data: list[Pooled]


class Score(msgspec.Struct, kw_only=True):
    """Similarity of two texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(PooledList, kw_only=True):
    """The scores."""

    data: list[Score]


class Ranked(msgspec.Struct, kw_only=True):
    """One document."""

    index: int
    """Position of the document in the request."""
    document: Document | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    usage: InputUsage
    results: list[Ranked]
