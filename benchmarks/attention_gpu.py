"""How long attention takes on a GPU, forward and backward, and what it holds: each way beside the others, by turns.

    python benchmarks/attention_gpu.py [--tokens 4096] [--heads 32] [--groups 8] [--widths 64 128 192/128]
                                       [--schemes bf16 FA_mxfp8 mxfp8 hifp8] [--dtype bfloat16] [--repeats 20]

    plain      product by product, T x T of scores and probabilities held
    fused      torch's scaled_dot_product_attention, where the scheme allows it
    tiles      tiles of torch (training.attention=tiled without kernels)
    triton     tiles of Triton

Needs a CUDA device and this checkout on the path (PYTHONPATH). Of one sequence, causal. A scheme quantises q, k, v, P,
dO and dS in all six products (`bf16` none, `FA_mxfp8` q and k alone, as the shipped scheme does). Printed are the
median time; TFLOP/s, counting the six products 2 T^2 width heads each, halved for the causal mask, whatever a way makes
again; and the most memory beyond the operands, beside the bytes that have to be read and written once: q, k, v, o, dO,
dq, dk and dv. Before it is timed, Triton's result is held against that of the tiles, as the proof does.

Without a GPU, TRITON_INTERPRET=1 and `--device cpu --tokens 64 --heads 2 --groups 1 --repeats 1` check the program; its
numbers then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.formats.kernels import gpu
from quantexp.quant.attention import fusable, fused, tiled
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.product_context import watch_products
from quantexp.quant.step_state import StepState, use_step_state

WARMUP = 3
#: The products that every way has to make: S, dq and dk of the width of keys, o, dP and dv of that of values.
PRODUCTS_D = PRODUCTS_E = 3


def declared(scheme: str) -> ModulePrecision:
    """An attention of which every operand is in the format, or a shipped scheme's."""
    words = [f"quant={scheme}"]
    if scheme != "bf16" and not scheme.startswith("FA_"):
        slots = ("dgrad_p.dO", "dgrad_v.P", "dgrad_v.dO")
        own = [f"quant.pv.{slot}.format={scheme}" for slot in slots]
        words = [f"quant=more/FA_full_{scheme}", f"quant/pv={scheme}", *own]
    experiment = compose(["training=fast", *words], None, {})
    return precision_map(experiment.model, experiment.quant)[ModuleId(0, "attention")]


class Case:
    """One way to multiply one attention."""

    def __init__(self, name: str, attention: Callable[..., Tensor], with_kernels: bool) -> None:
        self.name, self.attention, self.with_kernels = name, attention, with_kernels
        self.peak = 0

    def run(self, leaves: list[Tensor], dO_TBHE: Tensor) -> None:
        """Forward and backward."""
        choice = tiled.kernels_for if self.with_kernels else lambda *arguments: None
        with patch.object(tiled, "kernels_for", choice):
            o = self.attention(*leaves)
            torch.autograd.grad(o, leaves, dO_TBHE)


def cases_of(precision: ModulePrecision, scale: float) -> list[Case]:
    """The ways that can multiply it."""

    def softmax(S_BHRK: Tensor, start: int) -> Tensor:
        R, K = S_BHRK.shape[2:]
        queries = torch.arange(start, start + R, device=S_BHRK.device)
        hidden = torch.arange(K, device=S_BHRK.device) > queries[:, None]
        masked = S_BHRK.float().masked_fill_(hidden, -10000.0)
        return torch.softmax(masked, dim=-1).to(S_BHRK.dtype)

    call = AttentionCall(precision, scale)

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, B, H, _ = q.shape
        P = softmax(scores(call, q, k).view(B, H, T, T), 0)
        return _by_token(context(call, P.view(B * H, T, T), v), q)

    def fusedly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused.attention(call, q, k, v)

    def by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _by_token(tiled.attention(call, q, k, v, softmax), q)

    cases = [Case("plain", plainly, False), Case("fused", fusedly, False)]
    cases += [Case("tiles", by_tiles, False), Case("triton", by_tiles, True)]
    if any(fusable.obstacles(precision)):
        del cases[1]
    return cases


def _by_token(o_NTE: Tensor, q_TBHD: Tensor) -> Tensor:
    T, B, H, _ = q_TBHD.shape
    return o_NTE.view(B, H, T, -1).permute(2, 0, 1, 3)


def fitting(cases: list[Case], leaves: list[Tensor], dO_TBHE: Tensor) -> list[Case]:
    """Those for which the device's memory is enough."""
    fit = []
    for case in cases:
        with contextlib.suppress(torch.OutOfMemoryError):
            case.run(leaves, dO_TBHE)
            fit.append(case)
        if dO_TBHE.is_cuda:
            torch.cuda.empty_cache()
    return fit


def timed(
    cases: list[Case], leaves: list[Tensor], dO_TBHE: Tensor, repeats: int
) -> dict[str, float]:
    """The median time of each case in seconds; the cases take turns."""
    taken: dict[str, list[float]] = {case.name: [] for case in cases}
    on_gpu = dO_TBHE.is_cuda
    for turn in range(WARMUP * on_gpu + repeats):
        for case in cases:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            case.run(leaves, dO_TBHE)
            if on_gpu:
                torch.cuda.synchronize()
                case.peak = torch.cuda.max_memory_allocated() - before
            if turn >= WARMUP * on_gpu:
                taken[case.name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def rows(scheme: str, widths: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way to multiply one scheme at one pair of widths, `192/128` or `64`."""
    D, _, E = widths.partition("/")
    width, value_width = int(D), int(E or D)
    leaves, dO = operands(width, value_width, arguments)
    cases = cases_of(declared(scheme), width**-0.5)
    with watch_products():
        cases[-1].run(leaves, dO)
    cases = fitting(cases, leaves, dO)
    times = timed(cases, leaves, dO, arguments.repeats)
    products = PRODUCTS_D * width + PRODUCTS_E * value_width
    flops = products * arguments.tokens**2 * arguments.heads
    return [
        {
            "scheme": scheme,
            "widths": f"{width}/{value_width}",
            "way": case.name,
            "ms": times[case.name] * 1e3,
            "TFLOP/s": flops / times[case.name] / 1e12,
            "of plain": times[case.name] / times["plain"] if "plain" in times else None,
            "MB held": case.peak / 1e6,
            "MB in and out": 2 * sum(x.nbytes for x in (*leaves, dO)) / 1e6,
        }
        for case in cases
    ]


def operands(D: int, E: int, arguments: argparse.Namespace) -> tuple[list[Tensor], Tensor]:
    """q, k and v of one sequence, and the gradient of o."""
    T, H, G = arguments.tokens, arguments.heads, arguments.groups
    generator = torch.Generator(arguments.device).manual_seed(1)

    def some(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=arguments.device)
        return x.to(getattr(torch, arguments.dtype))

    leaves = [some(T, 1, H, D), some(T, 1, G, D), some(T, 1, G, E)]
    return [x.requires_grad_() for x in leaves], some(T, 1, H, E)


def table(scheme: str, widths: str, arguments: argparse.Namespace) -> None:
    """Print all ways of one scheme and one pair of widths."""
    for row in rows(scheme, widths, arguments):
        sys.stdout.write(
            f"{row['scheme']:10} {row['widths']:9} {row['way']:7} {row['ms']:9.3f} ms {row['TFLOP/s']:7.2f} TFLOP/s "
            f"{row['of plain']:6.3f} of plain's time, {row['MB held']:9.1f} MB held, "
            f"{row['MB in and out']:.1f} MB in and out\n"
        )
    sys.stdout.flush()


@contextmanager
def on(device: str) -> Iterator[None]:
    """The kernels take what they are given, and a training is at work."""
    interpreted = patch.object(gpu, "reads", lambda x: True)
    if device == "cpu":
        interpreted.start()
    with use_step_state(StepState(1)) as state:
        state.begin(1, 0)
        yield
    if device == "cpu":
        interpreted.stop()


def main() -> None:
    """Measure all schemes and widths."""
    parser = argparse.ArgumentParser(description="Ways to attention on a GPU.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--widths", nargs="+", default=["64", "128", "192/128"])
    parser.add_argument("--schemes", nargs="+", default=["bf16", "FA_mxfp8", "mxfp8", "hifp8"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    import triton

    name = "CPU, interpreted"
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                "there is no CUDA device: see --help for how to check the program without one"
            )
        if words := gpu.obstacle(torch.device("cuda", torch.cuda.current_device())):
            raise SystemExit(f"the kernels cannot be used here: {words}")
        name = torch.cuda.get_device_name()
    sys.stdout.write(
        f"{name}; torch {torch.__version__}, Triton {triton.__version__}; {arguments.tokens} tokens, "
        f"{arguments.heads} heads, {arguments.groups} of keys, {arguments.dtype}\n"
    )
    with on(arguments.device):
        for widths in arguments.widths:
            for scheme in arguments.schemes:
                table(scheme, widths, arguments)


if __name__ == "__main__":
    main()
