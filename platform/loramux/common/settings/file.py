"""Read the settings file: check it, accept renamed settings, make paths absolute."""

from __future__ import annotations

import logging
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from loramux.common.settings.mistakes import describe_mistake
from loramux.common.settings.server import (
    BatchSettings,
    BillingSettings,
    ConsoleSettings,
    IssuerSettings,
    LogSettings,
    PrivacySettings,
    RecordsSettings,
    ServerSettings,
    SinkSettings,
    TracingSettings,
    TrainingSettings,
    WebhookSettings,
)
from loramux.common.settings.serving import (
    AdapterLimits,
    BaseSettings,
    EngineSettings,
    FleetSettings,
    ImageSettings,
    ModelSettings,
    PushSettings,
    SchedulerSettings,
    UploadSettings,
    ValidationSettings,
)

logger = logging.getLogger(__name__)

RENAMED_SETTINGS: dict[str, str] = {
    "records.idempotency_seconds": "privacy.idempotency_seconds",
    "scheduler.tau": "scheduler.max_service_lead",
    "scheduler.quantum": "scheduler.affinity_window",
    "scheduler.overhead_target": "scheduler.adapter_overhead_target",
}
"""Old name -> new name, as `section.field`. The old name is accepted with a warning during one release."""

FONT_MAGIC = (b"\0\1\0\0", b"true", b"OTTO", b"ttcf")
"""The beginnings of font files."""


class SettingsError(ValueError):
    """A setting is missing or out of range; the message names the file, the field and the limit."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    model: ModelSettings
    """The base of `[model]`; in a file with `[[bases]]`, the first of them."""
    bases: tuple[BaseSettings, ...] = ()
    server: ServerSettings = ServerSettings()
    console: ConsoleSettings = ConsoleSettings()
    logging: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    engine: EngineSettings = EngineSettings()
    fleet: FleetSettings = FleetSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    images: ImageSettings = ImageSettings()
    records: RecordsSettings = RecordsSettings()
    adapters: AdapterLimits = AdapterLimits()
    validation: ValidationSettings = ValidationSettings()
    uploads: UploadSettings = UploadSettings()
    pushes: PushSettings = PushSettings()
    batches: BatchSettings = BatchSettings()
    training: TrainingSettings = TrainingSettings()
    privacy: PrivacySettings = PrivacySettings()
    issuers: tuple[IssuerSettings, ...] = ()
    """Issuers with which people sign in. API keys need no issuer."""
    sinks: tuple[SinkSettings, ...] = ()
    billing: BillingSettings = BillingSettings()
    webhooks: WebhookSettings = WebhookSettings()

    @property
    def served_bases(self) -> tuple[BaseSettings, ...]:
        """The served bases: the bases of `[[bases]]`, or the base of `[model]` with one engine."""
        model = self.model
        return self.bases or (
            BaseSettings(
                name=model.served_model_name,
                path=model.path,
                dtype=model.dtype,
                quantization=model.quantization,
                generation_config=model.generation_config,
                tool_parser=model.tool_parser,
                json_white_space=model.json_white_space,
                engine=self.engine,
            ),
        )

    def of_base(self, base: BaseSettings) -> Settings:
        """Return the settings of a process that serves only `base`."""
        return msgspec.structs.replace(self, model=base.model, engine=base.engine, bases=())

    def __post_init__(self) -> None:
        for place, names in (
            ("sinks", [sink.name for sink in self.sinks]),
            ("uploads.hubs", [hub.name for hub in self.uploads.hubs]),
            ("issuers", [issuer.issuer for issuer in self.issuers]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{place}: {twice[0]!r} is there twice; give each a name of its own")
        if self.console.url is None and any(issuer.sign_in is not None for issuer in self.issuers):
            raise ValueError("console.url is missing: sign-in at an issuer returns to this address of the server")


def ensure_files(settings: Settings) -> None:
    """Raise SettingsError unless all files and folders exist that a server needs later."""
    for issuer in settings.issuers:
        if issuer.sign_in is not None and issuer.sign_in.secret_file is not None:
            _ensure_readable(f"issuers.{issuer.issuer}.sign_in.secret_file", Path(issuer.sign_in.secret_file))
    for hub in settings.uploads.hubs:
        if hub.token_file is not None:
            _ensure_readable(f"uploads.hubs.{hub.name}.token_file", Path(hub.token_file))
    font = settings.billing.font
    if font is not None and _ensure_readable("billing.font", Path(font)) not in FONT_MAGIC:
        raise SettingsError(f"billing.font: {font} is no TrueType or OpenType font")
    for name, root in (("adapters.local_root", settings.adapters.local_root), ("pushes.root", settings.pushes.root)):
        if root is not None and not Path(root).is_dir():
            raise SettingsError(f"{name}: {root} is no folder; create it, or leave the setting out")


def _ensure_readable(setting: str, path: Path) -> bytes:
    """Return the first four bytes of a file. Raises SettingsError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror}") from None


def load_settings(path: Path) -> Settings:
    """Read and check a settings file; relative paths in it are returned as absolute paths.

    Raises SettingsError, which names the file and the field.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"settings file {path} does not exist; `loramux init` writes one") from None
    except OSError as error:
        raise SettingsError(f"settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    _accept_old_spellings(data, path)
    _complete_bases(data, path)
    try:
        settings = msgspec.convert(data, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {describe_mistake(str(error), data, Settings)}") from None
    _check_names(settings, path)
    return resolve_paths(settings, path.resolve().parent)


def _complete_bases(data: dict[str, Any], path: Path) -> None:
    """Complete the settings in place: each base gets the settings of `[engine]` that it leaves out, and `model` is the
    first base.
    """
    bases = data.get("bases")
    if not isinstance(bases, list) or not all(isinstance(base, dict) for base in bases) or not bases:
        return  # the conversion reports this error
    if "model" in data:
        raise SettingsError(f"{path}: [model] is the short form of one [[bases]], and both are set; remove [model]")
    for base in bases:
        if isinstance(common := data.get("engine", {}), dict) and isinstance(own := base.get("engine", {}), dict):
            base["engine"] = common | own
    first = {"served_model_name" if key == "name" else key: value for key, value in bases[0].items()}
    data["model"] = {key: value for key, value in first.items() if key in ModelSettings.__struct_fields__}


def _check_names(settings: Settings, path: Path) -> None:
    """Raise SettingsError if a name means two bases."""
    names = Counter(name for base in settings.bases for name in {base.name, *base.former_names})
    for name, count in names.items():
        if count > 1:
            raise SettingsError(f"{path}: bases: {name!r} is the name, or a former name, of {count} bases; rename one")


def _accept_old_spellings(data: dict[str, Any], path: Path) -> None:
    """Move each value with an old name to the new name, in place, and log it. Raises SettingsError if both are set."""
    for old, new in RENAMED_SETTINGS.items():
        *sections, field = old.split(".")
        table = _table(data, sections)
        if table is None or field not in table:
            continue
        *new_sections, new_field = new.split(".")
        target = _table(data, new_sections, create=True)
        if target is None:
            continue  # a section that is not a table: the conversion reports this error
        if new_field in target:
            raise SettingsError(f"{path}: {old} is the old spelling of {new}, and both are set; remove {old}")
        target[new_field] = table.pop(field)
        logger.warning("%s: the setting %s is now called %s; the next release refuses the old spelling", path, old, new)


def _table(data: dict[str, Any], sections: list[str], *, create: bool = False) -> dict[str, Any] | None:
    table: Any = data
    for section in sections:
        table = table.setdefault(section, {}) if create else table.get(section)
        if not isinstance(table, dict):
            return None
    return table


def resolve_paths(settings: Settings, root: Path) -> Settings:
    """Return the settings with absolute paths; relative paths start at `root`."""

    def at(value: str) -> str:
        return os.path.normpath(root / Path(value).expanduser())

    url, root_of_adapters = settings.records.url, settings.adapters.local_root
    if url.startswith("sqlite:///"):
        url = "sqlite:///" + at(url.removeprefix("sqlite:///"))
    font, server = settings.billing.font, settings.server
    return msgspec.structs.replace(
        settings,
        server=msgspec.structs.replace(
            server,
            tls_certificate=server.tls_certificate and at(server.tls_certificate),
            tls_key=server.tls_key and at(server.tls_key),
        ),
        fleet=msgspec.structs.replace(settings.fleet, keys=at(settings.fleet.keys)),
        billing=msgspec.structs.replace(settings.billing, font=font and at(font)),
        uploads=msgspec.structs.replace(
            settings.uploads,
            hubs=tuple(
                msgspec.structs.replace(hub, token_file=hub.token_file and at(hub.token_file))
                for hub in settings.uploads.hubs
            ),
        ),
        issuers=tuple(_issuer_at(issuer, at) for issuer in settings.issuers),
        sinks=tuple(msgspec.structs.replace(sink, secret_file=at(sink.secret_file)) for sink in settings.sinks),
        adapters=msgspec.structs.replace(settings.adapters, local_root=root_of_adapters and at(root_of_adapters)),
        pushes=msgspec.structs.replace(settings.pushes, root=settings.pushes.root and at(settings.pushes.root)),
        model=msgspec.structs.replace(settings.model, path=at(settings.model.path)),
        bases=tuple(msgspec.structs.replace(base, path=at(base.path)) for base in settings.bases),
        records=msgspec.structs.replace(
            settings.records,
            url=url,
            blobs=settings.records.blobs if "://" in settings.records.blobs else at(settings.records.blobs),
            cache=at(settings.records.cache),
            pepper_file=at(settings.records.pepper_file),
        ),
    )


def _issuer_at(issuer: IssuerSettings, at: Callable[[str], str]) -> IssuerSettings:
    client = issuer.sign_in
    if client is None or client.secret_file is None:
        return issuer
    return msgspec.structs.replace(issuer, sign_in=msgspec.structs.replace(client, secret_file=at(client.secret_file)))
