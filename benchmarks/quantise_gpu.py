"""How close the GPU kernels come to the device's memory: against copy_ of the same tensors, by turns in one run.

    python benchmarks/quantise_gpu.py [--shapes 8192x8192 16384x16384] [--dtypes bfloat16 float32] [--repeats 30]
                                      [--peers eager compile torchao] [--tune]

Needs torch with CUDA and its Triton, and this checkout on the path (PYTHONPATH); nothing else of quantexp's
requirements. A matrix is quantised along its last axis, along its first, and along both from one read; outputs are
reused, inputs alternate. Counted are the bytes that must move: what is read once and written once. The ratio is that to
copy_'s bandwidth, which moves two tensors; both copies at once move three, and so does HiF8 with its amax. `--peers`
adds torch's own code, the same through torch.compile for MX and HiF8, and torchao's to_mx and back. `--tune` measures
every candidate launch (`CANDIDATES` in `kernels/gpu_panels.py`), and names the quickest.

Every case is compared with torch's code before it is timed. Without a GPU, TRITON_INTERPRET=1 and `--device cpu
--shapes 64x64` check the program; its numbers then mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quantise_peers import by_compiled_torch, by_torch, torchao_round_trip
from torch import Tensor

from quantexp.formats import Transform, quantise, random_signs
from quantexp.formats.definitions.files import declared_by_name
from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import gpu, torch_alone
from quantexp.formats.kernels.gpu_panels import CANDIDATES, LAUNCHES
from quantexp.formats.layout import Draw
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.types import Family

#: As the schemes set them.
FORMATS = {
    "mxfp8 rceil": resolve("mxfp8", scale_rule="rceil"),
    "mxfp8 floor": resolve("mxfp8", scale_rule="floor"),
    "mxfp4 floor": resolve("mxfp4", scale_rule="floor"),
    "hifp8": resolve("hifp8"),
    "hifp8 current": resolve("hifp8", scaling="current"),
    "nvfp4": resolve("nvfp4", scaling="none"),
    "nvfp4 current": resolve("nvfp4", scaling="current"),
    "fp8 1x128": resolve(declared_by_name("fp8_1x128", {})),
    "fp8 128x128": resolve(declared_by_name("fp8_128x128", {})),
    "mxint8": resolve(declared_by_name("mxint8", {})),
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


PEERS = ("eager", "compile", "torchao")


class Tensors:
    """Two inputs and two outputs of one shape."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.inputs = [
            torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
        ]
        self.outputs = [torch.empty_like(self.inputs[0]) for _ in range(2)]

    def input(self, turn: int) -> Tensor:
        """The one whose turn it is."""
        return self.inputs[turn % 2]


def cases_of(tensors: Tensors, peers: Sequence[str] = ()) -> list[Case]:
    """All that is timed on tensors of one shape and dtype, the copy first."""
    first = tensors.outputs[0]
    cases = [Case("copy_", lambda turn: _copy(first, tensors.input(turn)), 2)]
    for name, spec in FORMATS.items():
        if spec.depends_on_axis:
            for axis, where in ((1, "last axis"), (0, "first axis")):
                cases.append(_alone(f"{name}, {where}", tensors, spec, axis))
                cases += _peers(f"{name}, {where}", tensors, spec, axis, peers)
            cases.append(_both(f"{name}, both axes", tensors, spec))
        else:
            cases.append(_alone(name, tensors, spec, 1))
            cases += _peers(name, tensors, spec, 1, peers)
            if spec.scaling.value != "none":
                cases.append(_with_amax(f"{name}, with its amax", tensors, spec))
    signs = random_signs(32, 1, 2, first.device)
    cases.append(_drawn("mxfp4 at random", tensors, None))
    cases.append(_drawn("mxfp4 at random, transformed", tensors, Transform(32, signs)))
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
    kernel = None
    if gpu.has_own_kernel(spec):
        of_mx = "mx_tile" if axis == 0 else "mx_flat"
        kernel = of_mx if spec.fmt.family is Family.MX else "hif8_flat"

    def run(turn: int) -> None:
        gpu.quantise(tensors.input(turn), tensors.outputs[0], spec, axis, scales[turn % 2])

    return Case(name, run, 2, kernel)


def _both(name: str, tensors: Tensors, spec: QuantSpec) -> Case:
    first, second = tensors.outputs
    scales = [tensor_scale(x, spec, None) for x in tensors.inputs]

    def run(turn: int) -> None:
        gpu.quantise_both(tensors.input(turn), first, second, spec, 0, scales[turn % 2])

    return Case(name, run, 3, "mx_tile" if gpu.has_own_kernel(spec) else None)


def _drawn(name: str, tensors: Tensors, transform: Transform | None) -> Case:
    """MXFP4 rounded at random, after a transform or not, as in arXiv 2502.20586."""
    spec = resolve("mxfp4", rounding="stochastic", pre_scale=True)
    y = tensors.outputs[0]

    def run(turn: int) -> None:
        gpu.quantise(tensors.input(turn), y, spec, 1, None, Draw(1, turn), transform)

    return Case(name, run, 2)


def _peers(
    name: str, tensors: Tensors, spec: QuantSpec, axis: int, peers: Sequence[str]
) -> Iterator[Case]:
    """The same by others; torchao has MX along the last axis."""
    scales = [tensor_scale(x, spec, None) for x in tensors.inputs]
    y = tensors.outputs[0]
    if "eager" in peers:
        yield Case(
            f"{name}, torch",
            lambda turn: by_torch(tensors.input(turn), y, spec, axis, scales[turn % 2]),
            2,
        )
    if "compile" in peers and gpu.has_own_kernel(spec):
        compiled = by_compiled_torch(spec, axis)
        yield Case(
            f"{name}, torch.compile",
            lambda turn: compiled(tensors.input(turn), y, scales[turn % 2]),
            2,
        )
    if "torchao" in peers and axis == 1 and spec.fmt.family is Family.MX:
        round_trip = torchao_round_trip(*name.partition(",")[0].split())
        yield Case(f"{name}, torchao", lambda turn: _discard(round_trip(tensors.input(turn))), 2)


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
        has_axis = spec.depends_on_axis
        if has_axis:
            for output in tensors.outputs:
                output.fill_(3.0)
            gpu.quantise_both(x, tensors.outputs[0], tensors.outputs[1], spec, 0, scale)
            both = [output.clone() for output in tensors.outputs]
        for axis in (0, 1) if has_axis else (1,):
            with torch_alone():
                quantise(x, spec, axis=axis, out=expected)
            tensors.outputs[0].fill_(3.0)
            gpu.quantise(x, tensors.outputs[0], spec, axis, scale)
            for y in [tensors.outputs[0], *([both[axis]] if has_axis else [])]:
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


def rows(cases: list[Case], tensors: Tensors, repeats: int, device: str) -> list[dict[str, Any]]:
    """A row for each case of one shape and dtype: its time, bandwidth and share of copy_'s bandwidth."""
    times = timed(cases, repeats, device)
    x = tensors.inputs[0]
    copied = 2 * x.nbytes / times["copy_"]
    return [
        {
            "shape": "x".join(map(str, x.shape)),
            "dtype": str(x.dtype).removeprefix("torch."),
            "case": case.name,
            "us": times[case.name] * 1e6,
            "GB/s": case.transfers * x.nbytes / times[case.name] / 1e9,
            "of copy_": case.transfers * x.nbytes / times[case.name] / copied,
        }
        for case in cases
    ]


def table(cases: list[Case], tensors: Tensors, arguments: argparse.Namespace) -> None:
    """Print all cases of one shape and dtype."""
    for row in rows(cases, tensors, arguments.repeats, arguments.device):
        sys.stdout.write(
            f"{row['shape']:12} {row['dtype']:9} {row['case']:38} {row['us']:9.1f} us {row['GB/s']:7.0f} GB/s "
            f"{row['of copy_']:6.3f} of copy_\n"
        )
    sys.stdout.flush()


def tune(cases: list[Case], tensors: Tensors, arguments: argparse.Namespace) -> None:
    """Print how near each candidate launch of each kernel comes to the copy, on average over its cases."""
    shape = "x".join(map(str, tensors.inputs[0].shape))
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
        words = f"{shape:12} {str(dtype).removeprefix('torch.'):9} {kernel:9}"
        for mean, launch, ratios in sorted(results, key=lambda one: -one[0]):
            mark = "chosen" if launch == chosen else ""
            each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            sys.stdout.write(
                f"{words} {launch.blocks:4} blocks {launch.num_warps} warps {mean:6.3f} {mark:6} ({each})\n"
            )
    sys.stdout.flush()


def shape_of(words: str) -> tuple[int, int]:
    """`8192x14336` as extents."""
    rows, columns = map(int, words.split("x"))
    return rows, columns


def main() -> None:
    """Measure all shapes and dtypes."""
    parser = argparse.ArgumentParser(description="The GPU kernels beside copy_.")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(8192,) * 2, (16384,) * 2])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="time these, too")
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
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            tensors = Tensors(shape, getattr(torch, dtype), arguments.device)
            compare(tensors)
            cases = cases_of(tensors, arguments.peers)
            if arguments.tune:
                tune(cases, tensors, arguments)
            table(cases, tensors, arguments)
            del tensors, cases


if __name__ == "__main__":
    main()
