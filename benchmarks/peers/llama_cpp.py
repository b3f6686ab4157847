"""llama.cpp's server with the same adapters, each with its scale in the requests that name it.

llama.cpp reads GGUF files. Its own scripts, which are next to its sources, convert the model and the adapters once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen import Target
from peers.serving import Command, Serving, SystemFailed, free_port, running
from progress import bar
from specs import ADAPTERS, MAX_MODEL_LEN, WORK, Setup

FILE_TYPES = {"bfloat16": "bf16", "float32": "f32"}
CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel
from conversion.llama import LlamaModel
LlamaModel.set_vocab = TextModel._set_vocab_gpt2
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
"""
"""Runs the conversion for any byte-level tokenizer. The script refuses tokenizers that it does not know by a hash.
Prompts are token ids, so it is enough that tokens have the right texts.
"""


@dataclass(frozen=True)
class LlamaCpp:
    """A `llama-server` that was built in a folder within its sources."""

    build: Path
    label: str = "llama.cpp"
    serves_adapters: bool = True
    modes: tuple[str, ...] = ("continuous",)

    def counters(self, serving: Serving) -> None:
        """Return no counters, because llama.cpp does not report the contents of its steps."""
        del serving

    @contextmanager
    def serving(self, setup: Setup) -> Iterator[Serving]:
        """The server, ready, with all adapters loaded and none applied unless a request names it."""
        base, *adapters = self._files(setup)
        port = free_port()
        arguments = [str(self.build / "bin" / "llama-server"), "--model", str(base)]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        arguments += ["--threads", str(setup.threads), "--threads-batch", str(setup.threads)]
        arguments += ["--parallel", str(setup.max_num_seqs), "--ctx-size", str(setup.max_num_seqs * MAX_MODEL_LEN)]
        arguments += ["--cache-ram", "0", "--lora-init-without-apply", "--lora", ",".join(map(str, adapters))]
        url = f"http://127.0.0.1:{port}"
        with running(Command(arguments, f"{url}/health", setup.scratch / "llama.cpp.log", {})) as (pid, start_s):
            yield Serving(_target(url), pid, start_s)

    def _files(self, setup: Setup) -> Iterator[Path]:
        """Yield the GGUF files of the model and of each adapter, converted if they are missing."""
        folder, sources = WORK / "gguf" / f"{setup.spec.name}-{setup.dtype}", self.build.parent
        folder.mkdir(parents=True, exist_ok=True)
        model, file_type = str(setup.spec.model_path), FILE_TYPES[setup.dtype]
        yield _converted(folder / "base.gguf", ["-c", CONVERT, str(sources), model, "--outtype", file_type])
        script = [str(sources / "convert_lora_to_gguf.py"), "--base", model, "--outtype", file_type]
        with bar("adapters") as progress:
            for adapter in progress.track(ADAPTERS, description="converting"):
                folder_of = str(setup.spec.adapter_path(adapter))
                yield _converted(folder / f"{adapter}.gguf", [*script, folder_of])


def _target(url: str) -> Target:
    # A request without `lora` gets all adapters at once; adapters that it does not name get the scale 0.
    scales: dict[str | None, dict[str, Any]] = {None: {"lora": [{"id": 0, "scale": 0.0}]}}
    scales |= {adapter: {"lora": [{"id": number, "scale": 1.0}]} for number, adapter in enumerate(ADAPTERS)}
    return Target(f"{url}/v1", extra_body={"cache_prompt": False}, adapter_bodies=scales)


def _converted(file: Path, command: list[str]) -> Path:
    """Return `file`, which `command` writes unless it exists."""
    if not file.exists():
        partial = file.with_suffix(".partial")
        done = subprocess.run(
            [sys.executable, *command, "--outfile", str(partial)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemFailed(f"converting to {file.name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        partial.rename(file)
    return file
