"""Encryption of stored texts under keys that are derived from the pepper, which no database holds."""

from __future__ import annotations

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12


class Encryption:
    """AES-256-GCM under the key of one purpose. Data that is encrypted for one owner cannot be decrypted for another
    owner.
    """

    def __init__(self, pepper: bytes, purpose: bytes) -> None:
        self._cipher = AESGCM(hmac.digest(pepper, purpose, "sha256"))

    def encrypt(self, plain: bytes, owner: str) -> bytes:
        """Return the stored form of `plain`, which belongs to `owner`, such as a row's id."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, plain, owner.encode())

    def decrypt(self, stored: bytes, owner: str) -> bytes | None:
        """Return the decrypted data; None if it was encrypted with another pepper or for another owner."""
        try:
            return self._cipher.decrypt(stored[:NONCE_BYTES], stored[NONCE_BYTES:], owner.encode())
        except InvalidTag:
            return None
