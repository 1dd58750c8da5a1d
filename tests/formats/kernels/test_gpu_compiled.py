"""Triton's compiled GPU kernels for sm_90 (H100, H200), without a GPU: accesses, roundings, registers."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.formats import Transform
from quantexp.formats.definitions.files import declared_by_name
from quantexp.formats.kernels import gpu_panels
from quantexp.formats.kernels.gpu import mx_constants
from quantexp.formats.kernels.gpu_panels import CANDIDATES, LAUNCHES, Launch
from quantexp.formats.spec import get_format, resolve
from quantexp.formats.table import BY_ANY_NAME
from quantexp.formats.types import Rounding, ScaleRule

from .gpu_cases import needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_cache")]

#: An extent of the usual models' rows: a multiple of 16 words.
ALIGNED = [["tt.divisibility", 16]]
EXTENTS = ("N", "M", "L", "num_blocks", "rows", "columns", "middle", "length")
DRAWN = ("seed_0", "seed_1", "offset_0", "offset_1")
POINTERS = {"scale": "*fp32", "signs": "*fp32", "starts": "*i64", "amax_bits": "*i32"}


@cache
def compiled(
    name: str,
    pointer: str,
    launch: Launch,
    constants: tuple[tuple[str, object], ...],
    contracts: bool = False,
) -> Any:
    """A kernel compiled by Triton and accepted by ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quantexp.formats.kernels import triton_amax, triton_hif8, triton_mx, triton_panels

    modules = {"hif8_flat": triton_hif8, "amax_flat": triton_amax}
    modules |= dict.fromkeys(("panels", "amax_panels"), triton_panels)
    kernel = getattr(modules.get(name, triton_mx), name)
    by_name = dict(constants)
    signature, values, attributes = {}, {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in by_name:
            signature[argument] = "constexpr"
            values[(position,)] = by_name[argument]
        else:
            attributes[(position,)] = [] if argument in DRAWN else ALIGNED
            signature[argument] = POINTERS.get(argument, pointer)
            if argument in (*EXTENTS, *DRAWN):
                signature[argument] = "i32"
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": contracts}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def mx(fmt: str, rule: ScaleRule, **more: object) -> dict[str, Any]:
    constants = mx_constants(get_format(fmt).element, rule, Rounding.EVEN)
    return {**constants, **more}


def flat(pointer: str, launch: Launch | None = None, *, contracts: bool = False) -> Any:
    is_pairs = pointer == "*i32"
    launch = launch or LAUNCHES["mx_flat", is_pairs]
    constants = mx("mxfp8", ScaleRule.RCEIL, BLOCKS=launch.blocks, IS_PAIRS=is_pairs)
    return compiled("mx_flat", pointer, launch, tuple(constants.items()), contracts)


def tile(pointer: str, *, rows: bool, columns: bool, launch: Launch | None = None) -> Any:
    is_pairs = pointer == "*i32"
    launch = launch or LAUNCHES["mx_tile", is_pairs]
    constants = mx(
        "mxfp4",
        ScaleRule.FLOOR,
        GROUPS=launch.blocks,
        IS_PAIRS=is_pairs,
        HAS_MIDDLE=False,
        HAS_ROWS=rows,
        HAS_COLUMNS=columns,
    )
    return compiled("mx_tile", pointer, launch, tuple(constants.items()))


def hif8(pointer: str, *, is_power: bool, launch: Launch | None = None) -> Any:
    is_pairs = pointer == "*i32"
    launch = launch or LAUNCHES["hif8_flat", is_pairs]
    constants = {
        "SIZE": launch.blocks * 32 // (2 if is_pairs else 1),
        "IS_PAIRS": is_pairs,
        "HAS_SCALE": True,
        "IS_POWER": is_power,
        "IS_AWAY": True,
        "SATURATES": True,
    }
    return compiled("hif8_flat", pointer, launch, tuple(constants.items()))


def panels(fmt: str, shape: tuple[int, ...], pointer: str = "*i16", **more: Any) -> Any:
    """The kernel for blocks along the last axis of such a tensor, or along another `axis`; options of the format."""
    axis, transform, is_both = (more.pop(key, None) for key in ("axis", "transform", "both"))
    known = fmt if fmt in BY_ANY_NAME else declared_by_name(fmt, {})
    spec = resolve(known, **more)
    block = (1, 1) if spec.fmt.block is None else (spec.fmt.across, spec.block)
    axis, last = len(shape) - 1 if axis is None else axis, shape[-1] if is_both else None
    x = torch.empty(shape, device="meta")
    tiles = gpu_panels.tiles_of(x, axis, block, 1 if transform is None else transform.block, last)
    drawn = {"HAS_STARTS": False, "IN_FOURS": True, "starts": None}
    absent = {} if transform is not None else {"signs": None}
    absent |= {} if is_both else {"second": None}
    absent |= {} if spec.is_scaled else {"scale": None}
    constants = {
        **gpu_panels.transform_constants(transform, tiles),
        **{name: value for name, value in tiles.constants.items() if name != "num_warps"},
        **{"M": tiles.block[0], "N": tiles.block[1], "HAS_SECOND": bool(is_both)},
        **{"HAS_SCALE": spec.is_scaled, "G": gpu_panels.grid_of(spec), **drawn, **absent},
    }
    launch = Launch(0, tiles.constants["num_warps"])
    return compiled("panels", pointer, launch, tuple(constants.items()))


SIGNED = Transform(32, torch.ones(32), False)
DRAWN_AT_RANDOM = {"rounding": "stochastic"}
PANELS = {
    "nvfp4": lambda: panels("nvfp4", (4096, 4096)),
    "nvfp4, drawn, float32": lambda: panels("nvfp4", (4096, 4096), "*fp32", **DRAWN_AT_RANDOM),
    "mxfp4, drawn, transformed": lambda: panels(
        "mxfp4", (4096, 4096), transform=SIGNED, **DRAWN_AT_RANDOM
    ),
    "mxfp4, drawn, transformed down": lambda: panels(
        "mxfp4", (4096, 4096), axis=0, transform=SIGNED, **DRAWN_AT_RANDOM
    ),
    "blocks of 128 x 128": lambda: panels("fp8_128x128", (4096, 4096)),
    "blocks of 1 x 128, both": lambda: panels("fp8_1x128", (4096, 4096), axis=0, both=True),
    "integers, float16": lambda: panels("int4_g128", (4096, 4096), "*fp16"),
    "fp8": lambda: panels("fp8_e4m3", (4096, 4096)),
}


@pytest.mark.parametrize("name", PANELS)
def test_panels_move_16_bytes_a_thread_and_round_to_nearest(name: str, tmp_path: Path) -> None:
    kernel = PANELS[name]()
    used = instructions(kernel)
    single = {"ld.global.b32", "ld.global.v2.b32"}  # the scale of the tensor, and signs
    assert {word for word in used if word.startswith("ld.global")} <= {"ld.global.v4.b32", *single}
    assert {word for word in used if word.startswith("st.global")} == {"st.global.v4.b32"}
    arithmetic = {word for word in used if ".f16" in word or ".f32" in word}
    rounded = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "cvt.rn.f16x2.f32"}
    exact = {"abs.f32", "min.NaN.f32", "cvt.f32.f16", "cvt.rn.f32.u32", "selp.f32"}
    # of numbers >= 0: those it flushes are 0 anyway
    floor = {"cvt.rmi.ftz.f32.f32"}
    compared = {"setp.ge.f32", "setp.eq.f32"}
    assert arithmetic <= rounded | exact | floor | compared
    usage = disassembled(kernel, tmp_path, "--dump-resource-usage")
    assert " STACK:0 " in usage, "nothing is spilled"


KERNELS = {
    "flat, pairs": lambda: flat("*i32"),
    "flat, float32": lambda: flat("*fp32"),
    "flat, float16": lambda: flat("*fp16"),
    "rows and columns, pairs": lambda: tile("*i32", rows=True, columns=True),
    "rows and columns, float32": lambda: tile("*fp32", rows=True, columns=True),
    "rows and columns, float16": lambda: tile("*fp16", rows=True, columns=True),
    "columns, pairs": lambda: tile("*i32", rows=False, columns=True),
    "rows, float32": lambda: tile("*fp32", rows=True, columns=False),
    "hif8, pairs": lambda: hif8("*i32", is_power=True),
    "hif8, float32": lambda: hif8("*fp32", is_power=True),
    "hif8, float16, exact": lambda: hif8("*fp16", is_power=False),
    "hif8, bfloat16, exact": lambda: hif8("*i16", is_power=False),
}


def instructions(kernel: Any) -> Counter[str]:
    """How often each instruction of the PTX occurs; a name contains a dot and begins a line, after any predicate."""
    line = r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s"
    return Counter(re.findall(line, kernel.asm["ptx"], re.MULTILINE))


def disassembled(kernel: Any, folder: Path, option: str) -> str:
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run(
        [str(program), option, str(cubin)], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("name", KERNELS)
def test_every_access_has_16_bytes_a_thread(name: str) -> None:
    used = instructions(KERNELS[name]())
    scale = 1 if name.startswith("hif8") else 0
    loads = {word: n for word, n in used.items() if word.startswith("ld.global")}
    stores = {word: n for word, n in used.items() if word.startswith("st.global")}
    assert loads.pop("ld.global.v4.b32") > 0
    assert stores.pop("st.global.v4.b32") > 0
    assert sum(loads.values()) == scale, "the scale alone is loaded singly"
    assert not stores


@pytest.mark.parametrize("pointer", ["*i32", "*fp32", "*fp16"])
def test_amax_reads_16_bytes_a_thread(pointer: str) -> None:
    is_pairs = pointer == "*i32"
    launch = LAUNCHES["amax_flat", is_pairs]
    constants = {"SIZE": launch.blocks * 32 // (2 if is_pairs else 1), "IS_PAIRS": is_pairs}
    used = instructions(compiled("amax_flat", pointer, launch, tuple(constants.items())))
    loads = {word for word in used if word.startswith("ld.global")}
    assert loads == {"ld.global.v4.b32"}
    assert not any(word.startswith("st.global") for word in used)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_contracted_approximate_or_flushes_subnormals(name: str, tmp_path: Path) -> None:
    kernel = KERNELS[name]()
    arithmetic = {word for word in instructions(kernel) if ".f16" in word or ".f32" in word}
    rounded = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "cvt.rn.f16x2.f32"}
    exact = {"abs.f32", "min.f32", "min.NaN.f32", "max.NaN.f32", "cvt.f32.f16"}
    assert arithmetic <= rounded | exact
    assert {"add.rn.f32", "sub.rn.f32"} <= arithmetic, "the magic constant is added and taken off"
    assert ("div.rn.f32" in arithmetic) == name.endswith("exact")
    if name.startswith("hif8"):  # the interpreter's minimum always carries NaN
        assert {"min.NaN.f32", "max.NaN.f32"} <= arithmetic
        assert "min.f32" not in arithmetic
    if not name.endswith("exact"):  # a division is made of multiply-adds
        assembly = disassembled(kernel, tmp_path, "-sass")
        assert " FADD " in assembly
        assert "FFMA" not in assembly
        assert not re.search(r" (FADD|FMUL|FMNMX|F2F)\S*FTZ", assembly)


def test_with_contraction_the_compiler_would_contract(tmp_path: Path) -> None:
    """The tests above search for what this compiler does by default."""
    kernel = flat("*i32", contracts=True)
    assert "fma.rn.f32" in instructions(kernel)
    assert "FFMA" in disassembled(kernel, tmp_path, "-sass")


@pytest.mark.parametrize("name", KERNELS)
def test_registers_suffice(name: str, tmp_path: Path) -> None:
    usage = disassembled(KERNELS[name](), tmp_path, "--dump-resource-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    assert int(registers) <= 128, "four programs of 128 threads share a multiprocessor's 65536"
    assert int(stack) == 0 or name.endswith("exact"), "nothing is spilled"


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", CANDIDATES["mx_tile"], ids=str)
def test_no_candidate_spills_registers(launch: Launch, tmp_path: Path) -> None:
    for pointer in ("*i32", "*fp32"):
        for rows, columns in ((True, True), (False, True), (True, False)):
            kernel = tile(pointer, rows=rows, columns=columns, launch=launch)
            usage = disassembled(kernel, tmp_path, "--dump-resource-usage")
            assert " STACK:0 " in usage
