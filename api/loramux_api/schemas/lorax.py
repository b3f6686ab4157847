"""LoRAX's generate: `inputs`, and `parameters` with the adapter among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from loramux.engine.request import SamplingParams
from loramux.gateway import GenerationRequest, InvalidRequest
from loramux_api.schemas.sampling import Int64, Positive, RepetitionPenalty, StopString
from loramux_api.schemas.strict import Body, Unsupported

DEFAULT_MAX_NEW_TOKENS = 20
"""The default of LoRAX."""
_OWN = "adapters are uploaded to this server (POST /v1/adapters) and named `adapter` or `tenant/adapter`."


class GenerateParameters(Body, kw_only=True):
    """LoRAX's parameters; null is the same as absent."""

    adapter_id: str | None = None
    """An adapter's name, as in `model` of the other endpoints; none: the base model."""
    do_sample: bool | None = None
    max_new_tokens: Positive | None = None
    ignore_eos_token: bool | None = None
    repetition_penalty: RepetitionPenalty | None = None
    return_full_text: bool | None = None
    stop: Annotated[list[StopString], Meta(max_length=16)] | None = None
    seed: Int64 | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    details: bool | None = None

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "adapter_source": Unsupported(f"nothing is fetched for a request: {_OWN}", (None, "", "local")),
        "api_token": Unsupported(f"nothing is fetched for a request: {_OWN}"),
        "apply_chat_template": Unsupported("send messages to POST /v1/chat/completions.", (None, False)),
        "best_of": Unsupported("ask again and pick one.", (None, 1)),
        "decoder_input_details": Unsupported("log probabilities are given for generated tokens only.", (None, False)),
        "merged_adapters": Unsupported("merge them with PEFT and upload the result.", (None,)),
        "response_format": Unsupported("answers are not constrained to a format."),
        "return_k_alternatives": Unsupported("ask POST /v1/completions for 'logprobs'."),
        "truncate": Unsupported("prompts are never cut; send a shorter one."),
        "typical_p": Unsupported("tokens are sampled by temperature, top_k and top_p.", (None, 1, 1.0)),
        "watermark": Unsupported("answers are not watermarked.", (None, False)),
    }


class GenerateBody(Body, kw_only=True):
    """`CompatGenerateRequest`."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: GenerateParameters | None = None
    stream: bool = False

    nested: ClassVar[Mapping[str, type[Body]]] = {"parameters": GenerateParameters}

    @property
    def given(self) -> GenerateParameters:
        """The parameters, or their defaults."""
        return self.parameters or GenerateParameters()


def to_request(body: GenerateBody, base: str) -> GenerationRequest:
    """Return the request as the gateway takes it; `base` answers where no adapter is named. Raises InvalidRequest."""
    given = body.given
    return GenerationRequest(
        kind="cmpl-",
        model=given.adapter_id or base,
        is_streamed=bool(body.stream),
        prompts=(body.inputs,),
        sampling=_sampling(given),
        max_tokens=given.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        stop=tuple(given.stop or ()),
    )


def _sampling(given: GenerateParameters) -> SamplingParams:
    """Return LoRAX's sampling: greedy unless `do_sample` or one of the sampling numbers is set."""
    chosen = given.temperature is not None or given.top_k is not None or given.top_p is not None
    sampled = given.do_sample or chosen
    if given.do_sample and given.temperature == 0:
        raise InvalidRequest(
            "'parameters.temperature' is 0, which samples nothing, and 'do_sample' is true; leave one of them out.",
            field="parameters.temperature",
        )
    temperature = 1.0 if given.temperature is None else given.temperature
    return SamplingParams(
        max_tokens=0,
        temperature=temperature if sampled else 0.0,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=max(given.top_k or 0, 0),
        seed=given.seed,
        repetition_penalty=given.repetition_penalty or 1.0,
        ignore_eos=bool(given.ignore_eos_token),
        logprobs=0,
    )


class LoraxToken(msgspec.Struct, kw_only=True):
    """A generated token."""

    id: int
    text: str
    logprob: float
    special: bool = False


class LoraxDetails(msgspec.Struct, kw_only=True):
    """The end of an answer."""

    finish_reason: str
    """length, eos_token or stop_sequence."""
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    prefill: list[Any] | msgspec.UnsetType = msgspec.UNSET
    tokens: list[LoraxToken] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, kw_only=True):
    """A whole answer."""

    generated_text: str
    details: LoraxDetails | None = None


class StreamedToken(msgspec.Struct, kw_only=True):
    """One event of a stream; the last one has the text and the details."""

    token: LoraxToken
    generated_text: str | None = None
    details: LoraxDetails | None = None


class LoraxError(msgspec.Struct):
    """A refusal. `error_type` is validation, overloaded or generation."""

    error: str
    error_type: str
