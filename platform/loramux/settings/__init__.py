"""Every setting, read once from one TOML file, checked, and frozen."""

from loramux.settings.adapters import AdapterLimits, BucketSettings, HubSettings, UploadSettings, ValidationSettings
from loramux.settings.batches import BatchSettings
from loramux.settings.file import Settings, SettingsError, ensure_files, load_settings, resolve_paths
from loramux.settings.privacy import PrivacySettings
from loramux.settings.server import (
    BillingSettings,
    ConsoleSettings,
    IssuerSettings,
    RecordsSettings,
    ServerSettings,
    SignInSettings,
    SinkSettings,
    TracingSettings,
    WebhookSettings,
)
from loramux.settings.serving import (
    BaseSettings,
    ClassDeadlines,
    ClassShares,
    EngineRange,
    EngineSettings,
    FleetSettings,
    ModelSettings,
    RaySettings,
    ReservedPages,
    SchedulerSettings,
    ToolParser,
)

__all__ = [
    "AdapterLimits",
    "BaseSettings",
    "BatchSettings",
    "BillingSettings",
    "BucketSettings",
    "ClassDeadlines",
    "ClassShares",
    "ConsoleSettings",
    "EngineRange",
    "EngineSettings",
    "FleetSettings",
    "HubSettings",
    "IssuerSettings",
    "ModelSettings",
    "PrivacySettings",
    "RaySettings",
    "RecordsSettings",
    "ReservedPages",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "SignInSettings",
    "SinkSettings",
    "ToolParser",
    "TracingSettings",
    "UploadSettings",
    "ValidationSettings",
    "WebhookSettings",
    "ensure_files",
    "load_settings",
    "resolve_paths",
]
