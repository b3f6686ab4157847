"""Hatch's hook for wheels: build the web console, so that its pages are in the wheel.

An editable install does not build the console: `make demo`, `make test` and `make console` build it in a checkout. If a
wheel is built without access to Node.js or npm's registry, it has no console and the build warns; its server says so at
/console.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConsoleHook(BuildHookInterface):
    """Builds the console before the files of a wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatch calls it so
        """Build, unless this is an editable install."""
        if version == "editable":
            return
        build_console = _load(Path(self.root) / "tools" / "build_console.py")
        try:
            build_console.build()
        except build_console.Unbuildable as error:
            self.app.display_warning(f"this wheel has no web console: {error}")


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("build_console", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
