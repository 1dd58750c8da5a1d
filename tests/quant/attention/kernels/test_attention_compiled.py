"""Triton's compiled attention kernels for sm_90 (H100, H200), without a GPU: instructions, registers, memory."""

from __future__ import annotations

import platform
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantexp.formats.kernels.gpu import mx_constants
from quantexp.formats.spec import get_format
from quantexp.formats.types import Rounding, ScaleRule
from quantexp.quant.attention.kernels.gpu import padded
from quantexp.quant.attention.kernels.launches import Constants, OfDS, OfP, launch_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("triton_cache"),
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="Triton is for Linux on x86-64",
    ),
]

#: Widths of key and value heads: llama32-1b, llama31-8b, deepseek2_lite.
WIDTHS = [(64, 64), (128, 128), (192, 128)]
#: The largest shared memory of a program on a multiprocessor.
SHARED = 232448
#: The smallest such limit since compute capability 8.0.
LEAST_SHARED = 101376
_MX = tuple(mx_constants(get_format("mxfp8").element, ScaleRule.RCEIL, Rounding.EVEN).values())
#: HOW of `triton_tiles`.
NOT, BY_KEYS, BY_QUERIES, HIF8 = (0,), (1, True, *_MX), (1, False, *_MX), (2, True, True, True)
#: Each with P and dS quantised for their products.
CASES = {
    "softmax_rows": ("softmax_rows", NOT),
    "forward, mxfp8": ("forward", BY_KEYS),
    "forward, hifp8": ("forward", HIF8),
    "gradient_rows": ("gradient_rows", NOT),
    "gradient_amax": ("gradient_amax", NOT),
    "gradient_of_q, mxfp8": ("gradient_of_q", BY_KEYS),
    "gradient_of_kv, mxfp8": ("gradient_of_kv", BY_QUERIES),
    "gradient_of_kv, hifp8": ("gradient_of_kv", HIF8),
    "gradient_of_kv, bf16": ("gradient_of_kv", NOT),
}
TENSORS = ("q", "k", "v", "dO", "o", "dq", "dk", "dv", "k_dS", "q_dS", "dO_P")
#: Addresses and strides of the usual models' rows.
HEADS = ("*bf16", "i32", "i32", "i32")
ALIGNED: list[list[object]] = [["tt.divisibility", 16]]
TYPES = {
    **dict.fromkeys(TENSORS, HEADS),
    **dict.fromkeys(("m_NT", "inverse_NT", "d_NT", "scale_P", "scale_dS"), "*fp32"),
    **dict.fromkeys(("T", "H", "SHARE"), "i32"),
    "amax_bits": "*i32",
    "mask": ("*u8", "i32", "i32"),
}


@cache
def compiled(
    name: str,
    how: tuple[object, ...],
    widths: tuple[int, int],
    has_mask: bool = False,
    ones: tuple[str, ...] = (),
    capability: int = 90,
) -> Any:
    """A kernel compiled by Triton and accepted by ptxas; `ones` are arguments equal to 1, which become constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quantexp.quant.attention.kernels import triton_backward, triton_forward

    kernel = getattr(triton_forward, name, None) or getattr(triton_backward, name)
    D, E = widths
    launch = launch_for(padded(max(widths)))
    constants: dict[str, object] = {
        "CONST": Constants(D, E, padded(D), padded(E), launch.rows, launch.keys, False),
        "HOW_P": how,
        "HOW_dS": how,
    }
    constants |= dict.fromkeys(ones, 1)
    constants |= {} if has_mask else {"mask": None}
    constants |= {} if how == HIF8 else {"scale_P": None, "scale_dS": None}
    groups: dict[str, type[OfP] | type[OfDS]] = {"of_p": OfP, "of_dS": OfDS}
    values: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}

    def type_of(argument: str, *path: int) -> Any:
        if argument in groups:
            group = groups[argument]
            return group._make(type_of(each, *path, at) for at, each in enumerate(group._fields))
        if argument in constants:
            values[path] = constants[argument]
            return "constexpr"
        if argument in TENSORS:
            attributes.update({(*path, part): ALIGNED for part in range(len(HEADS))})
        return TYPES.get(argument, "fp32")

    signature = {each: type_of(each, at) for at, each in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch.options)


def each(widths: tuple[int, int]) -> dict[str, Any]:
    """All kernels, causal; and two with a mask."""
    kernels = {name: compiled(*case, widths) for name, case in CASES.items()}
    for name in ("forward, mxfp8", "gradient_of_kv, mxfp8"):
        kernels[f"{name}, masked"] = compiled(*CASES[name], widths, True)
    return kernels


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_registers_and_memory_suffice(widths: tuple[int, int], tmp_path: Path) -> None:
    import triton

    cubin = tmp_path / "kernel.cubin"
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for name, kernel in each(widths).items():
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [str(program), "--dump-resource-usage", str(cubin)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert " STACK:0 " in usage, f"{name} spills registers: {usage}"
        assert kernel.metadata.shared <= SHARED, name


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_arithmetic_is_rounded_to_nearest_and_products_are_the_matrix_units(
    widths: tuple[int, int],
) -> None:
    exact = {"abs.f32", "min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32", "selp.f32"}
    exact |= {"abs.bf16", "abs.bf16x2", "cvt.f32.bf16"}
    rounded = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}
    rounded |= {"cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32"}
    for name, kernel in each(widths).items():
        line = r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s"
        used = Counter(re.findall(line, kernel.asm["ptx"], re.MULTILINE))
        products = {word for word in used if "mma" in word and ".f32.bf16.bf16" in word}
        assert products, name
        arithmetic = {word for word in used if ".f32" in word or "bf16" in word} - products
        assert arithmetic <= exact | rounded | {"ex2.approx.f32"}, name


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_nothing_of_a_tile_is_written(widths: tuple[int, int]) -> None:
    """o, dq, dk and dv, and one number per row: nothing else leaves the chip."""
    pointers = {
        "softmax_rows": {"m_NT", "inverse_NT"},
        "forward": {"o"},
        "gradient_rows": {"d_NT"},
        "gradient_amax": set(),
        "gradient_of_q": {"dq"},
        "gradient_of_kv": {"dk", "dv"},
    }
    for name, kernel in each(widths).items():
        stores = re.findall(r"tt\.store %(\w+)", kernel.asm["ttir"])
        assert len(stores) == len(pointers[name.split(",")[0]]), name


@pytest.mark.parametrize("ones", [("T",), ("H", "SHARE")], ids=str)
def test_one_token_or_one_head_is_supported(ones: tuple[str, ...]) -> None:
    for case in CASES.values():
        assert compiled(*case, WIDTHS[0], ones=ones).asm["cubin"]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_smaller_devices_have_enough_memory(widths: tuple[int, int]) -> None:
    """The product with most operands; other architectures than sm_90 have other matrix units."""
    kernel = compiled(*CASES["gradient_of_kv, mxfp8"], widths, True, capability=80)
    assert kernel.metadata.shared <= LEAST_SHARED
