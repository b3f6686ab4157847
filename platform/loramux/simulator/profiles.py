"""Profiles: devices whose steps, loads and server were measured, as files that `plan` and `simulate` take.

`loramux measure` writes a profile of the machine at hand. Some profiles are shipped; their names say which machine and
model were measured.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loramux.simulator.hardware import Device, Model
from loramux.simulator.scenario import ScenarioError, configs_folder

MAX_PROFILE_BYTES = 1 << 20


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measured device, and what was measured."""

    machine: str
    """Processor or card, and the number of cores."""
    commit: str
    """Commit or release of the server that was measured."""
    date: str
    """Day of the measurement, UTC."""
    model_name: str
    """Name of the measured base."""
    engine: dict[str, str | int | None]
    """Settings of the engine that decide its speed."""
    device: Device

    @property
    def model(self) -> Model:
        """The measured base."""
        assert self.device.measured is not None, "read_profile has checked it"
        return self.device.measured.model

    @property
    def source(self) -> str:
        """Machine, base, commit and day in one phrase."""
        return f"measured on {self.machine} with {self.model_name}, commit {self.commit}, {self.date}"


def profiles_folder() -> Path:
    """Return the folder with the shipped profiles."""
    return configs_folder() / "profiles"


def profile_names() -> list[str]:
    """Return the names of the profiles that are shipped."""
    return sorted(path.stem for path in profiles_folder().glob("*.json"))


def read_profile(name_or_path: str) -> Profile:
    """Return a shipped profile by its name, or the profile of a file. Raises ScenarioError."""
    shipped = profiles_folder() / f"{name_or_path}.json"
    path = shipped if name_or_path in profile_names() else Path(name_or_path)
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise ScenarioError(f"profile {path} has more than {MAX_PROFILE_BYTES} bytes; `loramux measure` writes one")
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        known = ", or ".join(["a file of `loramux measure`", *profile_names()])
        raise ScenarioError(f"no profile {name_or_path!r}: give {known}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ScenarioError(f"profile {path}: {error}") from None
    if profile.device.measured is None:
        raise ScenarioError(f"profile {path}: device.measured is missing; `loramux measure` writes it")
    return profile
