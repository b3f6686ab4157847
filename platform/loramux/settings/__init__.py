"""Every setting, read once from one TOML file, checked, and frozen."""

from loramux.settings.adapters import AdapterLimits, BucketSettings, HubSettings, UploadSettings, ValidationSettings
from loramux.settings.file import Settings, SettingsError, load_settings, resolve_paths
from loramux.settings.house import (
    BillingSettings,
    IssuerSettings,
    RecordsSettings,
    ServerSettings,
    SinkSettings,
    WebhookSettings,
)
from loramux.settings.serving import (
    ClassDeadlines,
    ClassShares,
    EngineSettings,
    ModelSettings,
    ReservedPages,
    SchedulerSettings,
)

__all__ = [
    "AdapterLimits",
    "BillingSettings",
    "BucketSettings",
    "ClassDeadlines",
    "ClassShares",
    "EngineSettings",
    "HubSettings",
    "IssuerSettings",
    "ModelSettings",
    "RecordsSettings",
    "ReservedPages",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "SinkSettings",
    "UploadSettings",
    "ValidationSettings",
    "WebhookSettings",
    "load_settings",
    "resolve_paths",
]
