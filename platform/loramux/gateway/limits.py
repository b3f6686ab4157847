"""What the model's context and vocabulary allow."""

from __future__ import annotations

from collections.abc import Collection

from loramux.engine.messages import ModelFacts
from loramux.gateway.ask import Ask, Prompt
from loramux.gateway.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
"""For texts, as OpenAI has it."""
TOO_LONG = "context_length_exceeded"


def context_length(facts: ModelFacts) -> int:
    """The most tokens, prompt and answer, that the model takes and the pool could hold."""
    return min(facts.max_model_len, facts.pages_total * facts.block_size)


def check_text_length(prompt: Prompt, longest_token: int, context: int) -> None:
    """Refuse a text that cannot fit however well it is cut into tokens, before time is spent on cutting it.

    `longest_token` in characters. Raises InvalidRequest.
    """
    if isinstance(prompt, list):
        return
    length = len(prompt) if isinstance(prompt, str) else sum(len(message.content) for message in prompt)
    if length > longest_token * context:
        why = f"your prompt has {length} characters and no token has more than {longest_token}. Please shorten it."
        raise _too_long(prompt, context, why)


def settle_max_tokens(ask: Ask, prompt: Prompt, num_prompt_tokens: int, context: int) -> int:
    """How many tokens a choice may generate after `prompt`.

    Raises InvalidRequest (code context_length_exceeded) where prompt and answer do not fit in `context` tokens.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"'{_param(prompt)}' holds no token; send at least one.", param=_param(prompt))
    left = context - num_prompt_tokens
    if left < 1:
        raise _too_long(prompt, context, f"your prompt has {num_prompt_tokens} tokens. Please shorten it.")
    if ask.max_tokens is not None and ask.max_tokens > left:
        raise _too_long(
            prompt,
            context,
            f"you requested {num_prompt_tokens + ask.max_tokens} tokens ({num_prompt_tokens} in the prompt, "
            f"{ask.max_tokens} for the completion). Please shorten the prompt or lower 'max_tokens'.",
        )
    default = left if isinstance(prompt, tuple) else min(DEFAULT_MAX_TOKENS, left)
    max_tokens = ask.max_tokens or default
    if ask.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' is {ask.sampling.min_tokens}, more than the {max_tokens} tokens that may be generated; "
            "lower it or raise 'max_tokens'.",
            param="min_tokens",
        )
    return max_tokens


def check_token_ids(ask: Ask, prompts: list[list[int]], vocab_size: int) -> None:
    """Raise InvalidRequest for a token id that the model does not have, with the field it came in."""
    for token_ids in prompts:
        _check("prompt", token_ids, vocab_size)
    _check("stop_token_ids", ask.sampling.stop_token_ids, vocab_size)
    _check("logit_bias", ask.sampling.logit_bias, vocab_size)


def _check(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"'{param}' names token {token_id}, and this model has the tokens 0 to {vocab_size - 1}.", param=param
            )


def _too_long(prompt: Prompt, context: int, why: str) -> InvalidRequest:
    told = f"This model's maximum context length is {context} tokens. However, {why}"
    return InvalidRequest(told, param=_param(prompt), code=TOO_LONG)


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, tuple) else "prompt"
