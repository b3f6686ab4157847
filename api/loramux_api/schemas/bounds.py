"""Strings, lists and maps of request bodies. Each type has a maximum length.

`Name` is for names and ids, `Text` for texts that a model reads. The size of the body bounds a text; the model's
context bounds its tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from loramux.serving.checks import MAX_TAG_KEY, MAX_TAG_VALUE, MAX_TAGS
from loramux_api.bodies import MAX_BODY_BYTES, MAX_VALUES

MAX_NAME = 512
MAX_PATH = 4096
MAX_KEYS = 1024
MAX_PARTS = 4096
"""Maximum length of the list of a message's parts, and of other lists in a message."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
"""A name or an id. No existing object has a longer name or id."""
ModelName = Annotated[str, Meta(max_length=MAX_BODY_BYTES)]
"""The name of the requested model. A name that is too long gets the same 404 as an absent model."""
Path = Annotated[str, Meta(max_length=MAX_PATH)]
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
