"""Quantized weights compared with bfloat16 on this CPU: decoding speed, and memory of the weights.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/quantized.py [--threads 2] [--model 0.5b] [--dtype bfloat16] [--quick]

The results are two tables. *Linears*: all linears of a decode step of the model's shape, by coding and number of rows,
with the speed of each coding relative to bfloat16. The codings alternate, so that other work on the machine affects all
of them. *Engine*: an engine in a separate process for each of `model.quantization`, alternately, which decodes answers
of one sequence and of eight: tokens per second, bytes of weights that a step reads, and the process's own memory after
loading.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from cpu_kernels import median
from models import ensure
from specs import MODELS

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import build_engine
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import Request, SamplingParams
from loramux_kernels.packed_linear import PackedLinear
from loramux_kernels.quantized_weight import EXPONENT_SCALES, Coding, QuantizedWeight, is_nibbles

CODINGS: tuple[tuple[str, Coding, int | None, bool], ...] = (  # name, coding, group, has offsets
    ("int8", "int8", None, False),
    ("int4 by 128", "int4", 128, False),
    ("int4 by 128, zeros", "int4", 128, True),
    ("nf4 by 64", "nf4", 64, False),
    ("mxfp4", "mxfp4", 32, False),
    ("fp8", "fp8", None, False),
)
ENGINES = ("none", "int8", "nf4")
SEQUENCES = (1, 8)


def random_weight(coding: Coding, out: int, width: int, group: int | None, has_offsets: bool) -> QuantizedWeight:
    columns = width // 2 if is_nibbles(coding) else width
    codes = torch.randint(0, 127, (out, columns), dtype=torch.uint8)
    groups = 1 if group is None else -(-width // group)
    exponents = torch.randint(118, 122, (out, groups), dtype=torch.uint8)
    scales = exponents if coding in EXPONENT_SCALES else torch.rand(out, groups) * 0.01
    offsets = torch.ones_like(scales) if has_offsets else None
    return QuantizedWeight(coding, codes, scales, group or width, width, offsets)


def linears(model: str, dtype: torch.dtype, rows: list[int], repeats: int) -> list[dict[str, object]]:
    spec = MODELS[model]
    hidden, wide = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    groups = ((hidden, (query, kv, kv)), (query, (hidden,)), (hidden, (wide, wide)), (wide, (hidden,)))
    shapes = [group for _ in range(spec.num_hidden_layers) for group in groups]
    forms = {
        "unquantized": [
            PackedLinear([torch.randn(out, width).to(dtype) for out in outs], [None] * len(outs))
            for width, outs in shapes
        ]
    }
    for name, coding, group, has_offsets in CODINGS:
        forms[name] = [
            PackedLinear([random_weight(coding, out, width, group, has_offsets) for out in outs], [None] * len(outs))
            for width, outs in shapes
        ]
    results: list[dict[str, object]] = []
    for count in rows:
        inputs = {width: torch.randn(count, width).to(dtype) for width in (hidden, query, wide)}

        def run(packed: list[PackedLinear], inputs: dict[int, torch.Tensor] = inputs) -> None:
            for linear in packed:
                linear(inputs[linear.in_features])

        seconds = median({name: lambda packed=packed: run(packed) for name, packed in forms.items()}, repeats)
        plain = seconds["unquantized"]
        for name, packed in forms.items():
            size = sum(linear.num_bytes for linear in packed)
            results.append(
                {
                    "form": name,
                    "rows": count,
                    "ms": 1e3 * seconds[name],
                    "speed": plain / seconds[name],
                    "megabytes": size / 1e6,
                    "gb_per_s": size / seconds[name] / 1e9,
                }
            )
    return results


def decode(path: Path, quantization: str, dtype: str, threads: int, tokens: int) -> dict[str, object]:
    """Measure an engine's figures; runs in a separate process."""
    settings = Settings(
        model=ModelSettings(path=str(path), served_model_name="base", dtype=dtype, quantization=quantization),
        engine=EngineSettings(device="cpu", num_threads=threads, pool_bytes=256 << 20, prefix_cache=False),
    )
    loaded = load_model(settings)
    ctypes.CDLL(None).malloc_trim(0)
    pss = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    figures: dict[str, object] = {"weight_bytes": loaded.weight_bytes, "pss_bytes": 1024 * int(pss.split()[1])}
    engine = build_engine(loaded, settings, wake=lambda: None)
    for count in SEQUENCES:
        for index in range(count):
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            prompt = [5 + index, 40, 7, 11]
            engine.submit(Request(id=f"{count}-{index}", tenant="t", prompt_token_ids=prompt, sampling=sampling))
        steps, left = [], count
        while left:
            start = time.perf_counter()
            report = engine.step()
            steps.append(time.perf_counter() - start)
            left -= sum(event.finish_reason is not None for event in report.events) if report else 0
        figures[f"tokens_per_s_{count}"] = count / statistics.median(steps[4:])
    return figures


def engines(options: argparse.Namespace) -> list[dict[str, object]]:
    spec = MODELS[options.model]
    ensure(spec)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    for _ in range(1 if options.quick else 3):
        for name in ENGINES:
            arguments = ["--engine", name, "--model", options.model, "--dtype", options.dtype]
            arguments += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
            done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    found = {name: {key: statistics.median(one[key] for one in some) for key in some[0]} for name, some in runs.items()}
    plain = found["none"]
    rows = []
    for name, figures in found.items():
        speeds = {f"speed_{n}": figures[f"tokens_per_s_{n}"] / plain[f"tokens_per_s_{n}"] for n in SEQUENCES}
        rows.append({"quantization": name, **figures, **speeds})
    return rows


def table(rows: list[dict[str, object]]) -> str:
    lines = ["  ".join(f"{name:>18}" for name in rows[0])]
    for row in rows:
        cells = (f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append("  ".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=list(MODELS), default="0.5b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, one turn")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.engine:
        path = MODELS[options.model].model_path
        print(json.dumps(decode(path, options.engine, options.dtype, options.threads, 16 if options.quick else 64)))
        return
    dtype = getattr(torch, options.dtype)
    rows = [1, 16] if options.quick else [1, 4, 16, 64]
    print(table(linears(options.model, dtype, rows, 3 if options.quick else 15)))
    print()
    print(table(engines(options)))


if __name__ == "__main__":
    main()
