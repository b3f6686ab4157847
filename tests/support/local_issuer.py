"""An OIDC issuer on a port of this machine: it signs, and answers for its keys."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey


class Issuer:
    """Signs, and answers for its keys."""

    def __init__(self) -> None:
        self.keys = [RSAKey.generate_key(2048, {"kid": "one", "use": "sig", "alg": "RS256"})]
        self.questions: list[str] = []
        self.documents: dict[str, Any] = {}
        self.up = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> Any:
        if path in self.documents:
            return self.documents[path]
        if path == "/jwks":
            return KeySet([*self.keys]).as_dict(private=False)
        return {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"}

    def token(self, key: Any = None, header: dict[str, str] | None = None, **claims: Any) -> str:
        now = int(time.time())
        said = {"iss": self.url, "aud": "loramux", "sub": "alice", "iat": now, "exp": now + 300} | claims
        said = {name: value for name, value in said.items() if value is not None}
        key = key or self.keys[-1]
        header = header or {"alg": "RS256", "kid": key.kid}
        return jwt.encode(header, said, key, algorithms=["RS256", "ES256", "HS256", "ES384"])

    def _handler(issuer) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.questions.append(self.path)
                body = json.dumps(issuer.answer(self.path)).encode()
                self.send_response(200 if issuer.up else 503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
