"""How close the GPU kernels come to the device's memory: against copy_ of the same tensors, by turns in one run.

    python benchmarks/quantise_gpu.py [--sizes 8192 16384] [--dtypes bfloat16 float32] [--repeats 30] [--eager] [--tune]

Needs torch with CUDA and its Triton, and this checkout on the path (PYTHONPATH); nothing else of quantexp's
requirements. A square tensor is quantised along its last axis, along its first, and along both from one read; outputs
are reused, inputs alternate. Counted are the bytes that must move: what is read once and written once. The ratio is
that to copy_'s bandwidth, which moves two tensors; both copies at once move three, and so does HiF8 with its amax.
`--eager` adds torch's own code. `--tune` measures every candidate of `kernels/launches.py`, and names the quickest.

Every case is compared with torch's code before it is timed. Without a GPU, TRITON_INTERPRET=1 and `--device cpu
--sizes 64` check the program; its numbers then mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats.kernels import gpu
from quantexp.formats.kernels.gpu import CANDIDATES, LAUNCHES
from quantexp.formats.layout import outer_axis_inner
from quantexp.formats.mx import quantise_mx
from quantexp.formats.per_tensor import quantise_flat
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Family

#: As the schemes set them.
FORMATS = {
    "mxfp8 rceil": resolve("mxfp8", scale_rule="rceil"),
    "mxfp8 floor": resolve("mxfp8", scale_rule="floor"),
    "mxfp4 floor": resolve("mxfp4", scale_rule="floor"),
    "hifp8": resolve("hifp8"),
    "hifp8 current": resolve("hifp8", scaling="current"),
}
WARMUP = 3


@dataclass
class Case:
    """Something to time: it takes the number of the turn."""

    name: str
    run: Callable[[int], None]
    #: tensors that have to be read or written.
    transfers: int
    kernel: str | None = None


class Tensors:
    """Two inputs and two outputs of one size."""

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.inputs = [
            torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2)
        ]
        self.outputs = [torch.empty_like(self.inputs[0]) for _ in range(2)]

    def input(self, turn: int) -> Tensor:
        """The one whose turn it is."""
        return self.inputs[turn % 2]


def cases_of(tensors: Tensors, eager: bool) -> list[Case]:
    """All that is timed on tensors of one size and dtype, the copy first."""
    first, second = tensors.outputs
    cases = [Case("copy_", lambda turn: _copy(first, tensors.input(turn)), 2)]
    for name, spec in FORMATS.items():
        if spec.fmt.family is Family.MX:
            for axis, where in ((1, "last axis"), (0, "first axis")):
                cases.append(_alone(f"{name}, {where}", tensors, spec, axis))
                if eager:
                    cases.append(_eager(f"{name}, {where}, torch", tensors, spec, axis))
            cases.append(
                Case(
                    f"{name}, both axes",
                    lambda turn, spec=spec: gpu.quantise_both(  # type: ignore[misc]
                        tensors.input(turn), first, second, spec, 0
                    ),
                    3,
                    "mx_tile",
                )
            )
        else:
            cases.append(_alone(name, tensors, spec, 1))
            if eager:
                cases.append(_eager(f"{name}, torch", tensors, spec, 1))
            if spec.scaling.value != "none":
                cases.append(_with_amax(f"{name}, with its amax", tensors, spec))
    cases.append(
        Case("amax", lambda turn: _discard(gpu.finite_amax(tensors.input(turn))), 1, "amax_flat")
    )
    return cases


def _discard(amax: Tensor) -> None:
    del amax


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _alone(name: str, tensors: Tensors, spec: QuantSpec, axis: int) -> Case:
    scales = [tensor_scale(x, spec, None) for x in tensors.inputs]
    is_mx = spec.fmt.family is Family.MX
    kernel = ("mx_tile" if axis == 0 else "mx_flat") if is_mx else "hif8_flat"

    def run(turn: int) -> None:
        gpu.quantise(tensors.input(turn), tensors.outputs[0], spec, axis, scales[turn % 2])

    return Case(name, run, 2, kernel)


def _eager(name: str, tensors: Tensors, spec: QuantSpec, axis: int) -> Case:
    scales = [tensor_scale(x, spec, None) for x in tensors.inputs]

    def run(turn: int) -> None:
        x, y = tensors.input(turn), tensors.outputs[0]
        _by_torch(x, y, spec, axis, scales[turn % 2])

    return Case(name, run, 2)


def _by_torch(x: Tensor, y: Tensor, spec: QuantSpec, axis: int, scale: Tensor | None) -> None:
    """Torch's own code, whichever kernels there are."""
    if spec.fmt.family is Family.MX:
        extents = outer_axis_inner(x.shape, axis)
        quantise_mx(x.view(extents), y.view(extents), spec)
    else:
        quantise_flat(x.view(-1), y.view(-1), spec, scale)


def _with_amax(name: str, tensors: Tensors, spec: QuantSpec) -> Case:
    def run(turn: int) -> None:
        x = tensors.input(turn)
        scale = tensor_scale(x, spec, gpu.finite_amax(x))
        gpu.quantise(x, tensors.outputs[0], spec, 1, scale)

    return Case(name, run, 3)


def compare(tensors: Tensors) -> None:
    """Stop unless the kernels give what torch's code gives, all of it, on the first input."""
    x = tensors.inputs[0]
    if not torch.equal(gpu.finite_amax(x), x.abs().amax().float()):
        raise SystemExit("amax is not what torch gives")
    expected = torch.empty_like(x)
    for name, spec in FORMATS.items():
        scale = tensor_scale(x, spec, None)
        is_mx = spec.fmt.family is Family.MX
        if is_mx:
            for output in tensors.outputs:
                output.fill_(3.0)
            gpu.quantise_both(x, tensors.outputs[0], tensors.outputs[1], spec, 0)
            both = [output.clone() for output in tensors.outputs]
        for axis in (0, 1) if is_mx else (1,):
            _by_torch(x, expected, spec, axis, scale)
            tensors.outputs[0].fill_(3.0)
            gpu.quantise(x, tensors.outputs[0], spec, axis, scale)
            for y in [tensors.outputs[0], *([both[axis]] if is_mx else [])]:
                if not torch.equal(y, expected):
                    raise SystemExit(f"{name} along axis {axis} is not what torch's code gives")


def timed(cases: list[Case], repeats: int, device: str) -> dict[str, float]:
    """The median time of each case in seconds; the cases take turns."""
    taken: dict[str, list[float]] = {case.name: [] for case in cases}
    if device == "cpu":
        for turn in range(repeats):
            for case in cases:
                start = time.perf_counter()
                case.run(turn)
                taken[case.name].append(time.perf_counter() - start)
        return {name: statistics.median(times) for name, times in taken.items()}
    events = []
    for turn in range(WARMUP + repeats):
        for case in cases:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(  # type: ignore[no-untyped-call]
                400_000
            )  # the host is ahead, so that launching is no part of the time
            begin.record()
            case.run(turn)
            end.record()
            events.append((turn, case.name, begin, end))
    torch.cuda.synchronize()
    for turn, name, begin, end in events:
        if turn >= WARMUP:
            taken[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def table(cases: list[Case], tensors: Tensors, arguments: argparse.Namespace) -> None:
    """Print all cases of one size and dtype."""
    times = timed(cases, arguments.repeats, arguments.device)
    num_bytes = tensors.inputs[0].nbytes
    copied = 2 * num_bytes / times["copy_"]
    size = tensors.inputs[0].shape[0]
    dtype = str(tensors.inputs[0].dtype).removeprefix("torch.")
    for case in cases:
        rate = case.transfers * num_bytes / times[case.name]
        sys.stdout.write(
            f"{size:6} {dtype:9} {case.name:30} {times[case.name] * 1e6:9.1f} us {rate / 1e9:7.0f} GB/s "
            f"{rate / copied:6.3f} of copy_\n"
        )
    sys.stdout.flush()


def tune(cases: list[Case], tensors: Tensors, arguments: argparse.Namespace) -> None:
    """Print how near each candidate launch of each kernel comes to the copy, on average over its cases."""
    size = tensors.inputs[0].shape[0]
    dtype = tensors.inputs[0].dtype
    is_pairs = dtype == torch.bfloat16
    for kernel, candidates in CANDIDATES.items():
        mine = [cases[0]]
        mine += [case for case in cases if case.kernel == kernel]
        chosen = LAUNCHES[kernel, is_pairs]
        results = []
        for launch in candidates:
            LAUNCHES[kernel, is_pairs] = launch
            times = timed(mine, arguments.repeats, arguments.device)
            copied = times["copy_"] / 2
            ratios = {case.name: copied * case.transfers / times[case.name] for case in mine[1:]}
            results.append((statistics.mean(ratios.values()), launch, ratios))
        LAUNCHES[kernel, is_pairs] = chosen
        words = f"{size:6} {str(dtype).removeprefix('torch.'):9} {kernel:9}"
        for mean, launch, ratios in sorted(results, key=lambda one: -one[0]):
            mark = "chosen" if launch == chosen else ""
            each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            sys.stdout.write(
                f"{words} {launch.blocks:4} blocks {launch.num_warps} warps {mean:6.3f} {mark:6} ({each})\n"
            )
    sys.stdout.flush()


def main() -> None:
    """Measure all sizes and dtypes."""
    parser = argparse.ArgumentParser(description="The GPU kernels beside copy_.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--eager", action="store_true", help="time torch's own code, too")
    parser.add_argument("--tune", action="store_true", help="time every candidate launch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    import triton

    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                "there is no CUDA device: see --help for how to check the program without one"
            )
        if words := gpu.obstacle(torch.device("cuda", torch.cuda.current_device())):
            raise SystemExit(f"the kernels cannot be used here: {words}")
        device = torch.cuda.get_device_properties(0)
        name = f"{device.name}, {device.multi_processor_count} multiprocessors"
    else:
        name = "CPU, interpreted"
    sys.stdout.write(f"{name}; torch {torch.__version__}, Triton {triton.__version__}\n")
    for size in arguments.sizes:
        for dtype in arguments.dtypes:
            tensors = Tensors(size, getattr(torch, dtype), arguments.device)
            compare(tensors)
            cases = cases_of(tensors, arguments.eager)
            if arguments.tune:
                tune(cases, tensors, arguments)
            table(cases, tensors, arguments)
            del tensors, cases


if __name__ == "__main__":
    main()
