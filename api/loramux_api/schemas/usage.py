"""Usage in an answer."""

from __future__ import annotations

from loramux.gateway import TokenUsage
from loramux_api.schemas.answers import PromptTokensDetails, UsageObject


def usage_object(usage: TokenUsage) -> UsageObject:
    """What was charged, as clients read it."""
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )
