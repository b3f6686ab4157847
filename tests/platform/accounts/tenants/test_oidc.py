"""People's tokens, against a real issuer: an HTTP server with discovery, keys that rotate, and outages."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey
from local_issuer import Issuer

from loramux.accounts.tenants.authentication import Credential
from loramux.accounts.tenants.errors import InvalidKey
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.settings.server import IssuerSettings
from loramux.data.records.database import Database

pytestmark = pytest.mark.anyio

PEPPER = b"p" * 32


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


@pytest.fixture
async def tenants(database: Database, issuer: Issuer) -> AsyncIterator[Tenants]:
    tenants = Tenants(database, PEPPER, [IssuerSettings(issuer=issuer.url, audience="loramux")])
    await tenants.create("acme")
    await (await tenants.account("acme")).members.add(issuer.url, "alice", "developer")
    yield tenants
    await tenants.aclose()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.accounts.tenants.authentication.RETRY_SECONDS", 0.0)


async def test_member_authenticates_with_a_token(tenants: Tenants, issuer: Issuer) -> None:
    principal = await tenants.authenticator.authenticate(issuer.token())
    assert (principal.tenant_name, principal.role) == ("acme", "developer")
    assert principal.scopes == {"inference", "adapters", "usage", "keys", "webhooks", "read"}
    for _ in range(5):
        await tenants.authenticator.authenticate(issuer.token())
    assert issuer.questions == ["/.well-known/openid-configuration", "/jwks"]


async def test_role_change_applies_from_the_next_request(tenants: Tenants, issuer: Issuer) -> None:
    members = (await tenants.account("acme")).members
    (alice,) = await members.all()
    await members.change_role(alice.id, "viewer")
    assert (await tenants.authenticator.authenticate(issuer.token())).scopes == {"usage", "read"}
    await members.add(issuer.url, "bob", "owner")
    await members.remove(alice.id)
    with pytest.raises(InvalidKey, match="no member"):
        await tenants.authenticator.authenticate(issuer.token())


def refusals(issuer: Issuer) -> dict[str, str]:
    now = int(time.time())
    stranger = RSAKey.generate_key(2048, {"kid": "one"})
    parts = issuer.token().split(".")
    forged = base64.urlsafe_b64encode(json.dumps({"iss": issuer.url, "sub": "owner"}).encode()).decode().rstrip("=")
    nested = base64.urlsafe_b64encode(b'{"alg":' + b"[" * 4_000 + b"]" * 4_000 + b"}").decode().rstrip("=")
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    return {
        "expired": issuer.token(exp=now - 120),
        "never ends": issuer.token(exp=None),
        "not yet": issuer.token(nbf=now + 600),
        "from the future": issuer.token(iat=now + 600),
        "another audience": issuer.token(aud="other"),
        "no audience": issuer.token(aud=None),
        "another issuer": issuer.token(iss="https://id.example"),
        "a stranger's key": issuer.token(key=stranger),
        "a secret instead of a key": issuer.token(
            key=OctKey.import_key("s" * 32), header={"alg": "HS256", "kid": "one"}
        ),
        "an algorithm not allowed": issuer.token(
            key=ECKey.generate_key("P-384"), header={"alg": "ES384", "kid": "one"}
        ),
        "no signature": f"{none}.{parts[1]}.",
        "another's claims": f"{parts[0]}.{forged}.{parts[2]}",
        "nobody we know": issuer.token(sub="mallory"),
        "nobody at all": issuer.token(sub=None),
        "no token": "a.b.c",
        "dots": "..",
        "a number for an issuer": issuer.token(iss=7),
        "a deeply nested header": f"{nested}.{parts[1]}.{parts[2]}",
    }


async def test_invalid_tokens_are_refused(tenants: Tenants, issuer: Issuer) -> None:
    for what, token in refusals(issuer).items():
        with pytest.raises(InvalidKey):
            pytest.fail(f"{what}: {await tenants.authenticator.authenticate(token)}")


async def test_unknown_issuer_key_is_fetched_once_per_interval(tenants: Tenants, issuer: Issuer) -> None:
    await tenants.authenticator.authenticate(issuer.token())
    issuer.keys.append(RSAKey.generate_key(2048, {"kid": "two"}))
    with pytest.raises(InvalidKey):
        await tenants.authenticator.authenticate(issuer.token())
    assert len(issuer.questions) == 2


async def test_new_issuer_key_is_found(tenants: Tenants, issuer: Issuer, impatient: None) -> None:
    await tenants.authenticator.authenticate(issuer.token())
    issuer.keys.append(RSAKey.generate_key(2048, {"kid": "two"}))
    await tenants.authenticator.authenticate(issuer.token())
    assert len(issuer.questions) == 4


async def test_issuer_outage_is_survived_with_cached_keys(tenants: Tenants, issuer: Issuer, impatient: None) -> None:
    issuer.up = False
    with pytest.raises(InvalidKey, match="cannot be checked now"):
        await tenants.authenticator.authenticate(issuer.token())
    issuer.up = True
    await tenants.authenticator.authenticate(issuer.token())
    issuer.up = False
    await tenants.authenticator.authenticate(issuer.token())


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/.well-known/openid-configuration", {"issuer": "https://other.example", "jwks_uri": "http://x/"}),
        ("/.well-known/openid-configuration", []),
        ("/jwks", {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "one"}]}),
        ("/jwks", {"keys": "none"}),
        ("/jwks", {"padding": "x" * 300_000}),
        ("/jwks", {"keys": [{"kty": "RSA", "kid": str(n)} for n in range(65)]}),
    ],
)
async def test_malformed_discovery_documents_are_refused(
    tenants: Tenants, issuer: Issuer, path: str, document: Any
) -> None:
    issuer.documents[path] = document
    with pytest.raises(InvalidKey, match="cannot be checked now"):
        await tenants.authenticator.authenticate(issuer.token())


async def test_member_of_two_tenants_must_name_one(tenants: Tenants, issuer: Issuer) -> None:
    await tenants.create("globex")
    globex = await tenants.account("globex")
    await globex.members.add(issuer.url, "alice", "viewer")
    web = await globex.projects.create("web")
    with pytest.raises(InvalidKey, match=r"acme, globex.*OpenAI-Organization"):
        await tenants.authenticator.authenticate(issuer.token())
    chosen = Credential(secret=issuer.token(), organization="globex", project="web")
    principal = await tenants.authenticator.authenticate(chosen)
    assert (principal.tenant_name, principal.project, principal.role) == ("globex", web.id, "viewer")
    await globex.projects.archive("web")
    with pytest.raises(InvalidKey, match="no such project"):
        await tenants.authenticator.authenticate(chosen)


async def test_email_identity_must_be_verified(database: Database, issuer: Issuer) -> None:
    settings = IssuerSettings(issuer=issuer.url, audience="loramux", identity_claim="email")
    tenants = Tenants(database, PEPPER, [settings])
    await tenants.create("acme")
    await (await tenants.account("acme")).members.add(issuer.url, "a@acme.example", "viewer")
    await tenants.authenticator.authenticate(issuer.token(email="a@acme.example", email_verified=True))
    for unsure in (None, False, "true"):
        with pytest.raises(InvalidKey, match="not verified"):
            await tenants.authenticator.authenticate(issuer.token(email="a@acme.example", email_verified=unsure))
    await tenants.aclose()
