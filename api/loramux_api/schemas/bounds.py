"""Strings, lists and maps of request bodies, each with its maximum: no body's type is without one.

`Name` is for names and ids, `Text` for what a model reads. A text is bounded by the body that holds it; the model's
context bounds its tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from loramux.serving.checks import MAX_TAG_KEY, MAX_TAG_VALUE, MAX_TAGS
from loramux_api.bodies import MAX_BODY_BYTES, MAX_VALUES

MAX_NAME = 512
MAX_KEYS = 1024
MAX_PARTS = 4096
"""Parts of one message's content, and other lists in it."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
"""The name or the id of something that exists or will; nothing has a longer one."""
ModelName = Annotated[str, Meta(max_length=MAX_BODY_BYTES)]
"""The name of a model that is asked; one that is too long is an absent model, 404."""
Path = Annotated[str, Meta(max_length=4096)]
Url = Annotated[str, Meta(max_length=2048)]
Secret = Annotated[str, Meta(max_length=4096)]
Text = Annotated[str, Meta(max_length=MAX_BODY_BYTES)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_VALUES)]
Fields = Annotated[dict[Annotated[str, Meta(max_length=MAX_NAME)], Any], Meta(max_length=MAX_KEYS)]
"""An object whose fields the server does not know: a JSON schema, variables of a template."""
Tags = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_TAG_KEY)], Annotated[str, Meta(max_length=MAX_TAG_VALUE)]],
    Meta(max_length=MAX_TAGS),
]
"""Tags by which a bill can be divided."""
