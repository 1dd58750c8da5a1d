"""Emulated quantisation on a CPU by others and here, by turns in one process.

    git clone https://github.com/microsoft/microxcaling; git -C microxcaling checkout 7bc4195
    git clone https://github.com/mit-han-lab/fouroversix; git -C fouroversix checkout dadfad6
    git clone https://github.com/IST-DASLab/Quartet-II; git -C Quartet-II checkout 8776a90
    OMP_NUM_THREADS=1 python benchmarks/peers.py microxcaling fouroversix Quartet-II [--size 4096] [--turns 3]

The table has the processor time for one bfloat16 tensor (float32 for NVFP4), the least of all turns, how many
times that of quantexp it is, and which share of the values differs by more than float32's last bits. Needs torchao.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from authors import eden_of, ms_eden, reference_of, unpacked
from quantise_peers import by_compiled_torch, torchao_round_trip
from torch import Tensor

from quantexp.formats import quantise, resolve
from quantexp.formats.kernels import torch_alone

OURS = "quantexp"
#: Relative differences of values that come from other orders of multiplication in float32.
LAST_BITS = 2.0**-20

#: By the name in the table, the format and its options.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp8": ("mxfp8", {"scale_rule": "floor"}),
    "mxfp4": ("mxfp4", {"scale_rule": "floor"}),
    "nvfp4": ("nvfp4", {}),
    "four over six": ("nvfp4_four_over_six", {}),
    "MS-EDEN": ("nvfp4_ms_eden", {"rounding": "stochastic", "seed": 1}),
}
#: Formats whose peers take float32.
WIDE = ("nvfp4", "nvfp4_four_over_six", "nvfp4_ms_eden")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("microxcaling", "fouroversix", "quartet2"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(48)
    x = torch.randn(arguments.size, arguments.size).bfloat16()
    cases = dict(_cases(arguments, x))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    values: dict[tuple[str, str], Tensor] = {}
    for turn in range(arguments.turns + 1):
        for key, run in cases.items():
            start = time.process_time()
            result = run()
            if turn:
                times[key].append(time.process_time() - start)
            else:  # what compiles does so now
                values[key] = result.clone()
    out = sys.stdout.write
    out(f"{arguments.size} x {arguments.size}, {torch.get_num_threads()} threads, ")
    out(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    out("| format | code | ms | of quantexp's | values that differ |\n|---|---|---|---|---|\n")
    for name, code in sorted(times, key=lambda key: list(FORMATS).index(key[0])):
        taken, own, expected = times[name, code], min(times[name, OURS]), values[name, OURS]
        differing = (
            ((values[name, code] - expected).abs() > expected.abs() * LAST_BITS).double().mean()
        )
        out(f"| {name} | {code} | {1e3 * min(taken):.1f} | {min(taken) / own:.1f} | ")
        out(f"{differing:.2g} |\n")


def _cases(
    arguments: argparse.Namespace, x: Tensor
) -> Iterator[tuple[tuple[str, str], Callable[[], Tensor]]]:
    """By format and code, what is timed."""
    y, wide = torch.empty_like(x), x.float()
    for name, (fmt, options) in FORMATS.items():
        run = partial(quantise, wide if fmt in WIDE else x, fmt, **options)
        yield (name, OURS), run
        yield (name, "quantexp without a compiler"), partial(_alone, run)
    for name in ("mxfp8", "mxfp4"):
        fmt, options = FORMATS[name]
        compiled = by_compiled_torch(resolve(fmt, **options), 1)
        yield (name, "quantexp by torch.compile"), partial(_to, y, compiled, x, y, None)
        yield (name, "torchao"), partial(torchao_round_trip(name, "floor"), x)
    sys.path.insert(0, str(arguments.microxcaling))
    mx: Any = importlib.import_module("mx.mx_ops")
    for name, element in (("mxfp8", "fp8_e4m3"), ("mxfp4", "fp4_e2m1")):
        options = {"scale_bits": 8, "elem_format": element, "axes": [-1], "block_size": 32}
        yield (name, "microxcaling"), partial(mx._quantize_mx, x, **options)
    reference = reference_of(arguments.fouroversix)
    for name, rule in (("nvfp4", "static_6"), ("four over six", "mse")):
        options = {
            "fp4_format": reference.DataType.nvfp4,
            "scale_rule": getattr(reference.ScaleRule, rule),
            "use_blackwell_scale_layout": False,
        }
        largest = resolve(FORMATS[name][0]).amax_target
        codes = partial(reference.quantize, wide, **options)
        yield (name, "fouroversix"), partial(_values, codes, largest)
    eden = eden_of(arguments.quartet2)
    yield ("MS-EDEN", "Quartet II"), lambda: _product(*ms_eden(eden, wide))


def _to(y: Tensor, run: Callable[..., object], *operands: Tensor | None) -> Tensor:
    run(*operands)
    return y


def _alone(run: Callable[[], Tensor]) -> Tensor:
    with torch_alone():
        return run()


def _values(codes: Callable[[], tuple[Tensor, Tensor, Tensor]], largest: float) -> Tensor:
    """The values of packed codes, their scales and the amax, which becomes `largest`."""
    packed, scales, amax = codes()
    elements, blocks = unpacked(packed, scales)
    return _product(elements, blocks, amax / largest)


def _product(elements: Tensor, scales: Tensor, of_tensor: Tensor) -> Tensor:
    blocks: Tensor = elements.view(*scales.shape, -1) * scales[..., None] * of_tensor
    return blocks.view(elements.shape)


if __name__ == "__main__":
    main()
