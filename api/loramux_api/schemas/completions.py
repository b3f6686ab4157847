"""POST /v1/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from loramux.gateway import Ask, InvalidRequest, Prompt, canonical_tags
from loramux_api.schemas.sampling import MAX_CHOICES, SamplingBody, TopLogprobs, sampling_params
from loramux_api.schemas.strict import Unsupported

Promptlike = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class CompletionBody(SamplingBody, kw_only=True):
    """OpenAI's fields, and vLLM's names for what OpenAI does not have."""

    prompt: Promptlike
    """A text, several texts, token ids, or several lists of token ids."""
    logprobs: TopLogprobs | None = None

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **SamplingBody.unsupported,
        "suffix": Unsupported("text is continued at its end only.", (None, "")),
    }


def to_ask(body: CompletionBody) -> Ask:
    """The request as the gateway takes it. Raises InvalidRequest."""
    prompts, n = _prompts(body.prompt), body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} make {len(prompts) * n} choices, and a request has at most "
            f"{MAX_CHOICES}; send several requests.",
            param="prompt",
        )
    return Ask(
        kind="cmpl",
        model=body.model,
        prompts=prompts,
        sampling=sampling_params(body, body.logprobs),
        max_tokens=body.max_tokens,
        n=n,
        stop=body.stops,
        user=body.user or None,
        tags=canonical_tags(body.metadata),
    )


def _prompts(prompt: Promptlike) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        raise InvalidRequest(
            "Invalid value for 'prompt': a list holds texts, or token ids, or lists of token ids, not a mixture.",
            param="prompt",
            code="invalid_value",
        )
    if kinds == {int}:
        return ([item for item in prompt if isinstance(item, int)],)
    return tuple(item for item in prompt if not isinstance(item, int))
