"""The settings file as a whole: read, checked, its paths made absolute."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import msgspec

from loramux.settings.adapters import AdapterLimits, UploadSettings, ValidationSettings
from loramux.settings.house import (
    BillingSettings,
    IssuerSettings,
    RecordsSettings,
    ServerSettings,
    SinkSettings,
    WebhookSettings,
)
from loramux.settings.serving import EngineSettings, ModelSettings, SchedulerSettings


class SettingsError(ValueError):
    """A setting is missing or out of range; the message names the file, the field and the limit."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    model: ModelSettings
    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    records: RecordsSettings = RecordsSettings()
    adapters: AdapterLimits = AdapterLimits()
    validation: ValidationSettings = ValidationSettings()
    uploads: UploadSettings = UploadSettings()
    issuers: tuple[IssuerSettings, ...] = ()
    """People's; keys need none."""
    sinks: tuple[SinkSettings, ...] = ()
    billing: BillingSettings = BillingSettings()
    webhooks: WebhookSettings = WebhookSettings()


def load_settings(path: Path) -> Settings:
    """Read and check a settings file; relative paths in it come back absolute.

    Raises SettingsError naming the file and the field.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"settings file {path} does not exist; start from one in configs/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    try:
        settings = msgspec.convert(data, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {error}") from None
    return resolve_paths(settings, path.resolve().parent)


def resolve_paths(settings: Settings, root: Path) -> Settings:
    """The same settings with every relative path made absolute, starting at `root`."""

    def at(value: str) -> str:
        return os.path.normpath(root / Path(value).expanduser())

    url, root_of_adapters = settings.records.url, settings.adapters.local_root
    if url.startswith("sqlite:///"):
        url = "sqlite:///" + at(url.removeprefix("sqlite:///"))
    font = settings.billing.font
    return msgspec.structs.replace(
        settings,
        billing=msgspec.structs.replace(settings.billing, font=font and at(font)),
        uploads=msgspec.structs.replace(
            settings.uploads,
            hubs=tuple(
                msgspec.structs.replace(hub, token_file=hub.token_file and at(hub.token_file))
                for hub in settings.uploads.hubs
            ),
        ),
        sinks=tuple(msgspec.structs.replace(sink, secret_file=at(sink.secret_file)) for sink in settings.sinks),
        adapters=msgspec.structs.replace(settings.adapters, local_root=root_of_adapters and at(root_of_adapters)),
        model=msgspec.structs.replace(settings.model, path=at(settings.model.path)),
        records=msgspec.structs.replace(
            settings.records,
            url=url,
            blobs=settings.records.blobs if "://" in settings.records.blobs else at(settings.records.blobs),
            cache=at(settings.records.cache),
            pepper_file=at(settings.records.pepper_file),
        ),
    )
