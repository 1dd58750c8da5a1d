"""Configuration of training: precision, schedule, attention path, evaluation, checkpoints, conditions on metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from quantexp.errors import ConfigError
from quantexp.schema.limits import NOT_NEGATIVE, POSITIVE, Limit, at_most, between, limited

_BELOW_ONE = Limit(lambda value: 0 <= value < 1, "must lie in [0, 1)")
#: The largest number of iterations that a key may have.
LARGEST_ITERATION = 1_000_000_000
_ITERATIONS, _SEQUENCES = between(1, LARGEST_ITERATION), between(1, 100_000_000)
#: A larger rate times an update overflows fp32.
_RATE = Limit(lambda value: value <= 1e30, "must be at most 1e30")
_POWER_OF_TWO = Limit(
    lambda value: 1 <= value < math.inf and math.frexp(value)[0] == 0.5,
    "must be a power of two of at least 1",
)


class Precision(Enum):
    """The working precision of activations and weights."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Optimizer(Enum):
    """What moves the weights."""

    #: AdamW.
    adam = "adam"
    #: Muon for the decoder's weight matrices, AdamW for all other parameters.
    muon = "muon"


class LrSchedule(Enum):
    """How the learning rate decreases after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    #: Warm-up, stable, decay: constant until the last `training.decay_iterations`, then linear to min_lr.
    wsd = "wsd"


class AttentionPath(Enum):
    """How attention is computed."""

    #: Product by product: scores and probabilities are stored whole.
    plain = "plain"
    #: By torch's fused kernel, if the scheme leaves P and the gradients in high precision.
    fused = "fused"
    #: Product by product, one tile of queries at a time: scores and probabilities are never stored whole.
    tiled = "tiled"


class Recompute(Enum):
    """Which activations are recomputed in the backward pass instead of stored."""

    none = "none"
    #: The core attention: scores, softmax and context.
    selective = "selective"
    #: Whole layers.
    full = "full"


class Nonfinite(Enum):
    """What follows a step that was left out because its loss or gradient was not finite."""

    #: The run goes on, up to `training.max_nonfinite_iterations` such steps in a row.
    skip = "skip"
    #: The run stops.
    stop = "stop"


@dataclass
class TrainingConfig:
    """The loop: sizes, optimizer, precision, seed."""

    name: str = "default"
    #: Tokens of one sequence.
    seq_length: int = limited(4096, *between(1, 1 << 31))
    #: Sequences per forward pass.
    micro_batch_size: int = limited(1, *_SEQUENCES)
    #: Sequences per optimizer step, over all micro-batches and data-parallel ranks.
    global_batch_size: int = limited(1, *_SEQUENCES)
    #: Optimizer steps.
    iterations: int = limited(1000, *_ITERATIONS)
    #: End after this iteration, as a run that completed; rates and data stay those of `iterations`. null: run all.
    stop_after: int | None = limited(None, *_ITERATIONS)
    #: Largest learning rate.
    lr: float = limited(3.0e-4, POSITIVE, _RATE)
    #: Learning rate at the end of the schedule.
    min_lr: float = limited(3.0e-5, NOT_NEGATIVE, _RATE)
    #: Steps over which the learning rate rises linearly from zero.
    warmup_iterations: int = limited(0, *between(0, 1_000_000_000))
    #: The first so many iterations of the run fill the optimizer's moments and leave the weights: their rate is 0.
    held_iterations: int = limited(0, *between(0, 1_000_000_000))
    lr_schedule: LrSchedule = LrSchedule.cosine
    #: wsd only: iterations of the decay at the end.
    decay_iterations: int | None = limited(None, at_most(1_000_000_000))
    weight_decay: float = limited(0.1, NOT_NEGATIVE, at_most(1_000))
    optimizer: Optimizer = Optimizer.adam
    #: Of optimizer=muon, in Nesterov's form.
    muon_momentum: float = limited(0.95, _BELOW_ONE)
    adam_beta1: float = limited(0.9, _BELOW_ONE)
    adam_beta2: float = limited(0.95, _BELOW_ONE)
    adam_eps: float = limited(1.0e-8, POSITIVE, at_most(1_000))
    #: Largest norm of the gradient; 0 means no clipping.
    clip_grad: float = limited(1.0, NOT_NEGATIVE)
    precision: Precision = Precision.bf16
    #: fp16's first loss scale (a power of two); it adapts from there.
    initial_loss_scale: float = limited(65536.0, _POWER_OF_TWO, at_most(1 << 64))
    recompute: Recompute = Recompute.none
    #: Each data-parallel rank keeps a share of the optimizer's state (ZeRO-1, arXiv 1910.02054); null means yes with
    #: several such ranks.
    distributed_optimizer: bool | None = None
    #: plain stores T x T scores per head, fused and tiled do not; plain and tiled support every scheme, fused FA_*
    #: and linear_*.
    attention: AttentionPath = AttentionPath.plain
    #: Quantise linear weights once per step for all micro-batches and keep the copies; false: once per product.
    weight_cache: bool = True
    #: RUN@ITERATION: continue from that checkpoint of another run, at its position in the data.
    start_from: str | None = None
    #: Start over at the first iteration where an unfinished attempt would go on from its last checkpoint.
    restart: bool = False
    #: Also load the training state, if the run saved it (its checkpoint.optimizer=true), in any layout.
    start_optimizer: bool = False
    #: At most what numpy's generators accept.
    seed: int = limited(1234, *between(0, (1 << 32) - 1))
    #: Move 1% of the initial weights, drawn by this number and the seed, by one unit in the last place; 0: none. With
    #: `start_optimizer` these are the working weights of the first iteration alone. It measures chance.
    chaos: int = limited(0, *between(0, 1_000_000))
    #: Bit-equal repeats. null means yes on a CPU, no on a GPU.
    deterministic: bool | None = None
    #: A step with a non-finite loss or gradient is left out; stop: the run also stops at the first one.
    nonfinite: Nonfinite = Nonfinite.skip
    #: Consecutive iterations with a non-finite loss or gradient after which the run stops.
    max_nonfinite_iterations: int = limited(3, *_ITERATIONS)

    @property
    def last_iteration(self) -> int:
        """The iteration, from 1, that completes the run."""
        return self.iterations if self.stop_after is None else self.stop_after


@dataclass
class EvaluationConfig:
    """The loss of held-out samples during training; it does not affect the training."""

    #: After every N iterations, and after the last; null means never.
    every: int | None = limited(None, *_ITERATIONS)
    #: Number of samples of the validation split, the same ones every time.
    samples: int = limited(128, *between(1, 1_000_000_000))
    #: Evaluate in the working precision, too: the same weights and samples, and no slot quantised.
    unquantised: bool = False


@dataclass
class EvaluateConfig:
    """`quantexp evaluate`: the loss of held-out samples under a scheme and in bf16, without training."""

    #: Evaluate the initial weights on `evaluation.samples` samples instead of training; `quantexp evaluate` sets it.
    only: bool = False
    #: Also with the scheme in one layer at a time, bf16 in all others.
    each_layer: bool = False
    #: Also with the scheme in one module of one layer at a time.
    each_module: bool = False
    #: Also tasks of lm-evaluation-harness, by their names; `quantexp evaluate tasks=a,b` sets it.
    tasks: list[str] = field(default_factory=list)
    #: A folder of task files, besides those of the harness.
    task_folder: str | None = None
    #: The first N documents of each task; null means all.
    limit: int | None = limited(None, *_SEQUENCES)
    #: Examples before each question; null means what each task says.
    fewshot: int | None = limited(None, *between(0, 1000))
    #: Score tokens of the tokenizer's template as the harness's `hf` does; false takes them as context only.
    score_template: bool = True


class Aspect(Enum):
    """What the slots of a unit have in common that `quantexp bisect` turns off together."""

    #: Site, product and operand.
    slot = "slot"
    product = "product"
    site = "site"
    #: Layer and module.
    module = "module"
    layer = "layer"


@dataclass
class GradientConfig:
    """`quantexp bisect --gradient`: the gradient of one iteration under parts of a scheme and in bf16."""

    #: Compute gradients instead of training; `quantexp bisect` sets it.
    only: bool = False
    #: What is quantised alone, and left out alone: slot, product, site, module, layer, or several (each combination).
    #: An empty list: the whole scheme alone is compared with bf16.
    by: list[str] = field(default_factory=list)


@dataclass
class CheckpointConfig:
    """When a run saves its model below the run folder's checkpoints/, what of it, and for how long."""

    #: After every N iterations; null means no intermediate checkpoints.
    every: int | None = limited(None, *_ITERATIONS)
    #: After the iteration in which so many minutes have passed since the last one; null means never.
    every_min: float | None = limited(None, POSITIVE, at_most(1_000_000))
    #: After the last iteration, for `quantexp export`.
    at_end: bool = False
    #: Save the training state as well, about six times the weights in bf16, for training.start_optimizer.
    optimizer: bool = False
    #: Write the published form; false: `quantexp export` makes it from the training state on request.
    publish: bool = True
    #: Write in the background, from a copy in host memory, while training goes on; false: training waits.
    asynchronous: bool = True
    #: Keep the newest N checkpoints and remove older ones; null keeps all.
    keep_last: int | None = limited(None, *_ITERATIONS)
    #: With keep_last: also keep the checkpoints of multiples of N iterations.
    keep_every: int | None = limited(None, *_ITERATIONS)


class Measure(StrEnum):
    """What a rule's condition looks at, a key of metrics.jsonl."""

    loss = "loss"
    grad_norm = "grad_norm"
    validation_loss = "validation_loss"


@dataclass
class When:
    """A condition on a run's own metrics; the rule is in force from the iteration after the first that meets it."""

    measure: Measure = Measure.loss
    #: One of the two: the mean lies below, or above.
    below: float | None = None
    above: float | None = None
    #: The mean of so many latest values; one that is not finite does not count.
    over: int = limited(1, *between(1, 100_000))
    #: The first iteration that may meet it.
    after: int = limited(1, *between(1, 1 << 40))


def run_and_iteration(text: str) -> tuple[str, int]:
    """The run and the iteration of `training.start_from`.

    Raises:
        ConfigError: the text does not have this form.
    """
    run, at, iteration = text.rpartition("@")
    if not (run and at and iteration.isdecimal() and int(iteration) > 0):
        raise ConfigError(f"training.start_from must be RUN@ITERATION, got {text!r}")
    return run, int(iteration)
