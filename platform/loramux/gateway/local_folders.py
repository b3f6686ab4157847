"""Adapters from folders of the server's own machine: for operators, below one root that the settings name."""

from __future__ import annotations

from pathlib import Path

from loramux.bundle import SOURCES
from loramux.gateway.adapters import AdapterService
from loramux.gateway.errors import FolderNotFound, InvalidRequest
from loramux.registry import AdapterInfo, AdapterNotFound
from loramux.storage import FILES
from loramux.tenants import NotPermitted, Principal
from loramux.uploads import FolderSource, UploadRequest, UploadSessions


class LocalFolders:
    """Loads and unloads adapters at run time, as vLLM does; each is checked, versioned and stored like an upload."""

    def __init__(self, adapters: AdapterService, uploads: UploadSessions, root: str | None) -> None:
        self._adapters = adapters
        self._uploads = uploads
        self._root = Path(root).resolve() if root else None

    async def load(self, principal: Principal, name: str, path: str, load_inplace: bool) -> AdapterInfo:
        """Point `name` at the adapter in the folder `path`; with `load_inplace`, an existing adapter is replaced.

        Raises InvalidRequest, NotPermitted, and the errors of `UploadSessions.run`.
        """
        folder = self._folder(path)
        if not load_inplace and await self._exists(principal, name):
            raise InvalidRequest(
                f"The lora adapter '{name[:160]}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                field="lora_name",
                code="adapter_already_loaded",
            )
        for file in (*FILES, *(name for name in SOURCES if (folder / name).exists())):
            self._inside(folder / file)
        return await self._uploads.run(principal, UploadRequest(name, None, FolderSource(path=str(folder))))

    async def unload(self, principal: Principal, name: str) -> AdapterInfo:
        """Delete the adapter. Raises NotPermitted, AdapterNotFound."""
        self._check_allowed()
        return await self._adapters.delete(principal, name)

    async def _exists(self, principal: Principal, name: str) -> bool:
        try:
            await self._adapters.queries.get(principal, name)
        except AdapterNotFound:
            return False
        return True

    def _folder(self, path: str) -> Path:
        root = self._check_allowed()
        if not path or "\0" in path:
            raise InvalidRequest("'lora_path' is the path of a folder.", field="lora_path", code="invalid_value")
        folder = self._inside(root / path)
        missing = [file for file in FILES if not (folder / file).is_file()]
        if missing:
            raise FolderNotFound(
                f"No adapter found in '{path[:160]}': it has no {' and no '.join(missing)}. Save it with "
                "model.save_pretrained().",
                "lora_path",
            )
        return folder

    def _inside(self, path: Path) -> Path:
        """Return the real path below the root; a path that leads out of it gets the answer of one that is absent."""
        real, root = path.resolve(), self._check_allowed()
        if not real.is_relative_to(root) or not real.exists():
            raise FolderNotFound(
                "'lora_path' leads to nothing below the folder that the operator has set (adapters.local_root).",
                "lora_path",
            )
        return real

    def _check_allowed(self) -> Path:
        if self._root is None:
            raise NotPermitted(
                "This server loads no adapters from its own folders: set adapters.local_root in its settings, or "
                "upload them with POST /v1/adapters.",
                "lora_path",
            )
        return self._root
