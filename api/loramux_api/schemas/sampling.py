"""The request fields that both endpoints share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from loramux.engine.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingParams
from loramux.gateway import InvalidRequest, ServiceTier
from loramux_api.schemas.formats import Choices, ResponseFormat, StructuredOutputs
from loramux_api.schemas.strict import Body, Unsupported

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_USER_LENGTH = 512

Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Positive = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=512)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream; allowed only with `stream`."""

    include_usage: bool | None = None
    """One more chunk before [DONE], without choices, that brings the usage."""
    include_obfuscation: bool | None = None
    """Accepted and without effect: chunks are never padded."""


class SamplingBody(Body, kw_only=True):
    """Sampling and the end of generation; null is the same as absent."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=128)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add `token_ids` to every choice and `prompt_token_ids` to the answer."""
    metadata: dict[str, str] | None = None
    """Up to 16 tags by which the bill can be divided."""
    response_format: ResponseFormat | None = None
    """The format of every answer, in OpenAI's words."""
    structured_outputs: StructuredOutputs | None = None
    """The format of every answer, in vLLM's words."""
    guided_json: Any = None
    """The older name of `structured_outputs.json`; `guided_regex`, `guided_choice` and `guided_grammar` likewise."""
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_LENGTH)] | None = None
    """The caller's name for its end user. One user always gets the same revision of an alias that has several."""

    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """How urgent the request is, and at which price; auto is the same as default. 403 where your plan lacks it."""

    ignored: ClassVar[frozenset[str]] = frozenset({"guided_decoding_backend"})
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "best_of": Unsupported("ask for n choices and pick one.", (None, 1)),
        "echo": Unsupported(
            "the prompt is not repeated in the answer; put it before the text yourself.", (None, False)
        ),
        "guided_whitespace_pattern": Unsupported("write the whitespace into a 'grammar'."),
        "prompt_logprobs": Unsupported("log probabilities are given for generated tokens only."),
        "use_beam_search": Unsupported("answers are sampled, not searched for.", (None, False)),
    }

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def chosen_tier(self) -> ServiceTier:
        """The service tier of the request."""
        return "default" if self.service_tier is None or self.service_tier == "auto" else self.service_tier

    @property
    def include_usage(self) -> bool:
        """Does a stream end with the usage?"""
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_params(body: SamplingBody, logprobs: int | None) -> SamplingParams:
    """Return the engine's parameters; the gateway sets max_tokens. Raises InvalidRequest."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", field="stream_options")
    return SamplingParams(
        max_tokens=body.max_tokens or 0,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def left_out(body: SamplingBody) -> frozenset[str]:
    """Return the parameters that the caller leaves to the model's recommendation."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return frozenset(name for name in names if getattr(body, name) is None)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
