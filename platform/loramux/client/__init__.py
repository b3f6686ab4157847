"""A typed client of a loramux server: adapters from upload to retirement, webhooks and usage.

For chat and completions use OpenAI's own client with `base_url=".../v1"`. What a call does is written once, as a
flow of steps (`loramux.client.flow`); `Client` and `AsyncClient` perform the same flows.
"""

from loramux.client.clients import AsyncClient, Client
from loramux.client.errors import (
    ApiError,
    Conflict,
    ConnectionFailed,
    FilesMissing,
    InvalidRequest,
    LimitReached,
    LoramuxError,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    ServerFailed,
    UploadRejected,
    UploadUnfinished,
    WrongAnswer,
)
from loramux.client.exchange import Patience
from loramux.client.sources import Bucket, Hub
from loramux.client.uploads import Progress

__all__ = [
    "ApiError",
    "AsyncClient",
    "Bucket",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "FilesMissing",
    "Hub",
    "InvalidRequest",
    "LimitReached",
    "LoramuxError",
    "NotAuthenticated",
    "NotFound",
    "NotPermitted",
    "Patience",
    "Progress",
    "ServerFailed",
    "UploadRejected",
    "UploadUnfinished",
    "WrongAnswer",
]
