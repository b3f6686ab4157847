"""The rooms of uploading, put together."""

from __future__ import annotations

from loramux.records import Database
from loramux.registry import Registry
from loramux.settings import Settings
from loramux.storage import BlobStore
from loramux.tenants import Tenants
from loramux.uploads.importing import Importer
from loramux.uploads.reception import Reception
from loramux.uploads.sessions import Sessions, most_bytes
from loramux.uploads.workshop import Workshop


class Uploads:
    """Sessions are opened and completed, their bytes received, and what is complete is worked on."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        registry: Registry,
        tenants: Tenants,
        settings: Settings,
        server_id: str,
    ) -> None:
        """`server_id` is known to be alive for as long as the process is (`records.locks.alive`)."""
        intake = registry.intake
        importer = Importer(settings.uploads, most_bytes(settings.adapters))
        self.workshop = Workshop(database, blobs, intake, importer, tenants, server_id)
        self.sessions = Sessions(database, blobs, intake, self.workshop, settings.uploads, settings.adapters)
        self.reception = Reception(database, blobs, settings.uploads)
