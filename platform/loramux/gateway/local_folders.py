"""Adapters from folders of the server's own machine: for operators, below one root that the settings name."""

from __future__ import annotations

from pathlib import Path

from loramux.gateway.adapters import AdapterService
from loramux.gateway.errors import InvalidRequest
from loramux.registry import AdapterInfo, AdapterNotFound
from loramux.storage import FILES
from loramux.tenants import NotPermitted, Principal


class LocalFolders:
    """Loads and unloads, as vLLM does it at run time; but validated, versioned and stored like an upload."""

    def __init__(self, adapters: AdapterService, root: str | None) -> None:
        self._adapters = adapters
        self._root = Path(root).resolve() if root else None

    async def load(self, principal: Principal, name: str, path: str, load_inplace: bool) -> AdapterInfo:
        """Make the adapter in the folder `path` what `name` means. With `load_inplace`, one that is there may be.

        Raises InvalidRequest, NotPermitted, and what `AdapterService.upload` raises.
        """
        folder = self._folder(path)
        if not load_inplace and await self._exists(principal, name):
            raise InvalidRequest(
                f"The lora adapter '{name[:160]}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                param="lora_name",
                code="adapter_already_loaded",
            )
        config_file, weights_file = (self._inside(folder / file) for file in FILES)
        return await self._adapters.upload(principal, name, config_file, weights_file)

    async def unload(self, principal: Principal, name: str) -> AdapterInfo:
        """Delete the adapter. Raises NotPermitted, AdapterNotFound."""
        self._demand_allowed()
        return await self._adapters.delete(principal, name)

    async def _exists(self, principal: Principal, name: str) -> bool:
        try:
            await self._adapters.reading.get(principal, name)
        except AdapterNotFound:
            return False
        return True

    def _folder(self, path: str) -> Path:
        root = self._demand_allowed()
        if not path or "\0" in path:
            raise InvalidRequest("'lora_path' is the path of a folder.", param="lora_path", code="invalid_value")
        folder = self._inside(root / path)
        missing = [file for file in FILES if not (folder / file).is_file()]
        if missing:
            raise InvalidRequest(
                f"No adapter found in '{path[:160]}': it has no {' and no '.join(missing)}. Save it with "
                "model.save_pretrained().",
                param="lora_path",
                code="adapter_files_missing",
            )
        return folder

    def _inside(self, path: Path) -> Path:
        """Where `path` really leads, below the root; what leads out of it gets the same answer as what is absent."""
        real, root = path.resolve(), self._demand_allowed()
        if not real.is_relative_to(root) or not real.exists():
            raise InvalidRequest(
                "'lora_path' leads to nothing below the folder that the operator has set (adapters.local_root).",
                param="lora_path",
                code="invalid_value",
            )
        return real

    def _demand_allowed(self) -> Path:
        if self._root is None:
            raise NotPermitted(
                "This server loads no adapters from its own folders: set adapters.local_root in its settings, or "
                "upload them with POST /v1/adapters.",
                "lora_path",
            )
        return self._root
