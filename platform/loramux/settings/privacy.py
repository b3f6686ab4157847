"""How long the server keeps what requests say and what models answer."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class PrivacySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompts and answers at rest. docs/privacy.md says what is stored where."""

    idempotency_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 86_400
    """Seconds for which answers to requests with an Idempotency-Key are kept, encrypted; 0 refuses such requests."""
    file_seconds: Annotated[int, Meta(ge=3600)] = 30 * 86_400
    """Seconds after which a file is deleted, inputs and outputs of batches alike."""
