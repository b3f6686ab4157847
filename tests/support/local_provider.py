"""An OIDC provider that signs people in: an issuer with the pages and the endpoint of the authorization code flow.

It checks what providers check (client, redirect URI, PKCE, codes that count once), and can be told to misbehave.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from local_issuer import Issuer

CLIENT, SECRET = "console", "s3cret & more"


class Provider(Issuer):
    """Signs in `person` without asking."""

    def __init__(self) -> None:
        super().__init__()
        self.person: dict[str, Any] = {"sub": "alice"}
        self.wrong: dict[str, Any] = {}
        """Claims of ID tokens that are not as they should be."""
        self.wrong_answer: dict[str, str] = {}
        """Parameters of the redirect that are not as they should be."""
        self.codes: dict[str, dict[str, str]] = {}
        self.tokens_given = 0

    def answer(self, path: str) -> Any:
        if path.startswith("/.well-known"):
            urls = {"authorization_endpoint": f"{self.url}/authorize?tenant=x", "token_endpoint": f"{self.url}/token"}
            return super().answer(path) | urls
        return super().answer(path)

    def authorize(self, query: dict[str, str]) -> str:
        """Return the address to which the browser goes next."""
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(8)
        self.codes[code] = query
        answer = {"code": code, "state": query["state"], "iss": self.url} | self.wrong_answer
        return f"{query['redirect_uri']}?{urlencode(answer)}"

    def redeem(self, form: dict[str, str], authorization: str) -> dict[str, Any] | None:
        """Return a token for a code, or None."""
        query = self.codes.pop(form.get("code", ""), None)
        pair = base64.b64encode(f"{CLIENT}:s3cret%20%26%20more".encode()).decode()
        if query is None or authorization != f"Basic {pair}" or form["redirect_uri"] != query["redirect_uri"]:
            return None
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != query["code_challenge"]:
            return None
        self.tokens_given += 1
        claims = {"aud": CLIENT, "nonce": query["nonce"]} | self.person | self.wrong
        return {"access_token": "not-used", "token_type": "Bearer", "id_token": self.token(**claims)}

    def _handler(provider) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(super()._handler()):  # type: ignore[misc]
            def do_GET(self) -> None:  # noqa: N802
                split = urlsplit(self.path)
                if split.path != "/authorize":
                    super().do_GET()
                    return
                query = {name: values[0] for name, values in parse_qs(split.query).items()}
                self.send_response(303)
                self.send_header("Location", provider.authorize(query))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:  # noqa: N802
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: values[0] for name, values in parse_qs(body).items()}
                found = provider.redeem(form, self.headers.get("Authorization", ""))
                answer = json.dumps(found or {"error": "invalid_grant"}).encode()
                self.send_response(503 if not provider.up else 200 if found else 400)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        return Handler
