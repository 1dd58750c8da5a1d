"""Forward and backward of a model under each scheme, beside Megatron-Core's own classes, interleaved.

    python benchmarks/steps.py [--repeats 20] [--model llama32-1b] [--layers 2] [--tokens 512]
                               [--micro-batches 1] [--attention plain|tiled|fused] [--all] [WORDS ...]

One program holds two models, one of the stock layer spec (`megatron`, no class of quantexp) and one of ours, which
takes each scheme's precision map in turn. The cases alternate on the same tokens, and each turn begins with another, so
that what else the machine does, and what the case before left in caches and heap, falls on all of them. Optimizer, data
and reporting are no part of a step. Given are the median, the median over turns of the ratio to `megatron` and to
`bf16` of the same turn (bf16 has the schemes' attention path), the same of processor time, which other programs change
less, and what a step takes of memory at its peak beyond what is held before it: the device's own count on a GPU, the
resident set on a CPU. Ctrl-C reports the turns until then.
WORDS are a case each: quant=linear_mxfp8, or quoted 'quant=bf16 training.attention=tiled'; `--all` is all ten schemes.
It runs on a GPU where torch has one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEMES = ["bf16", "linear_mxfp8", "FA_linear_mxfp8", "FA_linear_mxfp4", "FA_linear_hifp8"]
STOCK = "megatron"
#: Turns that are not counted.
WARM_UP = 2

Step = Callable[[], None]
Times = dict[str, list[float]]


def cases(arguments: argparse.Namespace, words: list[str]) -> dict[str, Step]:
    """By name, a function that goes forward and backward once for each micro-batch."""
    import torch

    from quantexp.config.compose import compose
    from quantexp.quant.precision import precision_map
    from quantexp.quant.weight_cache.weights import WeightCopies
    from quantexp.training.megatron.initial_weights import load_initial_weights
    from quantexp.training.megatron.model import build_model, set_precision, share_weight_copies
    from quantexp.training.megatron.specs import inject, stock_spec

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    T, number = arguments.tokens, arguments.micro_batches
    sizes = [f"model={arguments.model}", f"model.num_layers={arguments.layers}"]
    sizes += [f"training.seq_length={T}"]
    sizes += [
        "training.micro_batch_size=1",
        f"training.global_batch_size={number}",
    ]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (1, T), generator=generator).to(device)
    positions = torch.arange(T, device=device)[None]

    def passes(model: Any) -> None:
        for _ in range(number):
            model(ids, positions, None, labels=ids).mean().backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def built(spec: Any) -> Any:
        experiment = compose(["training=fast", *sizes])
        gpt, _ = build_model(experiment.model, experiment.training, spec)
        load_initial_weights([gpt], experiment)
        return gpt.to(device).bfloat16()

    model = compose(["training=fast", *sizes]).model
    stock, ours, copies = (
        built(stock_spec(model)),
        built(inject(stock_spec(model))),
        WeightCopies(),
    )
    share_weight_copies(ours, copies)

    def scheme(word: str) -> Step:
        overrides = word.split()
        if not any(each.startswith("training.attention=") for each in overrides):
            overrides.append(f"training.attention={arguments.attention}")
        experiment = compose(["training=fast", *sizes, *overrides])
        declared = precision_map(experiment.model, experiment.quant)

        def step() -> None:
            with copies.step(several=number > 1):
                passes(ours)

        def prepared() -> Step:
            set_precision(ours, declared, experiment.training.attention)
            return step

        return lambda: prepared()()

    steps: dict[str, Step] = {STOCK: lambda: passes(stock)}
    return steps | {word.removeprefix("quant="): scheme(word) for word in words}


def peak_bytes(step: Step) -> int:
    """What one step takes at its peak beyond what is held before it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def measured(steps: dict[str, Step], repeats: int) -> tuple[Times, Times]:
    """Seconds of each case, turn by turn: by the clock, and of processor time. Ctrl-C ends with the last whole turn."""
    names = list(steps)
    clock: Times = {name: [] for name in steps}
    processor: Times = {name: [] for name in steps}
    with contextlib.suppress(KeyboardInterrupt):
        for turn in range(repeats + WARM_UP):
            first = turn % len(names)
            taken = {name: _timed(steps[name]) for name in names[first:] + names[:first]}
            if turn >= WARM_UP:
                for name, (by_clock, by_processor) in taken.items():
                    clock[name].append(by_clock)
                    processor[name].append(by_processor)
    return clock, processor


def _timed(step: Step) -> tuple[float, float]:
    start, worked = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start, time.process_time() - worked


def results(arguments: argparse.Namespace, words: list[str]) -> tuple[Times, Times, dict[str, int]]:
    """Of all cases, by turns: seconds by the clock, of processor time, and the peak of memory in bytes."""
    steps = cases(arguments, words)
    clock, processor = measured(steps, arguments.repeats)
    return clock, processor, {name: peak_bytes(step) for name, step in steps.items()}


def rows(clock: Times, processor: Times, peaks: dict[str, int]) -> list[dict[str, Any]]:
    """A row for each case; ratios are medians over the turns."""

    def ratio(times: Times, name: str, base: str = STOCK) -> float | None:
        if base not in times:
            return None
        pairs = zip(times[name], times[base], strict=True)
        return statistics.median(one / other for one, other in pairs)

    return [
        {
            "case": name,
            "ms": statistics.median(taken) * 1e3,
            f"of {STOCK}": ratio(clock, name),
            "of bf16": ratio(clock, name, "bf16"),
            "quickest ms": min(taken) * 1e3,
            "processor s": statistics.median(processor[name]),
            f"processor of {STOCK}": ratio(processor, name),
            "peak GB": peaks[name] / 1e9,
        }
        for name, taken in clock.items()
    ]


def report(clock: Times, processor: Times, peaks: dict[str, int]) -> None:
    """A line for each case."""
    for row in rows(clock, processor, peaks):
        beside = f"   {row['of bf16']:.3f} of bf16" if row["of bf16"] else ""
        sys.stdout.write(
            f"{row['case']:16} {row['ms']:7.1f} ms   {row[f'of {STOCK}']:.3f} of {STOCK}{beside}   "
            f"quickest {row['quickest ms']:7.1f} ms   processor time {row['processor s']:.3f} s, "
            f"{row[f'processor of {STOCK}']:.3f} of {STOCK}   peak {row['peak GB']:.2f} GB\n"
        )


def main() -> None:
    """Measure all cases by turns."""
    parser = argparse.ArgumentParser(description="Step times beside stock Megatron-Core.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--model", default="llama32-1b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--attention", choices=["plain", "tiled", "fused"], default="plain")
    parser.add_argument("--all", action="store_true", help="all ten schemes")
    parser.add_argument(
        "words", nargs="*", help="cases instead of the usual ones: quant=..., quoted with more keys"
    )
    arguments = parser.parse_args()

    import torch

    from quantexp.config.compose import compose
    from quantexp.quant.scheme import SCHEMES as TEN
    from quantexp.quant.step_state import StepState, use_step_state
    from quantexp.training.megatron.device import device_name
    from quantexp.training.megatron.session import session

    names = list(TEN) if arguments.all else SCHEMES
    words = arguments.words or [f"quant={name}" for name in names]
    with session(compose(["training=fast"]).training) as device, use_step_state(StepState(1)):
        clock, processor, peaks = results(arguments, words)
        on = device_name(device)
    sys.stdout.write(
        f"{platform.machine()}, {on}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads, load "
        f"{os.getloadavg()[0]:.1f}; {arguments.model}, {arguments.layers} layers, {arguments.tokens} tokens, "
        f"micro-batches {arguments.micro_batches}, attention {arguments.attention}, "
        f"{len(clock[STOCK])} turns\n"
    )
    report(clock, processor, peaks)


if __name__ == "__main__":
    main()
