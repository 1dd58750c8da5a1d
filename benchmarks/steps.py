"""Forward and backward of Llama 3.2 1B under each scheme, beside Megatron-Core's own classes, interleaved.

    python benchmarks/steps.py [--repeats 20] [--layers 2] [--tokens 512] [WORDS ...]

One program holds a model for each case; they take turns on the same tokens, so that what else the machine does falls on
all of them. `megatron` is the stock layer spec: no class of quantexp. Optimizer, data and reporting are no part of it.
WORDS are a case each: quant=linear_mxfp8, or quoted 'quant=bf16 training.attention=tiled'. Given are the median, and
the median over turns of the ratio to `megatron` of the same turn.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

SCHEMES = [
    "bf16",
    "linear_mxfp8",
    "FA_linear_mxfp8",
    "FA_linear_mxfp4",
    "FA_linear_hifp8",
]


def prepared(words: list[str], layers: int, tokens: int, stock: bool) -> Callable[[], None]:
    """A function that goes forward and backward once."""
    import torch

    from quantexp.compose import compose
    from quantexp.megatron.model import build_model, set_precision
    from quantexp.megatron.specs import injected, stock_spec
    from quantexp.quant.precision import precision_map

    sizes = [f"model.num_layers={layers}", f"training.seq_length={tokens}"]
    batch = ["training.micro_batch_size=1", "training.global_batch_size=1"]
    experiment = compose(["training=fast", *sizes, *batch, *words])
    spec = stock_spec(experiment.model)
    gpt, _ = build_model(experiment.model, experiment.training, spec if stock else injected(spec))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = gpt.to(device).bfloat16()
    if not stock:
        declared = precision_map(experiment.model, experiment.quant)
        set_precision(gpt, declared, experiment.training.attention)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (1, tokens), generator=generator).to(device)
    positions = torch.arange(tokens, device=device)[None]

    def step() -> None:
        model(ids, positions, None, labels=ids).mean().backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Measure all cases by turns."""
    parser = argparse.ArgumentParser(description="Step times beside stock Megatron-Core.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "words",
        nargs="*",
        help="schemes instead of the usual ones: quant=..., or quoted with more keys",
    )
    arguments = parser.parse_args()

    import torch

    from quantexp.compose import compose
    from quantexp.megatron.session import session
    from quantexp.quant.moment import Moment, during

    out = sys.stdout.write
    schemes = arguments.words or [f"quant={scheme}" for scheme in SCHEMES]
    sizes = (arguments.layers, arguments.tokens)
    training = compose(["training=fast"]).training
    with session(training), during(Moment(1)):
        cases = {"megatron": prepared([], *sizes, stock=True)}
        cases |= {
            word.removeprefix("quant="): prepared(word.split(), *sizes, stock=False)
            for word in schemes
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(arguments.repeats + 2):
            for name, step in cases.items():
                start = time.perf_counter()
                step()
                if turn > 1:
                    times[name].append(time.perf_counter() - start)
    out(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads, load "
        f"{os.getloadavg()[0]:.1f}; {arguments.layers} layers, {arguments.tokens} tokens\n"
    )
    for name, taken in times.items():
        ratios = [t / stock for t, stock in zip(taken, times["megatron"], strict=True)]
        out(
            f"{name:20} {statistics.median(taken) * 1e3:7.0f} ms   {statistics.median(ratios):.3f} of megatron's, "
            f"quickest {min(taken) * 1e3:.0f} ms\n"
        )


if __name__ == "__main__":
    main()
