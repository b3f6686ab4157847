"""A typed client of a loramux server: adapters from upload to deletion, files, batches, evaluations, webhooks, usage.

For chat and completions, use OpenAI's own client with `base_url=".../v1"`. Each call is written once, as a flow of
steps (`loramux_client.flow`); `Client` and `AsyncClient` perform the same flows.
"""

from loramux_client.client import AsyncClient, Client
from loramux_client.errors import (
    ApiError,
    ClientError,
    Conflict,
    ConnectionFailed,
    FilesMissing,
    InvalidRequest,
    LimitReached,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    ServerFailed,
    UnexpectedResponse,
    UploadRejected,
    UploadUnfinished,
)
from loramux_client.flow import RetryPolicy
from loramux_client.uploads import Bucket, Hub, Progress

__all__ = [
    "ApiError",
    "AsyncClient",
    "Bucket",
    "Client",
    "ClientError",
    "Conflict",
    "ConnectionFailed",
    "FilesMissing",
    "Hub",
    "InvalidRequest",
    "LimitReached",
    "NotAuthenticated",
    "NotFound",
    "NotPermitted",
    "Progress",
    "RetryPolicy",
    "ServerFailed",
    "UnexpectedResponse",
    "UploadRejected",
    "UploadUnfinished",
]
