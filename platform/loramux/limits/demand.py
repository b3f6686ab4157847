"""A request that wants to begin, as limits see it."""

from __future__ import annotations

import msgspec

from loramux.records import TenantId


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and the most that the request can come to, in whole tokens."""

    request_id: str
    tenant: TenantId
    tier: str
    project: str | None
    key: str
    prompt_tokens: int
    max_tokens: int
    waiting: int = 0
    """How many requests of the tenant wait on this server already."""

    @property
    def subjects(self) -> dict[str, str]:
        """Whose limits it meets, each with its word for people."""
        project = {} if self.project is None else {str(self.project): "project"}
        return {str(self.tenant): "organization"} | project | {self.key: "key"}

    @property
    def tokens(self) -> int:
        """The most that it can use."""
        return self.prompt_tokens + self.max_tokens
