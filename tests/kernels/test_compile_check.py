"""Every GPU kernel variant becomes machine code for sm_80 and sm_90 without a spill, in a separate process."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

PROGRAMS = 2
"""Programs of attention that are launched for each multiprocessor (`work_lists.ATTENTION_PROGRAMS`)."""
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "compile_check.py"


def compile_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, env=without | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("archs", "chosen", "least"),
    [
        pytest.param((90,), ("--each-kernel",), 20, id="one of each kernel"),
        pytest.param((80, 90), (), 150, id="every", marks=pytest.mark.slow),
    ],
)
def test_compile_check_variants_compile_without_a_spill(
    archs: tuple[int, ...], chosen: tuple[str, ...], least: int
) -> None:
    done = compile_check(*(part for arch in archs for part in ("--arch", str(arch))), *chosen, "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(done.stdout)["results"]
    assert {result["spill_bytes"] for result in results} == {0}
    by_arch = {arch: {r["variant"]: r for r in results if r["arch"] == arch} for arch in archs}
    for arch, variants in by_arch.items():
        assert len(variants) >= least
        assert variants.keys() == by_arch[90].keys()
        assert all(result["shared_bytes"] <= SHARED_BYTES[arch] for result in variants.values())
    kernels = {result["kernel"] for result in results}
    assert {"_shrink_rows", "_shrink_tiles", "_expand_rows", "_expand_tiles", "_attend"} <= kernels
    assert {"_write_kv", "_scan", "_finish", "_steer", "_bias", "_insert_tokens"} <= kernels
    assert {result["overwrites"] for result in results} == {False}, "no operand is overwritten while it is read"
    assert [result for result in results if result["unset_registers"]] == []
    for result in results:
        if re.match(r"attend-16-(\d+)x\1-[bf]", result["variant"]) and "fp32" not in result["variant"]:
            # A decoding row waits for memory: the next keys and values are on their way, and two programs fit. In FP8,
            # registers do not suffice for that with a softcap or ends of rows, and a wide tile is one program.
            words = set(result["variant"].split("-"))
            is_fp8, features = "fp8" in words, words & {"softcap", "ahead"}
            if not (is_fp8 and features):
                assert result["buffers"] >= 2, result
                assert result["copies_under_way"] >= 1, result
            assert result["programs"] >= (1 if is_fp8 and "512x512" in words else PROGRAMS), result
        # Decode rows and float32 sums go without; everything else multiplies on tensor cores.
        if result["kernel"] in ("_shrink_tiles", "_expand_tiles", "_attend") and "fp32" not in result["variant"]:
            assert result["tensor_core_instructions"] > 0, result


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
        /*0010*/                   S2UR UR4, SR_CTAID.X ;               /* 0x0000000000047919 */
        /*0020*/                   UIMAD.WIDE UR6, UR4, 0x4, URZ ;      /* 0x00000004040678a5 */
        /*0030*/                   UIADD3 UR18, UP0, UR{base}, 0x20, URZ ;
        /*0040*/                   UIADD3.X UR19, UR7, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0050*/                   ULDC.64 UR16, c[0x0][0x208] ;
        /*0060*/              @P0  LDG.E R2, desc[UR16][R2.64] ;
        /*0070*/                   HGMMA.64x16x16.F32 R56, R24, gdesc[UR16].tnspB, R56, gsb0 ;
        /*0080*/             @!UP1 UIADD3.64 UR20, UR{pair}, 0x20, URZ ;
"""


@pytest.mark.parametrize(
    ("base", "pair", "unset"),
    [(6, 18, []), (34, 18, ["UR34"]), (18, 18, ["UR18"]), (6, 4, ["UR5"])],
    ids=["none", "another", "its own", "half of a pair"],
)
def test_unset_registers_are_those_that_nothing_has_written(base: int, pair: int, unset: list[str]) -> None:
    from compile_check import unset_registers

    assert list(unset_registers(SASS.format(base=base, pair=pair))) == unset


def test_unset_registers_of_a_product_are_those_of_its_second_operand() -> None:
    from compile_check import unset_registers

    product = SASS.splitlines()[8]
    assert list(unset_registers(product)) == ["UR18", "UR19"]


def test_unset_registers_know_that_a_load_of_128_bits_writes_four() -> None:
    from compile_check import unset_registers

    load = "        /*0000*/                   LDCU{width} UR12, c[0x0][0x380] ;\n"
    read = "        /*0010*/                   UIADD3 UR4, UPT, UPT, UR15, 0x20, URZ ;\n"
    assert list(unset_registers(load.format(width=".128") + read)) == []
    assert list(unset_registers(load.format(width=".64") + read)) == ["UR15"]


def test_a_launch_leaves_its_threads_the_registers_that_its_programs_do_not_need() -> None:
    from loramux_kernels.cuda.launch import Launch

    def registers(programs: int | None, warps: int, arch: int = 80) -> int | None:
        kernel = SimpleNamespace(arg_names=())
        launch = Launch(kernel, (1,), {}, num_warps=warps, num_stages=1, programs=programs)
        return launch.for_arch(arch)[1].get("maxnreg")

    assert [registers(2, warps) for warps in (4, 8, 16)] == [255, 128, 64]
    assert registers(None, 4) is None, "the assembler chooses"
    assert registers(2, 4, arch=0) is None, "the interpreter has no registers"


class _Kernel:
    """A kernel that records what it is launched with."""

    arg_names = ("x",)
    __name__ = "_kernel"

    def __init__(self) -> None:
        self.ran: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **given: self.ran.append(given)


@pytest.mark.parametrize(
    ("arch", "warps", "stages", "maxnreg"), [(80, 16, 3, 128), (89, 16, 3, 128), (90, 8, 5, None), (100, 8, 5, None)]
)
def test_compile_check_compiles_with_the_facts_of_the_architecture_that_the_launch_runs_with(
    arch: int, warps: int, stages: int, maxnreg: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compile_check as tool
    from loramux_kernels.cuda import launch as module

    kernel, compiled = _Kernel(), []

    def compile_source(source: dict[str, object], target: object, options: dict[str, object]) -> SimpleNamespace:
        compiled.append(source | options)
        ttgir = "local_alloc : () -> !ttg.memdesc<3x16x16x warp_group_dot_wait { pendings = 1"
        return SimpleNamespace(asm={"ptx": "", "cubin": b"", "ttgir": ttgir}, metadata=SimpleNamespace(shared=0))

    monkeypatch.setattr(tool, "_source", lambda kernel, arguments: arguments)
    monkeypatch.setattr(tool.triton, "compile", compile_source)
    monkeypatch.setattr(tool, "_resource_usage", lambda cubin: {"REG": 128, "STACK": 0})
    monkeypatch.setattr(module, "_current_arch", lambda: arch)
    ampere = {"num_warps": 16, "num_stages": 3, "programs": 1}
    launch = module.Launch(kernel, (1,), {"x": 1}, num_warps=8, num_stages=5, by_major={module.AMPERE: ampere})
    result = tool.compile_launch("a variant", launch, arch)
    launch.run()
    assert kernel.ran == compiled
    (options,) = compiled
    assert (options["num_warps"], options["num_stages"], options.get("maxnreg")) == (warps, stages, maxnreg)
    assert result.programs == 16 // warps, "of the warps that the architecture has"
    assert result.overwrites == (stages == 5), "of three buffers"


def test_attention_tiles_that_need_more_registers_on_sm_80_have_facts_of_their_own_there() -> None:
    from compile_check import variants_by_name

    def facts(name: str, arch: int) -> tuple[int, int, int | None]:
        options = variants_by_name()[name].for_arch(arch)[1]
        return options["num_warps"], options["num_stages"], options.get("maxnreg")

    in_parts, high = "attend-16-576x512-bf16-in-keys-lse", "attend-64-128x128-bf16-fp8"
    assert [facts(in_parts, arch) for arch in (80, 90)] == [(16, 5, 128), (8, 5, None)]
    assert [facts(f"{high}-groups-of-7", arch) for arch in (80, 90)] == [(4, 1, 255), (4, 3, 255)]
    assert [facts(f"{high}-groups-of-32", arch) for arch in (80, 90)] == [(4, 3, 255), (4, 3, 255)]


def test_every_kernel_that_the_host_launches_has_a_variant() -> None:
    from kernel_variants import all_variants

    kernels: list[str] = []
    called: set[str] = set()
    paths = (path for area in ("kernels", "adapters", "platform") for path in (ROOT / area).rglob("*.py"))
    for source in (text for text in map(Path.read_text, paths) if "triton.jit" in text):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in "".join(map(ast.unparse, node.decorator_list)):
                kernels.append(node.name)
                called |= {ast.unparse(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    assert len(set(kernels)) == len(kernels), "a kernel is found by its name"
    # A kernel that no other kernel calls is launched by the host.
    assert {variant.launch.kernel.__name__ for variant in all_variants()} == set(kernels) - called


def test_variants_have_names_of_their_own() -> None:
    from kernel_variants import all_variants

    names = [variant.name for variant in all_variants()]
    assert len(set(names)) == len(names), "of two variants with one name, only the second would be compiled"


def test_attention_has_tiles_of_the_compiled_heights_for_any_number_of_heads() -> None:
    import torch

    from kernel_variants import all_variants
    from loramux_kernels.cuda.paged_attention import _long_rows, _repeats

    compiled = {
        (launch.arguments["BLOCK_VALUE"], launch.arguments["query"].dtype, launch.arguments["BLOCK_ROWS"])
        for launch in (variant.launch for variant in all_variants())
        if launch.kernel.__name__ == "_attend"
    }
    for dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (512, torch.bfloat16)):
        most = _long_rows(dim, dtype)
        for groups in range(1, 257):
            heads = groups // _repeats(groups, most)
            rows = max(16, 1 << (heads - 1).bit_length())
            assert (dim, dtype, rows) in compiled, (dim, groups)


def test_a_variant_that_does_not_compile_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import compile_check as tool

    def compile_launch(variant: str, launch: object, arch: int) -> str:
        if launch is None:
            raise RuntimeError("PTXAS error")
        return variant

    monkeypatch.setattr(tool, "compile_launch", compile_launch)
    monkeypatch.setattr(tool, "variants_by_name", lambda: {"good": "a launch", "bad": None})
    bad, good = (tool._compile_named((name, 90)) for name in ("bad", "good"))
    assert (bad, good) == (tool.Failed("bad", 90, "RuntimeError: PTXAS error"), "good")
    monkeypatch.setattr(tool, "compile_all", lambda *_: iter([bad]))
    assert tool.main(["--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failed"] == [{"variant": "bad", "arch": 90, "error": "RuntimeError: PTXAS error"}]
    assert "bad sm_90 does not compile" in printed.err


def test_a_program_that_needs_more_shared_memory_than_there_is_does_not_fit() -> None:
    from compile_check import _programs

    assert [_programs(128, 99 << 10, 4, arch) for arch in (80, 90, 120)] == [1, 2, 1]
    assert [_programs(128, 100 << 10, 4, arch) for arch in (80, 90, 120)] == [1, 2, 0]
    assert [_programs(32, 0, 4, arch) for arch in (80, 120)] == [16, 12], "by warps"


def test_compile_check_refuses_an_unknown_variant_and_the_interpreter() -> None:
    unknown = compile_check("--only", "no such kernel")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "no variant's name contains" in unknown.stderr
    interpreted = compile_check(TRITON_INTERPRET="1")
    assert interpreted.returncode == 2
    assert "TRITON_INTERPRET" in interpreted.stderr
