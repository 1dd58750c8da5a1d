"""How close quantisation on a CPU comes to the memory: against copy_ of the same tensors, by turns in one run.

    python benchmarks/quantise.py [--size 8192] [--threads 2] [--turns 12] [--slow-turns 1]
                                  [--flags=-mno-avx512f]

A square tensor is quantised along its last axis, along its first, and along both from one read; outputs are reused,
inputs alternate, and every turn runs each case once. Counted are the bytes that must move, each once: one tensor read
and one written, two written for both axes. `of copy` is that bandwidth over copy_'s: medians, of the same turns. hifp8
with its current scale, and nvfp4, read the tensor twice, which is not counted. `processor` is the same share by the
least processor time, which other programs change less.

Slow cases run in the first `--slow-turns` turns: the torch code (what runs without a compiler), and torchao's eager
code, to_mx and back (`of torchao`: how many times its time). `--flags` are added to those that the C is compiled with:
-mno-avx512f for older processors.

On CUDA devices: benchmarks/quantise_gpu.py.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from quantise_peers import torchao_round_trip
from torch import Tensor

from quantexp import compiled
from quantexp.formats import (
    Transform,
    quantise,
    quantise_both,
    quantise_transformed,
    random_signs,
    resolve,
)
from quantexp.formats.kernels import cpu, torch_alone

DRAW: dict[str, Any] = {"rounding": "stochastic", "seed": 1, "offset": 2}
#: By the name of the case, which begins with that of the format.
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": {"scale_rule": "rceil"},
    "mxfp4": {"scale_rule": "floor"},
    "hifp8": {},
    "hifp8 current": {"scaling": "current"},
    "mxint8": {},
    "nvfp4": {},
    "nvfp4_16x16": {},
    "fp4_ue5m3": {},
    "fp8_1x128": {},
    "fp8_128x128": {},
    "int4_g128": {},
    "mxfp4 stochastic": DRAW,
    "nvfp4 stochastic": DRAW,
    "fp8_e4m3 stochastic": DRAW,
    **{f"{name} hadamard {block}": {} for name in ("mxfp4", "nvfp4") for block in (16, 64, 256)},
    "mxfp4 stochastic hadamard 64": DRAW,
}
#: What has one copy for all axes.
NO_AXIS = ("hifp8", "nvfp4_16x16", "fp8_128x128", "fp8_e4m3")
#: What torchao quantises, too.
PEERS = ("mxfp8", "mxfp4")


@dataclass
class Case:
    """Something to time, given an input; `slow`: only in the first turns."""

    kernel: str
    format: str
    axis: str
    run: Callable[[Tensor], object]
    slow: bool = False
    transfers: int = 2
    times_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    @property
    def time_s(self) -> float:
        """The median."""
        return statistics.median(self.times_s)


def main() -> None:
    """Measure each dtype by itself."""
    parser = argparse.ArgumentParser(description="Quantisation's bandwidth beside copy_'s.")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--slow-turns", type=int, default=1)
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compiled.FLAGS = (*compiled.FLAGS, *arguments.flags.split())
    kernels = cpu.functions()
    how = "no compiled kernel" if kernels is None else kernels.words
    out = sys.stdout.write
    out(f"{platform.machine()}, {arguments.threads} threads, torch {torch.__version__}, {how}, ")
    out(f"{arguments.size} x {arguments.size}, load {os.getloadavg()[0]:.1f}\n")
    out(
        "| kernel | format | dtype | axis | ms | GB/s | of copy | processor | of torchao |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    for dtype in (torch.bfloat16, torch.float32):
        measure(dtype, arguments)
    out(f"load {os.getloadavg()[0]:.1f}\n")


def measure(dtype: torch.dtype, arguments: argparse.Namespace) -> None:
    """Print a row for each case of a dtype."""
    inputs = [torch.randn(arguments.size, arguments.size).to(dtype) for _ in range(2)]
    outs = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    every = [Case("copy_", "", "", outs[0].copy_), *cases(outs)]
    if arguments.slow_turns:
        every += [*torch_cases(outs), *torchao_cases()]
    for turn in range(arguments.turns):
        for case in every:
            if case.slow and turn >= arguments.slow_turns:
                continue
            start, worked = time.perf_counter(), time.process_time()
            case.run(inputs[turn % 2])
            case.times_s.append(time.perf_counter() - start)
            case.processor_s.append(time.process_time() - worked)
    torchao_s = {case.format: case.time_s for case in every if case.kernel == "torchao"}
    copy_bandwidth = bandwidth(every[0], outs[0])
    for case in every:
        rate = bandwidth(case, outs[0])
        work = min(every[0].processor_s) / min(case.processor_s) * case.transfers / 2
        theirs = torchao_s.get(case.format)
        times = f"{theirs / case.time_s:.1f}" if theirs and case.axis == "last" else ""
        sys.stdout.write(
            f"| {case.kernel} | {case.format} | {str(dtype)[6:]} | {case.axis} | {case.time_s * 1e3:.1f} | "
            f"{rate:.2f} | {rate / copy_bandwidth:.3f} | {work:.3f} | {times} |\n"
        )
        sys.stdout.flush()


def bandwidth(case: Case, y: Tensor) -> float:
    """GB/s."""
    return case.transfers * y.nbytes / case.time_s / 1e9


def cases(outs: tuple[Tensor, Tensor]) -> Iterator[Case]:
    """What `quantise` and `quantise_both` do."""
    for name, options in FORMATS.items():
        fmt = name.split()[0]
        for axis in ("last",) if fmt in NO_AXIS else ("last", "first"):
            run = quantising(fmt, axis, outs[0], options)
            if "hadamard" in name:
                run = transforming(fmt, int(name.split()[-1]), axis, outs[0], options)
            yield Case("compiled", name, axis, run)
        if fmt not in NO_AXIS and len(name.split()) == 1:

            def both(x: Tensor, fmt: str = fmt, options: dict[str, Any] = options) -> object:
                return quantise_both(x, resolve(fmt, **options), axes=(0, 1), out=outs)

            yield Case("compiled", name, "both", both, transfers=3)


def torch_cases(outs: tuple[Tensor, Tensor]) -> Iterator[Case]:
    """The same without a compiler."""
    for case in cases(outs):
        yield Case("torch", case.format, case.axis, alone(case.run), True, case.transfers)


def alone(run: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Without kernels."""

    def by_torch(x: Tensor) -> object:
        with torch_alone():
            return run(x)

    return by_torch


def torchao_cases() -> Iterator[Case]:
    """Blocks of 32 by torchao along the last axis, to codes and back to x's dtype."""
    for fmt in PEERS:
        run = torchao_round_trip(fmt, FORMATS[fmt]["scale_rule"])
        yield Case("torchao", fmt, "last", run, slow=True)


def quantising(
    fmt: str, axis: str, out: Tensor, options: dict[str, Any]
) -> Callable[[Tensor], object]:
    """`quantise` to one format along one axis."""
    return lambda x: quantise(x, fmt, axis=-1 if axis == "last" else 0, out=out, **options)


def transforming(
    fmt: str, block: int, axis: str, out: Tensor, options: dict[str, Any]
) -> Callable[[Tensor], object]:
    """`quantise_transformed` after a random transform in blocks of so many elements."""
    spec = resolve(fmt, rounding=options.get("rounding"))
    draw = {key: options[key] for key in ("seed", "offset") if key in options}
    transform = Transform(block, random_signs(block, 1, 2, torch.device("cpu")))

    def run(x: Tensor) -> object:
        dim = -1 if axis == "last" else 0
        return quantise_transformed(x, spec, transform, axis=dim, out=out, **draw)

    return run


if __name__ == "__main__":
    main()
