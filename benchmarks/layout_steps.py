"""The bf16 step of each layout of two processes, beside the same layout of Megatron-Core's own classes, interleaved.

    python benchmarks/layout_steps.py [--layouts NAME,...] [--turns 10] [--steps 2] [WORDS ...]

Each rank holds two models in one layout: quantexp's under quant=bf16, and one of `stock`. They take turns of a few
optimizer steps, on the same micro-batches of random tokens, and every second turn begins with the other one. A step is
all of it: forward and backward passes, reductions, clipping, optimizer. Given are medians over turns: seconds of a step
by the clock, processor time of both ranks together, and the ratio of both sides' processor time within a turn with its
least and largest; the same of the passes alone, without clipping and optimizer.

16-bit products go through fp32 on both sides, where the processor has no instructions for them. Waiting in gloo's
collectives takes no processor time. The first step of both sides must have the same loss and norm of the gradient,
within bf16's rounding: else the comparison ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from idle_observer import IdleObserver
from layouts import LAYOUTS, reference

NAMES = [
    *("dp2", "dp2 distributed optimizer", "tp2", "tp2 sp", "pp2", "pp2 interleaved", "cp2"),
    *("ep2 allgather", "ep2 alltoall"),
]
_SIZES = [
    *("training=fast", "quant=bf16", "capture=off", "training.precision=bf16"),
    *("model.num_layers=4", "model.hidden_size=512", "training.seq_length=256"),
    *("training.micro_batch_size=1", "training.global_batch_size=4", "training.iterations=100000"),
    *("training.distributed_optimizer=false", "launcher.num_processes=2", "launcher.num_threads=1"),
]
_LLAMA = [
    *("model=llama32-1b", "model.ffn_hidden_size=2048", "model.num_attention_heads=8"),
    *("model.num_query_groups=4", "model.head_dim=64"),
]
_EXPERTS = [
    *("model=deepseek2_lite", "model.ffn_hidden_size=2048", "model.num_attention_heads=8"),
    *("model.num_query_groups=8", "model.head_dim=96", "model.mla.kv_lora_rank=256"),
    *("model.mla.qk_head_dim=64", "model.mla.qk_pos_emb_head_dim=32", "model.mla.v_head_dim=64"),
    *("model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=512"),
]
#: Relative differences of a first step, of the loss and of the norm. Both are sums of many rounded terms, whose errors
#: partly cancel: some four roundings of 2^-9 in bf16 are left in the norm, and some thirty of 2^-24 in fp32, where sums
#: of thousands of terms have another order.
_ROUNDING = {"bf16": (1e-3, 8e-3), "fp32": (1e-6, 2e-6)}
#: Turns that are not counted: the first steps allocate.
_WARM_UP = 1

#: One optimizer step, given its number and a call before the optimizer; the loss or a rank's part of it, and the norm.
Step = Callable[[int, Callable[[], None]], tuple[float, float]]


@dataclass(frozen=True)
class Spent:
    """Seconds of one side in one turn, for each step."""

    clock: float
    #: Of this rank, or of all ranks together.
    processor: float
    #: Of that, forward and backward passes with their reductions.
    passes: float


class _Observer(IdleObserver):
    """Calls `mark` between the passes and the optimizer."""

    mark: Callable[[], None]

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        self.mark()


def sides(experiment: Any, device: Any, functions: Any) -> dict[str, Step]:
    """A step of quantexp, and one of Megatron-Core, each on one micro-batch of a data-parallel rank, repeated."""
    import torch
    from megatron.core import parallel_state
    from stock import StockTraining

    from quantexp.quant.precision import precision_map
    from quantexp.quant.step_state import StepState, use_step_state
    from quantexp.quant.whole_amax import use_reduction
    from quantexp.training.megatron.collectives import reduce_amax
    from quantexp.training.megatron.specs import inject, stock_spec
    from quantexp.training.megatron.step import Stepper

    T = experiment.training.seq_length
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    ids = torch.randint(256, (1, T + 1), generator=generator)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    batch |= {"position_ids": torch.arange(T)[None], "loss_mask": torch.ones(1, T)}
    observer = _Observer()
    state = StepState(experiment.training.seed)
    spec = inject(stock_spec(experiment.model))
    stepper = Stepper(experiment, spec, device, observer, state)
    stepper.set_precision(precision_map(experiment.model, experiment.quant))
    stock = StockTraining(experiment, functions)

    def ours(number: int, mark: Callable[[], None]) -> tuple[float, float]:
        observer.mark = mark
        batches = iter([batch] * stepper.num_micro_batches)
        with use_step_state(state), use_reduction(reduce_amax):
            metrics = stepper.step(number, batches, contextlib.nullcontext())
        return metrics.loss, metrics.grad_norm

    return {"quantexp": ours, "stock": lambda number, mark: stock.step(batch, mark)}


def check_first_steps(
    steps: dict[str, Step], context: int, loss_error: float, norm_error: float
) -> None:
    """Run the first step of both sides; each loss has a part on each of `context` ranks.

    Raises:
        RuntimeError: their losses or norms differ by more than these relative errors.
    """
    from quantexp.training.megatron.collectives import gather

    (loss, norm), (part, stock_norm) = (step(1, lambda: None) for step in steps.values())
    parts = [each for each in gather(part) if each]
    stock_loss = sum(parts) / len(parts) * context
    if not (abs(stock_loss / loss - 1) < loss_error and abs(stock_norm / norm - 1) < norm_error):
        raise RuntimeError(
            f"the two sides differ: loss {loss} and {stock_loss}, norm {norm} and {stock_norm}"
        )


def measured(steps: dict[str, Step], turns: int, steps_each: int) -> dict[str, list[Spent]]:
    """What each side took in each turn, of all ranks together."""
    from quantexp.training.megatron.collectives import gather

    spent: dict[str, list[Spent]] = {name: [] for name in steps}
    for turn in range(turns + _WARM_UP):
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            by_rank = gather(_timed(steps[name], 2 + turn * steps_each, steps_each))
            if turn >= _WARM_UP:
                total = (sum(s.processor for s in by_rank), sum(s.passes for s in by_rank))
                spent[name].append(Spent(max(s.clock for s in by_rank), *total))
    return spent


def _timed(step: Step, first: int, number: int) -> Spent:
    import torch

    torch.distributed.barrier()
    marks: list[float] = []
    clock, passes, start = time.perf_counter(), 0.0, time.process_time()
    for index in range(first, first + number):
        begin = time.process_time()
        step(index, lambda: marks.append(time.process_time()))
        passes += marks.pop() - begin
    worked = time.process_time() - start
    return Spent((time.perf_counter() - clock) / number, worked / number, passes / number)


def row(name: str, spent: dict[str, list[Spent]]) -> str:
    """A layout's row of the table."""
    ours, stock = spent["quantexp"], spent["stock"]

    def median(side: list[Spent], key: str) -> Any:
        return statistics.median(getattr(each, key) for each in side)

    def ratio(key: str) -> str:
        by_turn = [getattr(a, key) / getattr(b, key) for a, b in zip(ours, stock, strict=True)]
        spread = f"{min(by_turn):.3f} to {max(by_turn):.3f}"
        return f"{statistics.median(by_turn):.3f} ({spread})"

    numbers = [
        f"{median(side, key):.3f}" for key in ("clock", "processor") for side in (stock, ours)
    ]
    return f"| {' | '.join([name, *numbers, ratio('processor'), ratio('passes')])} |"


def run_rank(rank: int, name: str, words: list[str], port: int, turns: int, steps: int) -> None:
    """One rank of a layout; rank 0 prints its row."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent process hosts the ranks' store

    import torch
    from stock import own_functions

    from quantexp.config.compose import compose
    from quantexp.model.layout import Layout
    from quantexp.runs.ranks import Rank
    from quantexp.training.megatron.session import session

    torch.set_num_threads(1)
    experiment = compose(words)
    layout, functions = Layout.of(experiment), own_functions()
    own = Rank(rank, layout.num_processes, rank)
    with session(experiment.training, own, 5.0, layout) as device:
        both = sides(experiment, device, functions)
        check_first_steps(both, layout.context, *_ROUNDING[experiment.training.precision.value])
        spent = measured(both, turns, steps)
    if rank == 0:
        sys.stdout.write(row(name, spent) + "\n")
        sys.stdout.flush()


def compare(name: str, more: list[str], turns: int, steps: int) -> None:
    """Print a layout's row, measured in two processes; `more` are overrides."""
    from torch.multiprocessing.spawn import spawn

    from quantexp.formats.torch_internals import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank_arguments = (name, words_of(name, more), store.port, turns, steps)
    spawn(run_rank, rank_arguments, nprocs=2)  # type: ignore[no-untyped-call]


def words_of(name: str, more: list[str]) -> list[str]:
    """The overrides of a layout: its own words without the sizes of a smaller model."""
    _, words = LAYOUTS[name]
    sizes = reference(words)
    model = _EXPERTS if name.startswith("ep") else _LLAMA
    return [*_SIZES, *model, *(word for word in words if word not in sizes), *more]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layouts", default=",".join(NAMES))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side in a turn")
    parser.add_argument("words", nargs="*", help="more overrides")
    arguments = parser.parse_args()

    sys.stdout.write(
        "| layout | step, stock | quantexp | processor time, stock | quantexp "
        "| ratio of processor time | of the passes |\n|---|---|---|---|---|---|---|\n"
    )
    sys.stdout.flush()
    for name in arguments.layouts.split(","):
        compare(name, arguments.words, arguments.turns, arguments.steps)


if __name__ == "__main__":
    main()
