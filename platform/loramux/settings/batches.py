"""Files and batches, evaluations among them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from loramux.settings.server import Positive

FORM_BYTES = 1 << 20
"""Bytes of a form beside its file."""


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files, and the batches that read and write them."""

    max_file_bytes: Positive = 200 << 20
    """The largest file that a client may send."""
    max_lines: Positive = 50_000
    """The most lines of a batch."""
    bytes_per_tenant: Positive = 20 << 30
    """The most bytes of a tenant's files together; the limit `file_bytes` of a tier or tenant takes precedence."""
    unfinished_per_tenant: Positive = 50
    """The most unfinished batches of a tenant."""
    max_in_flight: Positive = 64
    """The most lines of batches that one server has in the engine at a time."""
    max_in_flight_per_tenant: Positive = 32
    """The most lines of one tenant's batches that one server has in the engine at a time."""
    max_in_flight_beside_others: Positive = 8
    """The most lines of batches that one server has in the engine while other requests run."""
    judge_seconds: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Seconds that a judge of evaluations has for one answer."""
    allow_private_judges: bool = False
    """Let judges have addresses in this network, and http://: only where every tenant is trusted."""

    @property
    def max_body_bytes(self) -> int:
        """The most bytes of a body that brings a file."""
        return self.max_file_bytes + FORM_BYTES
