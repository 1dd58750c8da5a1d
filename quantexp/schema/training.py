"""The configuration of a training: precision, schedule, attention's way, evaluation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Precision(Enum):
    """The working precision of activations and weights."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class LrSchedule(Enum):
    """How the learning rate falls after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    #: Warm-up, stable, decay: constant until the last `training.decay_iterations`, then linear to min_lr.
    wsd = "wsd"


class AttentionPath(Enum):
    """How attention is computed."""

    #: Product by product: scores and probabilities are held whole.
    plain = "plain"
    #: By torch's fused kernel, where the scheme leaves P and the gradients in high precision.
    fused = "fused"
    #: Product by product as plain, of a tile of queries at a time: scores and probabilities are never held whole.
    tiled = "tiled"


class Recompute(Enum):
    """Which activations are recomputed in the backward pass instead of stored."""

    none = "none"
    full = "full"


@dataclass
class TrainingConfig:
    """The loop: sizes, optimizer, precision, seed."""

    name: str = "default"
    #: Tokens of one sequence.
    seq_length: int = 4096
    #: Sequences a forward pass takes.
    micro_batch_size: int = 1
    #: Sequences of one optimizer step, over all micro-batches and data-parallel ranks.
    global_batch_size: int = 1
    #: Optimizer steps.
    iterations: int = 1000
    #: Largest learning rate.
    lr: float = 3.0e-4
    #: Learning rate at the end of the schedule.
    min_lr: float = 3.0e-5
    #: Steps in which the learning rate rises linearly from zero.
    warmup_iterations: int = 0
    lr_schedule: LrSchedule = LrSchedule.cosine
    #: wsd only: iterations of the decay at the end.
    decay_iterations: int | None = None
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1.0e-8
    #: Largest norm of the gradient; 0 is no clipping.
    clip_grad: float = 1.0
    precision: Precision = Precision.bf16
    #: fp16's first loss scale (a power of two); it adapts from there.
    initial_loss_scale: float = 65536.0
    recompute: Recompute = Recompute.none
    #: plain holds T x T scores for each head and takes every scheme; fused does not and takes FA_* and linear_*; tiled
    #: does not either and takes all but P or dS rounded stochastically.
    attention: AttentionPath = AttentionPath.plain
    #: Linear weights are quantised once a step for all micro-batches, and the copies kept; false: for each product.
    weight_cache: bool = True
    #: RUN@ITERATION: go on from that checkpoint of another run, at its place in the data.
    start_from: str | None = None
    #: And with the optimizer's state that the run kept (its checkpoint.optimizer=true).
    start_optimizer: bool = False
    seed: int = 1234
    #: Bit-equal repeats. null: on a CPU yes, on a GPU no.
    deterministic: bool | None = None
    #: Iterations in a row whose loss or gradient is not finite before the run stops.
    max_nonfinite_iterations: int = 3


@dataclass
class EvaluationConfig:
    """The loss of held-out samples while training; it changes nothing about the training."""

    #: After every so many iterations, and after the last; null is never.
    every: int | None = None
    #: How many samples of the validation split, the same ones every time.
    samples: int = 128


@dataclass
class CheckpointConfig:
    """When a run saves its model: as models are published, below the run folder's checkpoints/."""

    #: After every so many iterations; null is none on the way.
    every: int | None = None
    #: After the last iteration, which `quantexp export` takes.
    at_end: bool = False
    #: Keep the optimizer's state beside it, about six times the weights in bf16, for training.start_optimizer.
    optimizer: bool = False
