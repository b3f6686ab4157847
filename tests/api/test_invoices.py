"""A tenant reads its own invoices, as a document, a page or a PDF."""

from datetime import UTC, datetime

import pytest
from site_fixture import Site


@pytest.fixture
def month() -> str:
    return datetime.now(UTC).strftime("%Y-%m")


@pytest.mark.parametrize(
    ("format", "media", "start"),
    [("json", "application/json", b"{"), ("html", "text/html", b"<!doctype"), ("pdf", "application/pdf", b"%PDF-")],
)
def test_invoice_of_the_open_month_is_a_draft(site: Site, month: str, format: str, media: str, start: bytes) -> None:
    with site.http("all-scopes") as http:
        answer = http.get(f"/v1/organization/invoices/{month}", params={"format": format})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(media)
    assert f"INV-{month}-acme.{format}" in answer.headers["content-disposition"]
    assert answer.content.startswith(start)
    if format == "json":
        assert (answer.json()["tenant_name"], answer.json()["status"]) == ("acme", "draft")


@pytest.mark.parametrize("month", ["1999-12", "2026-13", "next"])
def test_invoice_of_an_unknown_month_is_not_found(site: Site, month: str) -> None:
    with site.http("all-scopes") as http:
        answer = http.get(f"/v1/organization/invoices/{month}")
    assert answer.status_code == 404
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("invoice_not_found", "month")


def test_invoice_unknown_format_is_refused(site: Site, month: str) -> None:
    with site.http("all-scopes") as http:
        answer = http.get(f"/v1/organization/invoices/{month}", params={"format": "docx"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "format")
