"""An estimate of the training time on this machine: the work divided by measured rates.

    t = FLOP / (measured rate of products) + parameters x BYTES / (measured rate of a copy)

The first term covers the model's matrix products (`quantexp.model.sizes.flops_per_iteration`), a third more with
recomputation, and the forward passes of evaluations. The second term covers the memory traffic for each parameter:
gradients are summed and their norm is computed, and Adam reads and writes weights and moments. The estimate excludes
quantisation, norms, softmax, captures, start-up and the figures at the end. There is no estimate for a job that runs on
another machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.config.evaluation import num_evaluations, num_passes, num_samples
from quantexp.config.gradient import num_passes as num_gradient_passes
from quantexp.config.gradient import units_compared
from quantexp.folders import cache_dir
from quantexp.launch.machine_rates import Rates, rates_of
from quantexp.model.sizes import flops_per_iteration, num_parameters
from quantexp.runs.device import device_class
from quantexp.schema import Experiment, Recompute

#: Bytes read or written for each parameter in an iteration. 136 can be counted: 10 to accumulate the gradient in
#: float32 and 4 to zero it, 12 for its norm and the clipping, 104 for the eight operations of torch's Adam in float32,
#: 6 for the weight in the working precision. The rest stands for quantised weights and memory allocation: two runs of
#: `training=fast` on one core of an AMD EPYC took as long as 270 and 305 bytes would.
_BYTES_PER_PARAMETER = 240


@dataclass(frozen=True)
class Work:
    """The work of a training."""

    iterations: int
    tokens: int
    #: Model FLOPs of all iterations, as `tflops` in metrics.jsonl counts them.
    flop: float


@dataclass(frozen=True)
class Duration:
    """The estimated training time, and the measured rate of products behind it."""

    seconds: float
    gflop_per_s: float


def work(experiment: Experiment) -> Work:
    """Iterations, tokens and FLOPs of a whole training, or of the forward passes of an evaluation without one."""
    training = experiment.training
    iterations = training.last_iteration - experiment.first_iteration + 1
    sequences = training.global_batch_size
    flop = flops_per_iteration(experiment.model, training.seq_length, sequences)
    if experiment.evaluate.only:
        flop *= num_passes(experiment) / 3
    if experiment.gradient.only:
        flop *= num_gradient_passes(units_compared(experiment))
    return Work(iterations, iterations * sequences * training.seq_length, iterations * flop)


def duration(experiment: Experiment) -> Duration | None:
    """The estimated training time on this machine; None if the run goes to another machine, or if the GPU is full.

    The processes of a run share this machine's CPU; each process has its own GPU.
    """
    launcher, training = experiment.launcher, experiment.training
    if not launcher.is_local:
        return None
    device = device_class(launcher)
    rates = rates_of(training.precision, device, cache_dir(experiment.paths.cache))
    if rates is None:
        return None
    is_cpu = device == "cpu"
    share = _share_of_threads(experiment, rates) if is_cpu else launcher.num_processes
    rate = rates.gflop_per_s * share
    updates = num_parameters(experiment.model) * (launcher.num_processes if is_cpu else 1)
    updates *= not experiment.evaluate.only
    total = work(experiment)
    recomputed = 4 / 3 if training.recompute is Recompute.full else 1
    seconds = (total.flop * recomputed + _evaluated_flop(experiment)) / (rate * 1e9)
    seconds += total.iterations * updates * _BYTES_PER_PARAMETER / rates.copied_bytes_per_s
    return Duration(seconds, rate)


def _share_of_threads(experiment: Experiment, rates: Rates) -> float:
    """The run's threads as a fraction of the threads that the measurement of products used."""
    num_threads = experiment.launcher.num_threads
    if num_threads is None:
        return 1.0
    return min(1.0, num_threads * experiment.launcher.num_processes / rates.num_threads)


def _evaluated_flop(experiment: Experiment) -> float:
    """FLOPs of the evaluations' forward passes, a third of a training iteration's."""
    times = num_evaluations(experiment, experiment.first_iteration)
    times *= 1 + experiment.evaluation.unquantised
    samples, length = num_samples(experiment), experiment.training.seq_length
    return times * flops_per_iteration(experiment.model, length, samples) / 3


def in_words(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h`, `5 days`: at most two digits; more than 30 days are `months`, more than 365 `years`."""
    for unit, unit_s, limit in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 72)):
        if seconds < limit * unit_s:
            number = seconds / unit_s
            return (
                f"{number:.1f} {unit}" if number < 9.5 and unit == "h" else f"{number:.0f} {unit}"
            )
    days = seconds / 86400
    if days > 30:
        return "months" if days <= 365 else "years"
    return f"{days:.0f} days"


def about(seconds: float) -> str:
    """`about 3 h`; `months` and `years` as they are."""
    words = in_words(seconds)
    return f"about {words}" if words[0].isdigit() else words
