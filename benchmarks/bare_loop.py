"""A run of a small model beside a bare training loop of the same model in plain torch, interleaved.

    python benchmarks/bare_loop.py [--turns 5] [--iterations 30] [--precision bf16|fp32] [WORDS ...]

Each turn starts two processes after each other: `quantexp` with model=tiny, and this file as the bare loop: the same
architecture, sizes and batch on random symbols, torch's matmul and fused attention, its clipping and fused AdamW,
weights in bf16 with main weights in fp32 (or all in fp32), nothing recorded. Given are medians over the turns and their
ratios: of a step (the median iteration after the third), and of the time from the process's start to the end of the
first step, which in quantexp includes the proof. WORDS are for quantexp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Iterations that are not counted.
WARM_UP = 3
BATCH, TOKENS = 4, 128
SETTINGS = [
    *("model=tiny", "dataset=synthetic", "quant=bf16", "capture=off", "analysis.auto=false"),
    *(f"training.seq_length={TOKENS}", f"training.micro_batch_size={BATCH}"),
    *(f"training.global_batch_size={BATCH}", "training.warmup_iterations=2"),
]


def bare(iterations: int, precision: str) -> list[float]:
    """The time of each step, seconds; the model's sizes are those of conf/model/tiny.yaml."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(1)
    width, heads, groups, size, hidden, layers, symbols = 256, 8, 4, 32, 1024, 5, 384
    angle = torch.arange(TOKENS)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    cos, sin = (f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin))

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos.to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
            self.qkv = nn.Linear(width, (heads + 2 * groups) * size, bias=False)
            self.proj = nn.Linear(heads * size, width, bias=False)
            self.fc1 = nn.Linear(width, 2 * hidden, bias=False)
            self.fc2 = nn.Linear(hidden, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            B, T, _ = x.shape
            parts = self.qkv(self.norm1(x)).view(B, T, heads + 2 * groups, size).transpose(1, 2)
            q, k, v = parts.split((heads, groups, groups), dim=1)
            y = functional.scaled_dot_product_attention(
                rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
            )
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, heads * size))
            gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
            result: Tensor = x + self.fc2(functional.silu(gate) * up)
            return result

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(symbols, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.RMSNorm(width, 1e-5)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return functional.linear(self.norm(x), self.embedding.weight)

    model = Model().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    weights = list(model.parameters())
    main = [weight.detach().float().clone() for weight in weights]
    optimizer = torch.optim.AdamW(main, lr=1e-3, weight_decay=0.1, fused=True)
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        ids = torch.randint(257, (BATCH, TOKENS + 1))
        logits = model(ids[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, copy in zip(weights, main, strict=True):
            assert weight.grad is not None
            copy.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(main, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(weights, main, strict=True):
                weight.copy_(copy)
        times.append(time.perf_counter() - start)
    return times


def step_and_start(times: list[float], whole_s: float) -> tuple[float, float]:
    """The median step after the warm-up, and the time until the first step's end, seconds."""
    return statistics.median(times[WARM_UP:]), whole_s - sum(times[1:])


def of_bare(arguments: argparse.Namespace) -> tuple[float, float]:
    """As `step_and_start`, of a process that is the bare loop."""
    command = [sys.executable, __file__, "--bare", "--precision", arguments.precision]
    command += ["--iterations", str(arguments.iterations)]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return step_and_start(json.loads(result.stdout), time.perf_counter() - start)


def of_quantexp(arguments: argparse.Namespace) -> tuple[float, float]:
    """As `step_and_start`, of a run; the time after its last step is not counted."""
    with tempfile.TemporaryDirectory() as root:
        words = [*SETTINGS, *arguments.words, f"training.iterations={arguments.iterations}"]
        words += [f"training.precision={arguments.precision}", f"paths.root={root}"]
        start = time.time()
        subprocess.run(["quantexp", *words], capture_output=True, check=True)
        (metrics,) = Path(root).glob("*/metrics.jsonl")
        times = [
            float(json.loads(line)["step_time_s"]) for line in metrics.read_text().splitlines()
        ]
        return step_and_start(times, metrics.stat().st_mtime - start)


def main() -> None:
    """Measure in alternation."""
    parser = argparse.ArgumentParser(description="A small run beside a bare loop.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--bare", action="store_true", help="be the bare loop")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    if arguments.bare:
        json.dump(bare(arguments.iterations, arguments.precision), sys.stdout)
        return
    turns: list[dict[str, Any]] = []
    for _ in range(arguments.turns):
        turns.append({"bare": of_bare(arguments), "quantexp": of_quantexp(arguments)})
        sys.stderr.write(f"turn {len(turns)} of {arguments.turns}\n")
    for i, what in enumerate(("a step", "start to the end of the first step")):
        ours, theirs = ([turn[name][i] for turn in turns] for name in ("quantexp", "bare"))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        sys.stdout.write(
            f"{what}: {statistics.median(ours):.3f} s, bare {statistics.median(theirs):.3f} s, {ratio:.2f} of it\n"
        )


if __name__ == "__main__":
    main()
