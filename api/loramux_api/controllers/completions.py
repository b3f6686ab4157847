"""POST /v1/completions, as OpenAI's clients expect it: the request, the structs of its answers, the route, and the
writer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import UNSET, Meta, UnsetType

from loramux.common.units import TokenCounts
from loramux.serving.checks import canonical_tags
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import (
    Answer,
    Delta,
    FinishReason,
    GenerationRequest,
    PromptText,
    Token,
    TokenLogprob,
)
from loramux_api.answering import (
    CollectedChoice,
    Inference,
    JsonLists,
    PromptLogprobLists,
    Writer,
    asked_logprobs,
    spelled,
    usage_of_chunk,
)
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest, Unsupported
from loramux_api.openapi import ApiController, ResponseSpec, StreamingOperation
from loramux_api.schemas.chat import PromptLogprobList, UsageObject, usage_object
from loramux_api.schemas.sampling import (
    MAX_CHOICES,
    Promptlike,
    SamplingBody,
    TopLogprobs,
    asked_format,
    left_out,
    read_prompts,
    sampling_params,
)


class CompletionBody(SamplingBody, kw_only=True):
    """OpenAI's fields, and vLLM's names for fields that OpenAI does not have."""

    prompt: Promptlike
    """A text, several texts, token ids, or several lists of token ids."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """With `echo`, 0 returns only the prompt, with its log probabilities."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    """True: the answer begins with the prompt, and so do its log probabilities."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **SamplingBody.unsupported,
        "prompt_embeds": Unsupported("send texts or token ids."),
        "suffix": Unsupported("text is continued at its end only.", (None, "")),
    }


def to_request(body: CompletionBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "'max_tokens' of 0 asks for nothing but the repeated prompt; send 'echo' as true, or a number >= 1.",
            field="max_tokens",
            code="invalid_value",
        )
    prompts, n = read_prompts(body.prompt), body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} make {len(prompts) * n} choices, and a request has at most "
            f"{MAX_CHOICES}; send several requests.",
            field="prompt",
        )
    return GenerationRequest(
        kind="cmpl-",
        model=body.model,
        is_streamed=bool(body.stream),
        repeats_token_ids=bool(body.return_token_ids),
        repeats_logprobs=bool(body.echo) and body.logprobs is not None,  # the prompt's are sent with the first token
        prompts=prompts,
        sampling=sampling_params(body, body.logprobs, body.logprobs if body.echo else None),
        echo=bool(body.echo),
        left_out=left_out(body),
        max_tokens=body.max_tokens,
        n=n,
        stop=body.stops,
        truncation=body.truncation,
        add_special_tokens=body.add_special_tokens is not False,
        format=asked_format(body),
        user=body.user or None,
        tags=canonical_tags(body.metadata),
        service_tier=body.chosen_tier,
    )


class TextLogprobs(msgspec.Struct):
    """Parallel lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Null for the first token of a repeated prompt."""
    text_offset: list[int]


_LISTS = TextLogprobs.__struct_fields__


class TextChoice(msgspec.Struct, kw_only=True):
    """One continuation of one prompt, or its new part in a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """Token ids of the prompt. If token ids are not requested, this field is null in a whole answer and absent in
    chunks.
    """
    prompt_logprobs: PromptLogprobList | None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    service_tier: str
    usage: UsageObject | UnsetType | None = UNSET


class CompletionController(ApiController):
    """Completions of texts and token ids."""

    path = "/v1/completions"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post(
        operation_class=StreamingOperation,
        status_code=200,
        summary="Continue texts",
        responses={200: ResponseSpec(TextCompletion, description="With stream: server-sent text_completion events.")},
    )
    async def create(self, data: JSONBody[CompletionBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Continue one or several prompts with one of your adapters, or with the base model."""
        fingerprint_of = inference.completions.fingerprint_of
        return await inference.answer(
            to_request(data),
            lambda answer: CompletionWriter(data, answer, fingerprint_of(answer)),
            stream=bool(data.stream),
        )


class CompletionWriter(Writer):
    """Writes one answer in OpenAI's shape."""

    def __init__(self, body: CompletionBody, answer: Answer, fingerprint: str) -> None:
        self._body = body
        self._n = body.n or 1
        self._answer = answer
        self._fingerprint = fingerprint
        self._collected: defaultdict[int, CollectedChoice] = defaultdict(CollectedChoice)
        self._num_tokens = 0
        """Number of tokens of the answer so far."""
        self._begun: set[int] = set()
        """Choices whose first chunk has been sent."""
        self._logprobs: defaultdict[int, JsonLists] = defaultdict(lambda: JsonLists(*_LISTS))
        """Log probabilities of the collected choices."""
        self._echoed: dict[int, JsonLists] = {}
        """Log probabilities of the repeated prompts, by the choice that brings them."""
        self._encoded_texts: dict[int, bytes] = {}
        """JSON of the texts of the repeated prompts, by the prompt's number."""
        self._encoded_ids: dict[int, msgspec.Raw] = {}
        """JSON of the prompts' token ids, by the prompt's number."""
        self._of_prompts = PromptLogprobLists()

    def opening(self) -> Iterable[TextCompletion]:
        """Return no event, because a stream of texts begins with text."""
        return ()

    def chunk(self, delta: Delta) -> Iterable[TextCompletion]:
        """Return the event for a delta; none if the delta contains nothing that the client requested."""
        self._num_tokens += len(delta.token_ids)
        self._add_echoed(delta)
        delta = msgspec.structs.replace(delta, logprobs=asked_logprobs(delta, self._body))
        with_ids = self._body.return_token_ids and delta.token_ids
        if not (delta.text or delta.finish_reason or delta.logprobs or with_ids):
            return
        choice, lists = self._choice(delta), self._lists(delta.index, delta.logprobs) if delta.logprobs else None
        if delta.index in self._begun:
            choice.prompt_token_ids = UNSET
        else:
            self._begun.add(delta.index)
            self._repeat_prompt(choice)
            if self._body.echo and self._body.logprobs is not None:
                of_answer = JsonLists(*_LISTS)
                of_answer.extend(**self._lists(delta.index, delta.logprobs))
                lists = of_answer.written(after=self._echoed_of(delta.index))
                del self._echoed[delta.index]
        choice.logprobs = None if lists is None else TextLogprobs(**lists)
        yield self._completion([choice], usage_of_chunk(self._body, self._answer, self._num_tokens))

    def closing(self, usage: TokenCounts) -> Iterable[TextCompletion]:
        """Return the usage if the request has `include_usage`."""
        if self._body.include_usage:
            yield self._completion([], usage_object(usage))

    def collect(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece."""
        self._collected[delta.index].add(delta)
        if self._body.prompt_logprobs is not None:
            self._of_prompts.add(delta)
        self._add_echoed(delta)
        if self._body.logprobs is not None:
            self._logprobs[delta.index].extend(**self._lists(delta.index, asked_logprobs(delta, self._body)))

    def whole(self, usage: TokenCounts) -> TextCompletion:
        """Return the collected answer in one piece."""
        choices = [self._collected_choice(index, self._collected[index]) for index in sorted(self._collected)]
        return self._completion(choices, usage_object(usage))

    def _collected_choice(self, index: int, collected: CollectedChoice) -> TextChoice:
        joined = Delta(
            index=index,
            text="".join(collected.texts),
            token_ids=tuple(collected.token_ids),
            finish_reason=collected.finish_reason,
        )
        choice, first = self._choice(joined), index - index % self._n
        if self._body.logprobs is not None:
            after = self._echoed_of(first) if self._body.echo else None
            choice.logprobs = TextLogprobs(**self._logprobs[index].written(after))
        self._repeat_prompt(choice)
        if not self._body.return_token_ids:
            choice.token_ids = choice.prompt_token_ids = None
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = self._of_prompts.written(first)
        return choice

    def _repeat_prompt(self, choice: TextChoice) -> None:
        """Put the prompt before a choice's text. Its JSON is written once for all choices."""
        if self._body.echo:
            number = choice.index // self._n
            if number not in self._encoded_texts:
                self._encoded_texts[number] = msgspec.json.encode(self._prompt_of(choice.index).text)
            text = self._encoded_texts[number][:-1] + msgspec.json.encode(choice.text)[1:]
            choice.text = cast(str, msgspec.Raw(text))

    def _add_echoed(self, delta: Delta) -> None:
        """Write the delta's log probabilities of a prompt that is repeated."""
        if not (self._body.echo and delta.prompt_logprobs) or self._body.logprobs is None:
            return
        lists, most, scores = self._echoed_of(delta.index), self._body.logprobs, delta.prompt_logprobs
        lists.extend(
            tokens=[spelled(one.token, self._body) for one in scores],
            token_logprobs=[one.logprob for one in scores],
            top_logprobs=[self._alternatives(one.token, one.logprob, one.top[:most]) for one in scores],
            text_offset=self._prompt_of(delta.index).offsets[lists.length : lists.length + len(scores)],
        )

    def _echoed_of(self, index: int) -> JsonLists:
        """Return the log probabilities of a choice's prompt as far as they have come; the first token has none."""
        if index not in self._echoed:
            prompt = self._prompt_of(index)
            self._echoed[index] = JsonLists(*_LISTS)
            self._echoed[index].extend(
                tokens=[spelled(token, self._body) for token in prompt.tokens[:1]],
                token_logprobs=[None],
                top_logprobs=[None],
                text_offset=prompt.offsets[:1],
            )
        return self._echoed[index]

    def _prompt_of(self, index: int) -> PromptText:
        """Return the repeated prompt of a choice."""
        return self._answer.prompt_texts[index // self._n]

    def _completion(self, choices: list[TextChoice], usage: UsageObject | UnsetType | None) -> TextCompletion:
        return TextCompletion(
            id=self._answer.id,
            created=self._answer.created,
            model=self._answer.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            service_tier=self._answer.service_tier,
            usage=usage,
        )

    def _choice(self, delta: Delta) -> TextChoice:
        """Return a choice without log probabilities and without a repeated prompt."""
        with_ids = bool(self._body.return_token_ids)
        return TextChoice(
            index=delta.index,
            text=delta.text,
            logprobs=None,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids) if with_ids else UNSET,
            prompt_token_ids=self._prompt_ids(delta.index // self._n) if with_ids else UNSET,
        )

    def _prompt_ids(self, number: int) -> list[int]:
        """Return the token ids of a prompt as JSON, which is written once for all choices."""
        if number not in self._encoded_ids:
            self._encoded_ids[number] = msgspec.Raw(msgspec.json.encode(self._answer.prompt_token_ids[number]))
        return cast(list[int], self._encoded_ids[number])

    def _lists(self, index: int, ones: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the fields of TextLogprobs for tokens of a choice."""
        begin = len(self._prompt_of(index).text) if self._body.echo else 0
        return {
            "tokens": [spelled(one.token, self._body) for one in ones],
            "token_logprobs": [one.logprob for one in ones],
            "top_logprobs": [self._alternatives(one.token, one.logprob, one.top) for one in ones],
            "text_offset": [begin + one.offset for one in ones],
        }

    def _alternatives(self, chosen: Token, logprob: float, top: Iterable[tuple[Token, float]]) -> dict[str, float]:
        return {spelled(token, self._body): value for token, value in ((chosen, logprob), *top)}
