"""LoRAX's API: POST /generate, /generate_stream and /, as LoRAX's clients send requests and read answers.

`inputs` is the prompt, and the parameter `adapter_id` names the adapter. First the structs, then the routes, then the
writer of answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from litestar import Controller, MediaType, Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import Meta

from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.sampling import DRAWING, given_numbers
from loramux.common.settings.file import Settings
from loramux.common.units import TokenCounts
from loramux.engine.messages import SamplingParams
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Answer, Delta, FinishReason, GenerationRequest
from loramux.serving.service import CompletionService
from loramux_api.answering import Writer, respond
from loramux_api.auth import requires
from loramux_api.bodies import MAX_BODY_BYTES, AnyRequest, Body, InferenceRequest, Unsupported
from loramux_api.openapi import REFUSALS, ResponseSpec, StreamingOperation
from loramux_api.problems import ErrorAnswer, problem_of
from loramux_api.schemas.bounds import ModelName
from loramux_api.schemas.sampling import Int64, Positive, StopString, taking_numbers

DEFAULT_MAX_NEW_TOKENS = 20
"""LoRAX's default for `max_new_tokens`."""
_OWN = "adapters are uploaded to this server (POST /v1/adapters) and named `adapter` or `tenant/adapter`."


@taking_numbers(without=("presence_penalty", "frequency_penalty", "min_p"))
class GenerateParameters(Body, kw_only=True):
    """LoRAX's parameters; null means the same as absent."""

    adapter_id: ModelName | None = None
    """An adapter's name, as in `model` of the other endpoints. Without it, the base model answers."""
    do_sample: bool | None = None
    max_new_tokens: Positive | None = None
    ignore_eos_token: bool | None = None
    return_full_text: bool | None = None
    stop: Annotated[list[StopString], Meta(max_length=16)] | None = None
    seed: Int64 | None = None
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
    """LoRAX's `CompatGenerateRequest`."""

    inputs: Annotated[str, Meta(min_length=1, max_length=MAX_BODY_BYTES)]
    parameters: GenerateParameters | None = None
    stream: bool = False

    nested: ClassVar[Mapping[str, type[Body]]] = {"parameters": GenerateParameters}

    @property
    def given(self) -> GenerateParameters:
        """The parameters, or their defaults."""
        return self.parameters or GenerateParameters()


def to_request(body: GenerateBody, base: str) -> GenerationRequest:
    """Return the request of the serving layer. `base` answers if no adapter is named. Raises InvalidRequest."""
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
    numbers = given_numbers(given)
    sampled = given.do_sample or not numbers.keys().isdisjoint(DRAWING)
    if given.do_sample and numbers.get("temperature") == 0:
        raise InvalidRequest(
            "'parameters.temperature' is 0, which samples nothing, and 'do_sample' is true; leave one of them out.",
            field="parameters.temperature",
        )
    return SamplingParams(
        **numbers if sampled else numbers | {"temperature": 0.0},
        max_tokens=0,
        seed=given.seed,
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
    """Reason of the end: length, eos_token or stop_sequence."""
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
    """One event of a stream. The last one has the text and the details."""

    token: LoraxToken
    generated_text: str | None = None
    details: LoraxDetails | None = None


class LoraxError(msgspec.Struct):
    """An error response. `error_type` is validation, overloaded or generation."""

    error: str
    error_type: str


LORAX_REFUSALS = {
    status: ResponseSpec(LoraxError | ErrorAnswer, description=spec.description)  # type: ignore[arg-type]  # a union
    for status, spec in (REFUSALS | {422: REFUSALS[400]}).items()
}
ANSWERS = {200: ResponseSpec(Generated, description="With stream: server-sent events, one a token."), **LORAX_REFUSALS}
LISTED = {200: ResponseSpec(list[Generated], description="With stream: server-sent events."), **LORAX_REFUSALS}
EVENTS = {
    200: ResponseSpec(dict[str, Any], description="Server-sent events, one a token.", media_type="text/event-stream"),
    **LORAX_REFUSALS,
}

VALIDATION, OVERLOADED = "validation", "overloaded"
ERROR_TYPES = {401: VALIDATION, 403: VALIDATION, 404: VALIDATION, 422: VALIDATION, 429: OVERLOADED, 503: OVERLOADED}


def refused(request: AnyRequest, error: LoramuxError) -> Response[Any]:
    """Return the error in LoRAX's shape, with 422 if the caller must change the request."""
    problem = problem_of(request, error)
    status = 422 if problem.status == 400 else problem.status
    content = LoraxError(problem.error.message, ERROR_TYPES.get(status, "generation"))
    return Response(content, status_code=status, media_type=MediaType.JSON, headers=problem.all_headers())


class LoraxController(Controller):
    """Continue a text with the adapter that `parameters.adapter_id` names."""

    path = "/"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest
    exception_handlers = {LoramuxError: refused}  # noqa: RUF012  Litestar's

    @post(
        "/generate",
        operation_class=StreamingOperation,
        status_code=200,
        summary="Continue a text, as LoRAX does",
        responses=ANSWERS,
    )
    async def generate(
        self,
        data: JSONBody[GenerateBody],
        request: AnyRequest,
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        settings: NamedDependency[Settings],
    ) -> Response[Any]:
        """Generate one answer; with `stream`, token by token."""
        return await answered(data, request, principal, completions, settings)

    @post(
        "/generate_stream",
        status_code=200,
        summary="Continue a text token by token, as LoRAX does",
        responses=EVENTS,
    )
    async def generate_stream(
        self,
        data: JSONBody[GenerateBody],
        request: AnyRequest,
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        settings: NamedDependency[Settings],
    ) -> Response[Any]:
        """Generate one event per token. The last one has the whole text and the details."""
        return await answered(msgspec.structs.replace(data, stream=True), request, principal, completions, settings)


async def answered(
    data: GenerateBody,
    request: AnyRequest,
    principal: Principal,
    completions: CompletionService,
    settings: Settings,
) -> Response[Any]:
    """Answer a request in LoRAX's form, in one piece or as a stream."""
    answer = await completions.begin(principal, to_request(data, settings.model.served_model_name))
    writer = LoraxWriter(data, answer, completions.bases[answer.base_model].facts.eos_token_ids)
    return await respond(request, answer, writer, stream=data.stream)


class LoraxWriter(Writer):
    """Writes one request's answer. A stream's events are delayed by one token, because the last token's event also
    contains the end of the answer.
    """

    ending = b""

    def __init__(self, body: GenerateBody, answer: Answer, eos_token_ids: Collection[int]) -> None:
        self._body = body
        self._answer = answer
        self._eos_token_ids = eos_token_ids
        self._text = ""
        self._pending_text = ""
        """Text of a token that is not complete yet."""
        self._ids: deque[int] = deque()
        """Tokens whose event has not been sent yet."""
        self._collected: list[LoraxToken] = []
        self._last: LoraxToken | None = None
        self._finish_reason: FinishReason | None = None
        self._last_id = -1

    def opening(self) -> Iterable[StreamedToken]:
        """Return no event, because a stream begins with a token."""
        return ()

    def chunk(self, delta: Delta) -> Iterable[StreamedToken]:
        """Return the event of the token before the delta's, if there is one."""
        tokens = self._tokens(delta)
        if not tokens:
            return
        before, self._last = self._last, tokens[-1]
        if len(tokens) > 1:  # these tokens became certain together, so one event contains them
            self._last = msgspec.structs.replace(tokens[-1], text="".join(token.text for token in tokens))
        if before is not None:
            yield StreamedToken(token=before)

    def closing(self, usage: TokenCounts) -> Iterable[StreamedToken]:
        """Return the last token, the whole text and the details."""
        last = self._last or LoraxToken(id=self._last_id, text="", logprob=0.0, special=True)
        last = msgspec.structs.replace(last, text=last.text + self._pending_text)
        text = self._shown(self._text)
        yield StreamedToken(token=last, generated_text=text, details=self._details(usage))

    def collect(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece."""
        self._collected += self._tokens(delta)

    def whole(self, usage: TokenCounts) -> Generated:
        """Return the collected answer in one piece."""
        text = self._shown(self._text)
        if not self._body.given.details:
            return Generated(generated_text=text)
        details = self._details(usage)
        details.prefill, details.tokens = [], self._collected
        return Generated(generated_text=text, details=details)

    def failure(self, error: LoramuxError) -> Iterable[LoraxError]:
        """Return the events for an error in the middle of a stream."""
        return (LoraxError(error.message, "generation"),)

    def _tokens(self, delta: Delta) -> list[LoraxToken]:
        """Return the tokens whose text is complete with this delta."""
        self._text += delta.text
        self._pending_text += delta.text
        self._ids += delta.token_ids
        self._last_id = delta.token_ids[-1] if delta.token_ids else self._last_id
        self._finish_reason = delta.finish_reason or self._finish_reason
        tokens = []
        for one in delta.logprobs:
            text, self._pending_text = (
                self._pending_text[: len(one.token.text)],
                self._pending_text[len(one.token.text) :],
            )
            tokens.append(LoraxToken(id=self._ids.popleft(), text=text, logprob=one.logprob))
        return tokens

    def _shown(self, text: str) -> str:
        return self._body.inputs + text if self._body.given.return_full_text else text

    def _details(self, usage: TokenCounts) -> LoraxDetails:
        reason = "length"
        if self._finish_reason == "stop":
            reason = "eos_token" if self._last_id in self._eos_token_ids else "stop_sequence"
        return LoraxDetails(
            finish_reason=reason,
            prompt_tokens=usage.prompt,
            generated_tokens=usage.output,
            seed=self._body.given.seed,
        )
