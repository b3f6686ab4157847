"""Flows of /v1/webhooks."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from loramux_client.flow import Call, Flow, R, Resource, method
from loramux_client.objects import Deleted, Delivery, Listing, Webhook, WebhookTest


def create(url: str, events: Sequence[str] | None = None) -> Call[Webhook]:
    """Create a webhook for events of your adapters. Only this answer has its `secret`."""
    return Call(method="POST", path="/v1/webhooks", answer=Webhook, body={"url": url, "events": events})


def list_webhooks() -> Flow[list[Webhook]]:
    """Return your webhooks, oldest first."""
    return (yield from Call(method="GET", path="/v1/webhooks", answer=Listing[Webhook], repeatable=True)).data


def enable(webhook_id: str, enabled: bool = True) -> Call[Webhook]:
    """Resume or stop its deliveries."""
    return Call(method="PATCH", path=_path(webhook_id), answer=Webhook, body={"enabled": enabled}, repeatable=True)


def delete(webhook_id: str) -> Call[Deleted]:
    """Delete it."""
    return Call(method="DELETE", path=_path(webhook_id), answer=Deleted)


def test(webhook_id: str) -> Call[WebhookTest]:
    """Send a signed `webhook.test` event now."""
    return Call(method="POST", path=f"{_path(webhook_id)}/test", answer=WebhookTest, repeatable=True)


def deliveries(webhook_id: str, *, limit: int = 100) -> Flow[list[Delivery]]:
    """Return its latest deliveries, newest first."""
    path = f"{_path(webhook_id)}/deliveries"
    call = Call(method="GET", path=path, answer=Listing[Delivery], params={"limit": limit}, repeatable=True)
    return (yield from call).data


class Webhooks(Resource[R]):
    """`client.webhooks`."""

    create = method(create)
    list = method(list_webhooks)
    enable = method(enable)
    delete = method(delete)
    test = method(test)
    deliveries = method(deliveries)


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
