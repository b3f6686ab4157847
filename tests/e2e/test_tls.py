"""TLS and the internal port, by the real command and real connections."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from running_server import free_port
from server_process import Child, Place, served

SECONDS = 30
HANDSHAKE_SECONDS = 10
"""Seconds that the HTTP server gives a handshake."""


@dataclass(frozen=True)
class Authority:
    """A new authority, which makes certificates for 127.0.0.1."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate("authority", key, "authority", key, is_authority=True)
        (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder, key, certificate)

    def write(self, serial: int) -> None:
        """Replace cert.pem and key.pem, the key first."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _certificate("127.0.0.1", key, "authority", self.key, serial=serial)
        for name, content in (
            ("key.pem", key.private_bytes(*_PRIVATE)),
            ("cert.pem", made.public_bytes(serialization.Encoding.PEM)),
        ):
            part = self.folder / f"{name}.new"
            part.write_bytes(content)
            part.rename(self.folder / name)


_AUTHORITY_USAGE = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
_PRIVATE = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    serial: int = 1,
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, issuer)]
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(
        names[1], names[0], key.public_key(), serial, now, now + datetime.timedelta(days=2)
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    if is_authority:  # Python 3.13 wants it said
        builder = builder.add_extension(_AUTHORITY_USAGE, critical=True)
    return builder.add_extension(alternative, critical=False).sign(signer, hashes.SHA256())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority.make(tmp_path_factory.mktemp("tls"))
    made.write(serial=100)
    return made


@dataclass(frozen=True)
class Secured:
    child: Child
    key: str
    url: str
    internal: str
    context: ssl.SSLContext

    def serial(self) -> int:
        """The serial number of the certificate that a new connection gets."""
        host, port = self.url.removeprefix("https://").split(":")
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            self.context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"").serial_number


@pytest.fixture(scope="module")
def secured(base_dir: Path, tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Secured]:
    place = Place(tmp_path_factory.mktemp("secured"), base_dir, in_process=True).prepare()
    internal = free_port()
    lines = f'tls_certificate = "{authority.folder}/cert.pem"\ntls_key = "{authority.folder}/key.pem"\n'
    text = place.config.read_text().replace("[server]\n", f"[server]\ninternal_port = {internal}\n{lines}")
    place.config.write_text(text)
    key = place.key_of("acme")
    with served(place) as child:
        url = child.url.replace("http://", "https://")
        context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
        yield Secured(child, key, url, f"http://127.0.0.1:{internal}", context)


def test_stalled_handshakes_are_ended_and_hinder_no_other_connection(secured: Secured) -> None:
    """A client sends nothing, a part of its hello, its hello byte by byte, or no answer to the server's."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        secured.context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    hello = outgoing.read()
    host, port = secured.url.removeprefix("https://").split(":")
    began = time.monotonic()
    stalled = [socket.create_connection((host, int(port))) for _ in range(200)]
    for number, one in enumerate(stalled):
        one.sendall((b"", hello[:40], hello[:60], hello)[number % 4])
    assert secured.serial() == 100
    for number in range(60, 66):
        time.sleep(1)
        for one in stalled[2::4]:
            one.sendall(hello[number : number + 1])
    assert secured.serial() == 100
    for one in stalled:
        one.settimeout(max(1.0, began + HANDSHAKE_SECONDS + SECONDS - time.monotonic()))
        with suppress(ConnectionResetError):
            while one.recv(1 << 16):
                pass
        one.close()
    assert time.monotonic() - began < HANDSHAKE_SECONDS + SECONDS


def test_request_over_tls_is_answered_and_plain_http_is_not(secured: Secured) -> None:
    headers = {"Authorization": f"Bearer {secured.key}"}
    answer = httpx.post(
        f"{secured.url}/v1/completions",
        headers=headers,
        json={"model": "tiny", "prompt": "a", "max_tokens": 2},
        verify=secured.context,
        timeout=60,
    )
    assert answer.status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(secured.url.replace("https", "http") + "/v1/models", timeout=10)


@pytest.mark.parametrize(("version", "accepted"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
def test_tls_below_1_2_is_refused(secured: Secured, authority: Authority, version: str, accepted: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.folder / "ca.pem")
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = secured.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        if accepted:
            context.wrap_socket(plain, server_hostname=host).close()
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(plain, server_hostname=host)


def test_internal_paths_are_on_their_own_port_only(secured: Secured) -> None:
    for path in ("/metrics", "/health/ready", "/health/live", "/schema/openapi.json"):
        assert httpx.get(secured.internal + path, timeout=30).status_code == 200
        assert httpx.get(secured.url + path, verify=secured.context, timeout=30).status_code == 404
    for path in ("/v1/models", "/admin/tenants", "/metricsx"):
        headers = {"Authorization": f"Bearer {secured.key}"}
        assert httpx.get(secured.internal + path, headers=headers, timeout=30).status_code == 404


@pytest.mark.parametrize("path", ["//metrics", "///health/ready", "/metrics/", "/%6detrics", "//schema/openapi.json"])
def test_internal_paths_in_other_spellings_are_not_on_the_public_port(secured: Secured, path: str) -> None:
    assert httpx.get(secured.url + path, verify=secured.context, timeout=30).status_code == 404


def test_changed_certificate_is_used_for_new_connections_while_a_stream_goes_on(
    secured: Secured, authority: Authority
) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1500, "stream": True, "ignore_eos": True, "min_tokens": 1500}
    headers = {"Authorization": f"Bearer {secured.key}"}
    with (
        httpx.Client(verify=secured.context, headers=headers, timeout=60) as client,
        client.stream("POST", f"{secured.url}/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert secured.serial() == 100
        authority.write(serial=101)
        assert _eventually(lambda: secured.serial() == 101)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    (authority.folder / "cert.pem").write_text("no certificate")
    time.sleep(3)  # longer than the server's look at the files
    assert secured.serial() == 101


def _eventually(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if is_so():
            return True
        time.sleep(0.2)
    return False
