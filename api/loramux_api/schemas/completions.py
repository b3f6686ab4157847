"""POST /v1/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, cast

from msgspec import Meta

from loramux.gateway import GenerationRequest, InvalidRequest, Prompt, canonical_tags
from loramux_api.schemas.sampling import MAX_CHOICES, SamplingBody, TopLogprobs, asked_format, left_out, sampling_params
from loramux_api.schemas.strict import Unsupported

Promptlike = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class CompletionBody(SamplingBody, kw_only=True):
    """OpenAI's fields, and vLLM's names for what OpenAI does not have."""

    prompt: Promptlike
    """A text, several texts, token ids, or several lists of token ids."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    """True: the answer begins with the prompt, and so do its log probabilities."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **SamplingBody.unsupported,
        "prompt_embeds": Unsupported("send texts or token ids."),
        "suffix": Unsupported("text is continued at its end only.", (None, "")),
    }


def to_request(body: CompletionBody) -> GenerationRequest:
    """Return the request as the gateway takes it. Raises InvalidRequest."""
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
