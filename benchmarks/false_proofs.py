"""Honest runs that the proof refuses: there must be none.

    OMP_NUM_THREADS=1 python benchmarks/false_proofs.py [--runs 1000] [--iterations 6] [--first 0] [--processes 1]
        [--long]

Each run trains a tiny model with another seed, scheme, dtype, path of attention, model, size of the initial weights,
loss scale and learning rate, drawn from its number. Loss scales begin where gradients overflow, and learning rates
reach those at which training diverges, so that operands become very large, very small and zero. With `--long` drawn
checks look as in the long iterations of large models: at two modules of each kind, and at the inside of a layer.
A run counts as refused if it ends with an EngagementError. Everything else that ends a run is printed, too. Each run is
a fork of this process, which has imported what runs import: gloo's threads outlive a run's groups.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.launch.attempt import open_run
from quantexp.proof import turns
from quantexp.runs.device import device_class
from quantexp.runs.status import read_status
from quantexp.training.megatron.without_te import import_megatron
from quantexp.training.worker import Worker

ROOT = Path(__file__).parents[1]
ENDS = ("completed", "refused", "ended otherwise", "combinations left out")
TINY = [
    *("training=fast", "model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=192"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.warmup_iterations=1", "analysis.auto=false", "capture=off"),
    *("tracking.tensorboard=false", "launcher.num_threads=1", "evaluation.samples=2"),
]
LATENT = [
    *("model=deepseek2_lite", "model.num_query_groups=4", "model.head_dim=40"),
    *("model.mla.kv_lora_rank=48", "model.mla.qk_head_dim=24"),
    *("model.mla.qk_pos_emb_head_dim=16", "model.mla.v_head_dim=20", "model.moe.num_experts=4"),
    *("model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=40"),
]
EXPERTS = [
    *("model=deepseek2_lite", "model.mla=null", "model.num_query_groups=2", "model.head_dim=32"),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=40"),
    *("model.moe.num_shared_experts=0", "model.moe.num_dense_layers=0", "model.qk_norm=true"),
]
MODELS: tuple[list[str], ...] = (
    [],
    ["model.qk_norm=true"],
    ["model.qkv_bias=true"],
    ["model.tie_embeddings=true"],
    LATENT,
    EXPERTS,
)


def schemes() -> list[str]:
    """Every shipped scheme that needs no Transformer Engine."""
    folder = ROOT / "conf" / "quant"
    shipped = [file.stem for file in folder.glob("*.yaml")]
    more = [file.stem for file in (folder / "more").glob("*.yaml")]
    return sorted(shipped) + sorted(f"more/{name}" for name in more if not name.startswith("te_"))


def words_of(number: int) -> list[str]:
    """The overrides of a run."""
    draw = random.Random(number)
    names = schemes()
    return [
        *TINY,
        *draw.choice(MODELS),
        f"quant={names[number % len(names)]}",
        f"training.seed={number + 1}",
        f"training.precision={draw.choice(('bf16', 'bf16', 'fp16', 'fp32'))}",
        f"training.attention={draw.choice(('plain', 'tiled', 'fused'))}",
        f"training.initial_loss_scale={2.0 ** draw.randint(8, 36)}",
        f"model.init_std={draw.choice((0.002, 0.02, 0.02, 0.5))}",
        f"training.lr={draw.choice((1e-4, 1e-3, 1e-2, 1e-1))}",
        "training.min_lr=0",
        f"training.seq_length={draw.choice((48, 64, 96))}",
        f"training.recompute={draw.choice(('none', 'full'))}",
        f"training.weight_cache={draw.choice(('true', 'false'))}",
        *(("training.micro_batch_size=2", "training.global_batch_size=4") * (number % 2)),
        f"evaluation.every={draw.choice((2, 4))}",
    ]


def main() -> None:
    """Train the runs and print how many were refused."""
    parser = argparse.ArgumentParser(description="Count honest runs that the proof refuses.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="look as in long iterations")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    import_megatron()
    if arguments.long:
        turns._FLOPS_EACH = 1.0
    counts = Counter[str]()
    start = time.monotonic()
    numbers = range(arguments.first, arguments.first + arguments.runs)
    fork = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as root,  # of all runs, which share the data and the snapshot of the code
        fork.Pool(arguments.processes, maxtasksperchild=1) as pool,
    ):
        ends = pool.imap_unordered(
            partial(end_of, iterations=arguments.iterations, root=root), numbers
        )
        for done, (end, line) in enumerate(ends, 1):
            counts[end] += 1
            sys.stdout.write(line)
            if done % 20 == 0 or done == arguments.runs:
                words = ", ".join(f"{counts[each]} {each}" for each in ENDS)
                sys.stdout.write(f"{words}; {time.monotonic() - start:.0f} s\n")
            sys.stdout.flush()


def end_of(number: int, iterations: int, root: str) -> tuple[str, str]:
    """How a run ended, one of `ENDS`, and what to print of it."""
    words = [*words_of(number), f"training.iterations={iterations}", f"paths.root={root}"]
    try:
        reason = reason_of(words)
    except ConfigError:
        return (
            "combinations left out",
            "",
        )  # a scheme that this path of attention or model cannot have
    if reason is None:
        return "completed", ""
    if "what ran is not what was declared" in reason or "could not be proved" in reason:
        return "refused", f"REFUSED {number}: {reason}\n  {' '.join(words)}\n"
    return "ended otherwise", f"ended otherwise {number}: {reason}\n"


def reason_of(words: list[str]) -> str | None:
    """Why a run failed; None if it completed."""
    experiment = compose(words)
    device = device_class(experiment.launcher)
    with open_run(experiment, device, ["false_proofs.py"]) as (opened, _):
        if not Worker(opened.run, experiment).run():
            return None
    status = read_status(opened.run.status)
    return "no status" if status is None else status.reason


if __name__ == "__main__":
    main()
