"""Compile every GPU kernel for given architectures on a machine without a GPU, and refuse register spills.

    python tools/compile_check.py --arch 80 --arch 90 [--only NAME] [--each-kernel] [--jobs N] [--json]

Prints, for each variant and architecture: registers a thread, bytes of shared memory, bytes spilled, programs that fit
one multiprocessor, buffers that loops copy ahead into, copies under way at a wait, tensor-core instructions, and
16-byte loads against all loads from global memory. Exits 1 when a variant spills, does not compile, needs more shared
memory than a program may have, copies into a buffer that a WGMMA under way still reads, or has products with
descriptors and reads uniform registers that nothing wrote. About the last: ptxas 12.8, which Triton 3.6 and 3.7 bring,
computes some WGMMA descriptors from such registers, and the products then use arbitrary shared memory. Needs triton, in
a separate process, without TRITON_INTERPRET.

Triton keeps what it compiled (`TRITON_CACHE_DIR`): a run that was interrupted goes on where it ended, and a second run
compiles only the kernels that changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_variants import all_variants
from loramux_kernels.cuda.launch import Launch

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of compiling one variant for one architecture."""

    variant: str
    kernel: str
    arch: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    """Stack frame of a thread, in bytes: the values that did not fit into its registers."""
    programs: int
    """Number of programs that fit one multiprocessor at a time."""
    buffers: int
    """Number of blocks of one operand that a pipelined loop holds in shared memory; 0: the loop copies nothing
    ahead.
    """
    copies_under_way: int
    """Number of groups of asynchronous copies that the least strict wait leaves unfinished; 0: every wait is for all
    groups.
    """
    wgmma_under_way: int
    """Number of tensor-core products that a wait leaves unfinished while they read their operands' buffers."""
    overwrites: bool
    """True if a copy may write a buffer that an unfinished product still reads."""
    unset_registers: tuple[str, ...]
    """Uniform registers that the machine code reads before it writes them; looked for if products take descriptors."""
    tensor_core_instructions: int
    wide_loads: int
    """Number of 16-byte loads and copies from global memory."""
    loads: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A variant that did not compile for one architecture."""

    variant: str
    arch: int
    error: str


def compile_launch(variant: str, launch: Launch, arch: int) -> Compiled:
    """Compile one launch for `arch` (80, 90, ...) and read the properties of the machine code."""
    arguments, compiler_options = launch.for_arch(arch)
    source = _source(launch.kernel, arguments)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compiler_options)
    ptx = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    ttgir = compiled.asm["ttgir"]
    # Dumps are slow: only products of WGMMA and TCGEN05 take descriptors, which ptxas 12.8 computes wrongly.
    sass = _dump(compiled.asm["cubin"], "--dump-sass") if re.search(r"\b(?:wgmma|tcgen05)\b", ptx) else ""
    buffers = _most(r"local_alloc *: *\(\) *-> *!ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    loads = re.findall(r"\b(?:ld\.global|cp\.async\.c[ag]|cp\.async\.bulk)[^;]*;", ptx)
    return Compiled(
        variant=variant,
        kernel=launch.kernel.__name__,
        arch=arch,
        registers=usage["REG"],
        shared_bytes=compiled.metadata.shared,
        spill_bytes=usage["STACK"],
        programs=_programs(usage["REG"], compiled.metadata.shared, compiler_options["num_warps"], arch),
        buffers=buffers,
        copies_under_way=_most(r"cp\.async\.wait_group\s+(\d+)", ptx),
        wgmma_under_way=(under_way := _most(r"warp_group_dot_wait.*pendings = (\d+)", ttgir)),
        # Iteration i copies for iteration i + stages - 1 at most, while products i - under_way + 1 to i still read.
        overwrites=under_way > 0 and under_way + compiler_options["num_stages"] - 1 > buffers,
        unset_registers=tuple(unset_registers(sass)),
        tensor_core_instructions=len(re.findall(r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma", ptx)),
        wide_loads=sum(bool(re.search(r"v4\.b32|v2\.b64|0x10|, 16[,;]", load)) for load in loads),
        loads=len(loads),
    )


SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10, 103: 228 << 10}
"""Bytes of shared memory of one multiprocessor. Other architectures since sm_80 (86, 89, 120) have SMALL_SHARED_BYTES
and 48 warps."""
SMALL_SHARED_BYTES = 100 << 10
RESERVED_BYTES = 1 << 10
"""Bytes of shared memory that each program takes in addition to its own."""


def _shared_bytes(arch: int) -> int:
    return SHARED_BYTES.get(arch, SMALL_SHARED_BYTES)


def _programs(registers: int, shared_bytes: int, warps: int, arch: int) -> int:
    """Return how many programs one multiprocessor holds, which has 65,536 registers; 0: its memory is too small."""
    by_registers = (64 << 10) // (-(-registers // 8) * 8 * 32 * warps)
    by_memory = _shared_bytes(arch) // (shared_bytes + RESERVED_BYTES)
    return min(by_registers, by_memory, (64 if arch in SHARED_BYTES else 48) // warps, 32)


def _most(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)), default=0)


def _source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """Return the kernel with its arguments' types, specialised on them as a launch on a GPU would be."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        special = not (parameter.is_constexpr or parameter.do_not_specialize)
        if parameter.is_constexpr or value is None or (special and _is_one(value)):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[parameter.name] = _type_name(value)
        if special and _divisible(value):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1


def _divisible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the resources of the machine code: REG per thread, STACK in bytes, ..."""
    output = _dump(cubin, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", output)}


def _dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;", re.MULTILINE)
"""An instruction of a dump: its name and its operands."""

UNIFORM = re.compile(r"\bUR(\d+)\b")


def unset_registers(sass: str) -> Iterator[str]:
    """Yield the uniform registers that an instruction of a machine-code dump reads and no earlier instruction writes.

    Instructions are read in the order of the dump. For the code that every program begins with, this is the order of
    execution.
    """
    written: set[int] = set()
    for name, operands in INSTRUCTION.findall(sass):
        first, *others = operands.split(",")
        target = UNIFORM.fullmatch(first.strip())
        sources = ",".join(others) if target else operands
        parts = range(1)
        if name.startswith("HGMMA"):  # the descriptor of the second operand follows that of the first
            parts = range(2, 4)
        elif name.startswith("UIADD3.64"):
            parts = range(2)
        read = {int(number) + part for number in UNIFORM.findall(sources) for part in parts}
        yield from (f"UR{number}" for number in sorted(read - written))
        written |= read  # report each register once
        if target is not None:
            written |= {int(target[1]) + part for part in range(_width(name))}


def _width(name: str) -> int:
    """Return the registers that an instruction writes; on sm_100 a load of constants may write four (`LDCU.128`)."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name else 1


def compile_all(names: Sequence[str], archs: Sequence[int], jobs: int) -> Iterator[Compiled | Failed]:
    """Yield the result of each variant on each architecture, in order, from `jobs` processes."""
    work = [(name, arch) for name in names for arch in archs]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile_named, work)


def _compile_named(work: tuple[str, int]) -> Compiled | Failed:
    """Compile a variant by its name: launches hold tensors, which then need not be sent to another process."""
    name, arch = work
    launch = variants_by_name()[name]
    try:
        return compile_launch(name, launch, arch)
    except Exception as error:  # of the compiler or the assembler, whatever its type: the other variants go on
        return Failed(name, arch, f"{type(error).__name__}: {error}")


@cache
def variants_by_name() -> dict[str, Launch]:
    """Return the launch of every variant."""
    variants = all_variants()
    found = {variant.name: variant.launch for variant in variants}
    assert len(found) == len(variants), "every variant has a name of its own"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python tools/compile_check.py", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, action="append", help="80 (A100), 90 (H100, H200), ...; repeatable")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--each-kernel", action="store_true", help="the first variant of each kernel alone")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled; run this without it")
    names = [name for name in variants_by_name() if options.only in name]
    if not names:
        parser.error(f"no variant's name contains {options.only!r}")
    if options.each_kernel:
        first = {variants_by_name()[name].kernel.__name__: name for name in reversed(names)}
        names = sorted(first.values(), key=names.index)
    results, failed = [], []
    for result in compile_all(names, options.arch or [80, 90], options.jobs):
        if isinstance(result, Failed):
            failed.append(result)
            print(f"{result.variant} sm_{result.arch} does not compile: {result.error}", file=sys.stderr, flush=True)
        else:
            results.append(result)
            if not options.json:
                print(_line(result), flush=True)
    faults = {
        "do not compile": len(failed),
        "spill": sum(result.spill_bytes > 0 for result in results),
        "need too much shared memory": sum(result.programs == 0 for result in results),
        "overwrite operands under way": sum(result.overwrites for result in results),
        "read registers that nothing wrote": sum(len(result.unset_registers) > 0 for result in results),
    }
    if options.json:
        lists = {"results": [asdict(r) for r in results], "failed": [asdict(f) for f in failed]}
        print(json.dumps({"triton": triton.__version__, **lists}, indent=1))
    else:
        counts = ", ".join(f"{number} {fault}" for fault, number in faults.items())
        print(f"triton {triton.__version__}: {len(results)} compiled, {counts}")
    return 1 if any(faults.values()) else 0


def _line(result: Compiled) -> str:
    return (
        f"{result.variant:<44} sm_{result.arch}  {result.registers:>3} registers  {result.shared_bytes:>6} B shared  "
        f"{result.spill_bytes:>4} B spilled  {result.programs:>2} programs  {result.buffers} buffers  "
        f"{result.copies_under_way} copies  {result.tensor_core_instructions:>4} mma  "
        f"{result.wide_loads:>3}/{result.loads:<3} wide loads"
        + (f"  reads {', '.join(result.unset_registers)} before they are written" if result.unset_registers else "")
    )


if __name__ == "__main__":
    sys.exit(main())
