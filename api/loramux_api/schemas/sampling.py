"""Request fields that inference endpoints share: prompts, sampling, the end of generation, and the format of an answer.

A request sets a format with only one of OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older
`guided_*` fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta

from loramux.common.sampling import KINDS, PARAMETERS, RECOMMENDED, given_numbers, with_numbers
from loramux.constraints.formats import AnswerFormat, Choice, Grammar, JsonObject, JsonSchema, Regex
from loramux.data.entities import ServiceTier
from loramux.engine.messages import SamplingParams
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import AskedFormat, Prompt, Truncation
from loramux_api.bodies import MAX_VALUES, Body, InferenceBody, Unsupported
from loramux_api.schemas.bounds import ModelName, Name, Tags, Text, TokenIds

T = TypeVar("T", bound=Body)

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_NAMED_LOGPROBS = 128
MAX_USER_LENGTH = 512
_SHOWN, _SHOWN_KEYS = 40, 3
"""Numbers of characters of a wrong key of logit_bias, and of such keys, that the error message repeats at most."""
_token_id = re.compile(r"-?[0-9]{1,18}")
_NO_SEARCH = "answers are sampled, not searched for; ask for 'n' choices with 'logprobs', and take the likeliest."

LogitBias = Annotated[dict[str, Annotated[float, PARAMETERS["logit_bias"].range]], Meta(max_length=1024)]
Positive = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=512)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Promptlike = Text | Annotated[list[Text | int | TokenIds], Meta(min_length=1, max_length=MAX_VALUES)]
Choices = Annotated[list[Text], Meta(min_length=1, max_length=10_000)]


def read_prompts(prompt: Promptlike) -> tuple[Prompt, ...]:
    """Return the prompts one by one. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        raise InvalidRequest(
            "Invalid value for 'prompt': a list holds texts, or token ids, or lists of token ids, not a mixture.",
            field="prompt",
            code="invalid_value",
        )
    if kinds == {int}:
        return (cast(list[int], prompt),)
    return tuple(cast(list[str | list[int]], prompt))


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema with a name."""

    name: Annotated[str, Meta(max_length=512)]
    """Accepted and without effect."""
    schema: Any = None
    """A JSON schema; absent: any JSON object."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""
    description: Text | None = None
    """Accepted and without effect."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's format of an answer."""

    type: Name
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """Needed with the type `json_schema`."""


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's format of an answer; only one of its fields may be set."""

    json: Any = None
    """A JSON schema, or a text that holds one."""
    regex: Text | None = None
    """A regular expression that the whole answer matches."""
    choice: Choices | None = None
    """The answer is one of these texts."""
    grammar: Text | None = None
    """A context-free grammar in Lark's or GBNF's notation."""
    json_object: bool | None = None
    """True: the answer is any JSON object."""


class FormattedBody(Protocol):
    """Fields of a body that ask for a format."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: Choices | None
    guided_grammar: str | None


def asked_format(body: FormattedBody) -> AskedFormat | None:
    """Return the format that a body requests. Raises InvalidRequest if the format is invalid or the body requests
    several.
    """
    outputs = body.structured_outputs or StructuredOutputs()
    formats: dict[str, AnswerFormat | None] = {
        "response_format": _response_format(body.response_format),
        "structured_outputs.json": _schema(outputs.json),
        "structured_outputs.regex": None if outputs.regex is None else Regex(outputs.regex),
        "structured_outputs.choice": None if outputs.choice is None else Choice(outputs.choice),
        "structured_outputs.grammar": None if outputs.grammar is None else Grammar(outputs.grammar),
        "structured_outputs.json_object": JsonObject() if outputs.json_object else None,
        "guided_json": _schema(body.guided_json),
        "guided_regex": None if body.guided_regex is None else Regex(body.guided_regex),
        "guided_choice": None if body.guided_choice is None else Choice(body.guided_choice),
        "guided_grammar": None if body.guided_grammar is None else Grammar(body.guided_grammar),
    }
    asked = [AskedFormat(format, field) for field, format in formats.items() if format is not None]
    if len(asked) > 1:
        names = " and ".join(f"'{one.field}'" for one in asked)
        raise InvalidRequest(f"An answer has one format, and {names} ask for several; send one.", field=asked[1].field)
    return asked[0] if asked else None


def _response_format(asked: ResponseFormat | None) -> AnswerFormat | None:
    match asked:
        case None | ResponseFormat("text"):
            return None
        case ResponseFormat("json_object"):
            return JsonObject()
        case ResponseFormat("json_schema", None):
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema'.",
                field="response_format.json_schema",
                code="missing_required_parameter",
            )
        case ResponseFormat("json_schema", JsonSchemaFormat(schema=schema, strict=strict)):
            return _schema(schema, strict=bool(strict)) or JsonObject()
    raise InvalidRequest(
        f"Invalid value for 'response_format.type': '{asked.type[:40]}'. "
        "Supported are text, json_object and json_schema.",
        field="response_format.type",
        code="invalid_value",
    )


def _schema(schema: Any, *, strict: bool = True) -> JsonSchema | None:
    return None if schema is None else JsonSchema(schema, strict)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream; allowed only with `stream`."""

    include_usage: bool | None = None
    """Send one more chunk before [DONE], without choices, that contains the usage."""
    include_obfuscation: bool | None = None
    """Accepted and without effect: chunks are never padded."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk contains the usage so far."""


def taking_numbers(*, without: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """Decorate a body with the numbers of `loramux.common.sampling`, within their ranges."""
    return with_numbers([name for name in KINDS if name not in without], lambda parameter: parameter.range)


AskedTier = Literal["auto", "default", "flex", "priority"]


@taking_numbers()
class SamplingBody(InferenceBody, kw_only=True):
    """Sampling and the end of generation; null means the same as absent."""

    model: ModelName
    seed: Int64 | None = None
    logit_bias: LogitBias | None = None
    """Biases by token id, which is written as a text."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=1024)] | None = None
    """The only tokens that answers may have. Not allowed together with a format, or with tools that have one."""
    logprob_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_NAMED_LOGPROBS)] | None = None
    """With `logprobs`: report the log probabilities of these tokens and of the chosen one, instead of the most likely
    tokens.
    """
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add `token_ids` to every choice and `prompt_token_ids` to the answer."""
    prompt_logprobs: TopLogprobs | None = None
    """Return log probabilities of the prompt's own tokens, with this many alternatives each."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of log probabilities as `token_id:42`."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own special tokens around the prompt. The default is true for a text, and false for a
    conversation, because the chat template contains these tokens.
    """
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Shorten a prompt to this many tokens; -1: to the number of tokens that leaves room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """End of a prompt that is shortened: at its beginning (`left`, the default) or at its end."""
    metadata: Tags | None = None
    """Up to 16 tags by which the bill can be divided."""
    response_format: ResponseFormat | None = None
    """Format of every answer, in OpenAI's form."""
    structured_outputs: StructuredOutputs | None = None
    """Format of every answer, in vLLM's form."""
    guided_json: Any = None
    """The older name of `structured_outputs.json`; `guided_regex`, `guided_choice` and `guided_grammar` likewise."""
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_LENGTH)] | None = None
    """The caller's name for its end user. If an alias has several revisions, one user always gets the same revision."""

    service_tier: AskedTier | None = None
    """Urgency and price of the request; auto is the same as default. The answer is 403 if your plan does not include
    the tier.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "guided_decoding_backend",
            "mm_payload",
            "request_id",
            "return_mm_kwargs",
            "return_token_offsets",
            "session_id",
            "stream_interval",
            "thinking_token_budget",
        }
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "bad_words": Unsupported("forbid tokens with 'logit_bias'.", (None, [])),
        "best_of": Unsupported("ask for n choices and pick one.", (None, 1)),
        "cache_salt": Unsupported("the prefix cache is never shared between tenants; use a project for each group."),
        "early_stopping": Unsupported(_NO_SEARCH, (None, False)),
        "ec_transfer_params": Unsupported("the fleet moves requests by itself."),
        "guided_whitespace_pattern": Unsupported("write the whitespace into a 'grammar'."),
        "include_stop_str_in_output": Unsupported("an answer ends before its stop string.", (None, False)),
        "kv_transfer_params": Unsupported("the fleet moves requests by itself."),
        "length_penalty": Unsupported(_NO_SEARCH, (None, 1)),
        "mm_processor_kwargs": Unsupported("this server reads and writes text.", (None, {})),
        "priority": Unsupported("ask for a 'service_tier'.", (None, 0)),
        "repetition_detection": Unsupported("bound the answer with 'max_tokens'."),
        "return_prompt_text": Unsupported("ask POST /tokenize and /detokenize.", (None, False)),
        "return_weight_versions": Unsupported("the answer's 'model' names its revision.", (None, False)),
        "routed_experts_prompt_start": Unsupported("routing is not reported.", (None, 0)),
        "skip_special_tokens": Unsupported("special tokens are never shown.", (None, True)),
        "spaces_between_special_tokens": Unsupported("special tokens are never shown.", (None, True)),
        "use_beam_search": Unsupported(_NO_SEARCH, (None, False)),
        "vllm_xargs": Unsupported("this server has no extensions.", (None, {})),
        "watermarking": Unsupported("answers are not marked.", (None, False)),
    }
    """Values that ask for the default are accepted, because vLLM's clients send them."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the request."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def chosen_tier(self) -> ServiceTier:
        """Service tier of the request."""
        return chosen_tier(self.service_tier)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_usage_in_chunks(self) -> bool:
        """True if every chunk contains the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def truncation(self) -> Truncation | None:
        """Shortening of a prompt that is too long; None: the prompt is refused."""
        if self.truncate_prompt_tokens is None:
            return None
        most = None if self.truncate_prompt_tokens < 0 else self.truncate_prompt_tokens
        return Truncation(most, keeps_end=self.truncation_side != "right")


def chosen_tier(service_tier: AskedTier | None) -> ServiceTier:
    """Return the service tier that a request's `service_tier` means."""
    return "default" if service_tier is None or service_tier == "auto" else service_tier


def sampling_params(body: SamplingBody, logprobs: int | None, of_echo: int | None = None) -> SamplingParams:
    """Return the engine's parameters; the serving layer sets max_tokens. `of_echo` is the number of alternatives for a
    repeated prompt's tokens. Raises InvalidRequest.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "'prompt_logprobs' is not available when 'stream' is true; leave one out.", field="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", field="stream_options")
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequest(
            "'logprob_token_ids' is only allowed together with 'logprobs'; ask for log probabilities too.",
            field="logprob_token_ids",
        )
    return SamplingParams(
        **given_numbers(body),
        max_tokens=body.max_tokens or 0,
        seed=body.seed,
        logit_bias=_biases(body.logit_bias or {}),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        prompt_logprobs=max((n for n in (body.prompt_logprobs, of_echo) if n is not None), default=None),
    )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id. Raises InvalidRequest with the keys that are not token ids."""
    wrong = [key for key in given if not _token_id.fullmatch(key)]
    if wrong:
        named = ", ".join(repr(key[:_SHOWN]) for key in wrong[:_SHOWN_KEYS])
        more = f" and {len(wrong) - _SHOWN_KEYS} more" if len(wrong) > _SHOWN_KEYS else ""
        raise InvalidRequest(
            f"Invalid value for 'logit_bias': its keys are token ids. Expected `int`, got {named}{more}.",
            field="logit_bias",
            code="invalid_value",
        )
    return {int(key): bias for key, bias in given.items()}


def left_out(body: SamplingBody) -> frozenset[str]:
    """Return the parameters that the caller leaves to the model's recommendation."""
    return frozenset(RECOMMENDED).difference(given_numbers(body))
