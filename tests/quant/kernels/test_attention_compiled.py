"""What Triton makes of the attention kernels for sm_90 (H100, H200), without a GPU: instructions, registers, memory."""

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
from quantexp.formats.table import get_format
from quantexp.formats.types import Rounding, ScaleRule
from quantexp.quant.kernels.gpu import padded
from quantexp.quant.kernels.launches import launch_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="Triton is for Linux on x86-64",
    ),
]

#: Widths of keys' and values' heads: llama32-1b, llama31-8b, deepseek2_lite.
WIDTHS = [(64, 64), (128, 128), (192, 128)]
#: What a program may have of a multiprocessor's memory.
SHARED = 232448
#: The same of the smallest since compute capability 8.0.
LEAST_SHARED = 101376
_MX = tuple(mx_constants(get_format("mxfp8").element, ScaleRule.RCEIL, Rounding.EVEN).values())
#: As HOW of `triton_tiles`.
NOT, BY_KEYS, BY_QUERIES, HIF8 = (0,), (1, True, *_MX), (1, False, *_MX), (2, True, True, True)
#: Each with P and dS as a product holds them.
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


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@cache
def compiled(
    name: str,
    how: tuple[object, ...],
    widths: tuple[int, int],
    has_mask: bool = False,
    ones: tuple[str, ...] = (),
    capability: int = 90,
) -> Any:
    """What Triton makes of a kernel, which ptxas has accepted; `ones` are arguments that are 1, which it builds in."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quantexp.quant.kernels import triton_backward, triton_forward

    kernel = getattr(triton_forward, name, None) or getattr(triton_backward, name)
    D, E = widths
    launch = launch_for(padded(max(widths)))
    known: dict[str, object] = {
        "D": D,
        "E": E,
        "PADDED_D": padded(D),
        "PADDED_E": padded(E),
        "HAS_MASK": has_mask,
        "HOW_P": how,
        "HOW_dS": how,
        "ROWS": launch.rows,
        "KEYS": launch.keys,
        "IS_INTERPRETED": False,
    }
    known |= dict.fromkeys(ones, 1)
    known |= {} if has_mask else {"mask": None}
    known |= {} if how == HIF8 else {"scale_P": None, "scale_dS": None}
    types: dict[str, object] = dict.fromkeys(("m_NT", "inverse_NT", "d_NT"), "*fp32")
    types |= dict.fromkeys(("scale_P", "scale_dS"), "*fp32") | {"amax_bits": "*i32"}
    types |= dict.fromkeys(("T", "H", "SHARE"), "i32") | {"mask": ("*u8", "i32", "i32")}
    types |= dict.fromkeys(TENSORS, ("*bf16", "i32", "i32", "i32"))
    signature, values, attributes = {}, {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in known:
            signature[argument] = "constexpr"
            values[(position,)] = known[argument]
            continue
        signature[argument] = types.get(argument, "fp32")
        if argument in TENSORS:  # of addresses and strides, as rows of the usual models have them
            attributes |= {(position, part): [["tt.divisibility", 16]] for part in range(4)}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def each(widths: tuple[int, int]) -> dict[str, Any]:
    """All kernels, causal; and two with a mask."""
    found = {name: compiled(*case, widths) for name, case in CASES.items()}
    for name in ("forward, mxfp8", "gradient_of_kv, mxfp8"):
        found[f"{name}, masked"] = compiled(*CASES[name], widths, True)
    return found


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
    """o, dq, dk and dv, and a number for each row: nothing else leaves the chip."""
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
def test_one_token_or_one_head_will_do(ones: tuple[str, ...]) -> None:
    for case in CASES.values():
        assert compiled(*case, WIDTHS[0], ones=ones).asm["cubin"]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_smaller_devices_have_memory_enough(widths: tuple[int, int]) -> None:
    """The product with most operands; others than sm_90 have other matrix units."""
    kernel = compiled(*CASES["gradient_of_kv, mxfp8"], widths, True, capability=80)
    assert kernel.metadata.shared <= LEAST_SHARED
