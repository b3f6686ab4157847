"""What the model's context and vocabulary allow."""

from __future__ import annotations

from loramux.gateway.ask import Ask
from loramux.gateway.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
"""For texts, as OpenAI has it."""


def settle_max_tokens(ask: Ask, num_prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens a choice may generate.

    Raises InvalidRequest (code context_length_exceeded) where prompt and answer do not fit in `max_model_len`.
    """
    is_chat = isinstance(ask.prompts[0], tuple)
    param = "messages" if is_chat else "prompt"
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"'{param}' holds no token; send at least one.", param=param)
    left = max_model_len - num_prompt_tokens
    if left < (ask.max_tokens or 1):
        raise InvalidRequest(_too_long(ask, num_prompt_tokens, max_model_len), param=param, code=TOO_LONG)
    max_tokens = ask.max_tokens or (left if is_chat else min(DEFAULT_MAX_TOKENS, left))
    if ask.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' is {ask.sampling.min_tokens}, more than the {max_tokens} tokens that may be generated; "
            "lower it or raise 'max_tokens'.",
            param="min_tokens",
        )
    return max_tokens


TOO_LONG = "context_length_exceeded"


def _too_long(ask: Ask, num_prompt_tokens: int, max_model_len: int) -> str:
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if ask.max_tokens is None or num_prompt_tokens >= max_model_len:
        return f"{limit} However, your prompt has {num_prompt_tokens} tokens. Please shorten it."
    total = num_prompt_tokens + ask.max_tokens
    return (
        f"{limit} However, you requested {total} tokens ({num_prompt_tokens} in the prompt, {ask.max_tokens} for the "
        "completion). Please shorten the prompt or lower 'max_tokens'."
    )


def check_token_ids(ask: Ask, prompts: list[list[int]], vocab_size: int) -> None:
    """Raise InvalidRequest for a token id that the model does not have, with the field it came in."""
    given = {
        "prompt": (token_id for prompt in prompts for token_id in prompt),
        "stop_token_ids": ask.sampling.stop_token_ids,
        "logit_bias": ask.sampling.logit_bias,
    }
    for param, token_ids in given.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"'{param}' names token {token_id}, and this model has the tokens 0 to {vocab_size - 1}.",
                    param=param,
                )
