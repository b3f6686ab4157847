"""/v1/webhooks, as flows."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from loramux.client.answers import Delivery, Gone, Listing, Webhook, WebhookTest
from loramux.client.flow import Call, Flow
from loramux.client.running import R, Resource, method


def create(url: str, events: Sequence[str] | None = None) -> Call[Webhook]:
    """Have an address told what happens to your adapters; its `secret` is in this answer only."""
    return Call(method="POST", path="/v1/webhooks", answer=Webhook, body={"url": url, "events": events})


def all_webhooks() -> Flow[list[Webhook]]:
    """Your webhooks, oldest first."""
    return (yield from Call(method="GET", path="/v1/webhooks", answer=Listing[Webhook], repeatable=True)).data


def enable(webhook_id: str, enabled: bool = True) -> Call[Webhook]:
    """Tell it again, or nothing more."""
    return Call(method="PATCH", path=_path(webhook_id), answer=Webhook, body={"enabled": enabled}, repeatable=True)


def delete(webhook_id: str) -> Call[Gone]:
    """Forget it."""
    return Call(method="DELETE", path=_path(webhook_id), answer=Gone)


def test(webhook_id: str) -> Call[WebhookTest]:
    """Send it a signed `webhook.test` now."""
    return Call(method="POST", path=f"{_path(webhook_id)}/test", answer=WebhookTest, repeatable=True)


def deliveries(webhook_id: str, *, limit: int = 100) -> Flow[list[Delivery]]:
    """What it was told last, newest first."""
    path = f"{_path(webhook_id)}/deliveries"
    call = Call(method="GET", path=path, answer=Listing[Delivery], params={"limit": limit}, repeatable=True)
    return (yield from call).data


class Webhooks(Resource[R]):
    """`client.webhooks`."""

    create = method(create)
    all = method(all_webhooks)
    enable = method(enable)
    delete = method(delete)
    test = method(test)
    deliveries = method(deliveries)


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
