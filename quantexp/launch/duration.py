"""How long a training takes on this machine, roughly: its work over measured rates.

    t = FLOP / (measured rate of products) + parameters x BYTES / (measured rate of a copy)

The first part is the model's matrix products (`quantexp.model.sizes.flops_per_iteration`), a third more with
recomputation, and the forward passes of evaluations. The second is what an iteration does with every parameter besides:
gradients are added up and measured, and Adam reads and writes weights and moments. What is left out: quantisation,
norms, softmax and captures, the start and the figures at the end. Nothing is known of a job that runs on another
machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from quantexp.config.evaluation import num_evaluations, num_samples
from quantexp.launch.product_rate import product_gflop_per_s
from quantexp.model.checkpoints import first_iteration
from quantexp.model.sizes import flops_per_iteration, num_parameters
from quantexp.runs.device import device_class
from quantexp.schema import Experiment, LauncherKind, Recompute

if TYPE_CHECKING:
    import torch

#: Bytes that are read or written for each parameter in an iteration. 136 can be counted: 10 for its gradient's way
#: into float32 and 4 to zero that, 12 for its norm and the clipping, 104 for the eight operations of torch's Adam on
#: float32, 6 for the weight in the working precision. The rest stands for quantised weights, and memory that is taken
#: from the system: two runs of `training=fast` on one core of an AMD EPYC took as long as 270 and 305.
_BYTES_EACH = 240
#: Elements of the copy that is measured: 32 MiB, more than most caches of one core hold.
_COPIED = 1 << 23


@dataclass(frozen=True)
class Work:
    """What a training has to do."""

    iterations: int
    tokens: int
    #: Model FLOPs of all iterations, as `tflops` in metrics.jsonl counts them.
    flop: float


@dataclass(frozen=True)
class Duration:
    """How long a training takes here, and the rate of products that says so."""

    seconds: float
    gflop_per_s: float


def work(experiment: Experiment) -> Work:
    """Iterations, tokens and FLOPs of a whole training."""
    training = experiment.training
    iterations = training.iterations - first_iteration(experiment) + 1
    sequences = training.global_batch_size
    each = flops_per_iteration(experiment.model, training.seq_length, sequences)
    return Work(iterations, iterations * sequences * training.seq_length, iterations * each)


def duration(experiment: Experiment) -> Duration | None:
    """How long the training takes on this machine alone; None where it runs on another one, or the GPU is full.

    The processes of a run share this machine's CPU; each has a GPU of its own.
    """
    launcher, training = experiment.launcher, experiment.training
    if launcher.kind is LauncherKind.slurm:
        return None
    import torch

    is_cpu = device_class(launcher) == "cpu"
    device = torch.device("cpu" if is_cpu else "cuda")
    try:
        rate, copied = product_gflop_per_s(training.precision, device), copied_bytes_per_s(device)
    except torch.OutOfMemoryError:
        return None
    rate *= _share_of_threads(experiment) if is_cpu else launcher.num_processes
    updates = num_parameters(experiment.model) * (launcher.num_processes if is_cpu else 1)
    total = work(experiment)
    recomputed = 4 / 3 if training.recompute is Recompute.full else 1
    seconds = (total.flop * recomputed + _evaluated_flop(experiment)) / (rate * 1e9)
    seconds += total.iterations * updates * _BYTES_EACH / copied
    return Duration(seconds, rate)


def _share_of_threads(experiment: Experiment) -> float:
    """The part of the threads, with all of which products are measured, that the run's processes have."""
    import torch

    num_threads = experiment.launcher.num_threads
    if num_threads is None:
        return 1.0
    return min(1.0, num_threads * experiment.launcher.num_processes / torch.get_num_threads())


def _evaluated_flop(experiment: Experiment) -> float:
    """FLOPs of the evaluations' forward passes, a third of a training's."""
    times = num_evaluations(experiment, first_iteration(experiment))
    samples, length = num_samples(experiment), experiment.training.seq_length
    return times * flops_per_iteration(experiment.model, length, samples) / 3


@cache
def copied_bytes_per_s(device: torch.device) -> float:
    """Bytes that a copy reads and writes in a second, measured once a process."""
    import torch

    source = torch.ones(_COPIED, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(3):  # the first one gets its memory from the system
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * 4 * _COPIED / min(seconds)


def in_words(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h`, `5 days`: two digits at most."""
    for unit, each, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 72)):
        if seconds < most * each:
            number = seconds / each
            return (
                f"{number:.1f} {unit}" if number < 9.5 and unit == "h" else f"{number:.0f} {unit}"
            )
    return f"{seconds / 86400:,.0f} days"
