"""Configuration of a capture: which tensors, when, how much of each, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from quantexp.schema.limits import NOT_NEGATIVE, POSITIVE, Limit, at_most, between, limited

_ITERATION, _COUNT = between(1, 1_000_000_000), between(0, 1 << 40)


class CaptureLevel(Enum):
    """What is stored of a captured tensor."""

    off = "off"
    stats = "stats"
    tensors = "tensors"


class CaptureValues(Enum):
    """Which values of a product's operands are stored: before quantisation, after it, or both."""

    before = "before"
    after = "after"
    both = "both"


class StoreKind(Enum):
    """The file format of captured values."""

    pt = "pt"
    safetensors = "safetensors"


class CaptureLayout(Enum):
    """The folders of captured values: those of the run alone, or those of their formats for all runs too."""

    by_run = "by_run"
    by_type = "by_type"


class SampleOf(Enum):
    """The unit of a sample of a captured tensor."""

    rows = "rows"
    blocks = "blocks"
    heads = "heads"


@dataclass
class CaptureRule:
    """Changes the capture of the tensors that it names; later rules take precedence. An empty list means all."""

    #: Layers, from 0; negative from the end.
    layers: list[int] = field(default_factory=list)
    #: Shell patterns on the module (qkv, proj, fc1, fc2, attention, residual, router, expert*).
    modules: list[str] = field(default_factory=list)
    #: forward, backward.
    operations: list[str] = field(default_factory=list)
    #: Shell patterns on the tensor (input, weight, grad_*, ...); a quantised operand matches by the name of its source
    #: tensor, and by its own (input_fprop, *_wgrad, ...).
    tensors: list[str] = field(default_factory=list)
    #: off excludes them, stats stores their statistics, tensors also their values.
    level: CaptureLevel | None = None
    values: CaptureValues | None = None
    sample_count: int | None = limited(None, *_COUNT)
    sample_of: SampleOf | None = None


@dataclass
class TriggerConfig:
    """What writes the ring and leaves a dossier, besides a value that is not finite and a request from outside."""

    #: Loss or gradient norm lies so many robust standard deviations above the median of the recent past; null means
    #: never.
    deviations: float | None = limited(10.0, POSITIVE)
    #: The iterations of that recent past; there is no trigger before 16 of them.
    window: int = limited(64, *between(16, 1_000_000))
    #: The share of a tensor's values that saturate, or of its non-zero values that become zero, lies so far above its
    #: median in the full ring, and as many robust standard deviations as `deviations` says; null means never.
    share: float | None = limited(0.1, POSITIVE, Limit(lambda x: x <= 1, "must be at most 1"))
    #: Dossiers that triggers may leave in a run; requests from outside are not counted.
    most: int = limited(4, *between(1, 1_000_000))


@dataclass
class CaptureConfig:
    """What is captured of the tensors at the sites."""

    name: str = "stats"
    level: CaptureLevel = CaptureLevel.stats
    #: Iterations, and ranges of them with first and last included: [1, 100, 200-210].
    iterations: list[str] = field(default_factory=list)
    #: Every N iterations: N, 2N, 3N, ...
    every: int | None = limited(None, *_ITERATION)
    #: Iterations 1, 2, 4, 8, ...
    powers_of_two: bool = False
    #: No iteration before this one, from 1.
    first_iteration: int = limited(1, *_ITERATION)
    #: Number of iterations to capture, among those that the keys above select or from there on; 0 means all, null means
    #: one without those keys and all with them.
    control_iter: int | None = limited(None, *_COUNT)
    #: Also the last iteration of the run, unless `stop_after_capture` ends it earlier.
    at_end: bool = False
    #: Number of micro-batches of each captured iteration; 0 means all.
    collect_micro_batches: int = limited(1, *_COUNT)
    #: End the run, as completed, once everything requested is on disk.
    stop_after_capture: bool = False
    #: before: tensors before quantisation. after: operands as each product multiplies them, with their scales, instead
    #: of tensors that no product multiplies unquantised. both: all of them.
    values: CaptureValues = CaptureValues.before
    #: Ordered rules on what is stored of which tensor.
    rules: list[CaptureRule] = field(default_factory=list)
    #: Store at most this many rows, blocks or heads of each tensor's values, always the same ones; 0 means all.
    sample_count: int = limited(0, *_COUNT)
    sample_of: SampleOf = SampleOf.rows
    #: A format in which the statistics score each tensor (mxfp8, mxfp4, hifp8, ...), in addition to the scheme's; null
    #: means none.
    format: str | None = None
    #: Limit on the size of a run's values, in units of 1e9 bytes; null means the free space of the disk.
    max_gb: float | None = limited(None, NOT_NEGATIVE, at_most(1_000_000_000))
    #: Continue training, without further captures, when captured tensors can no longer be written (full disk).
    train_on_if_full: bool = False
    #: One `.pt` file per tensor, or large safetensors shards, which are faster to write.
    store: StoreKind = StoreKind.pt
    #: Host memory for tensors that wait to be written, in units of 1e9 bytes; training waits while it is full.
    queue_gb: float = limited(1.0, POSITIVE, at_most(1_000_000_000))
    #: The attention probabilities, their gradient and that of the scores: their size grows with the sequence squared.
    attn_weights: bool = False
    #: This rank's weight gradient of the micro-batch, and main_grad after the reduction.
    weight_grads: bool = False
    #: The residual stream after the embedding and after each layer's attention and MLP, and its gradients.
    residual: bool = False
    #: Each router's scores of the experts, before softmax, and their gradients (models with experts).
    router_logits: bool = False
    #: Hold the statistics of all sites of the last N iterations in memory, and write them when something goes wrong;
    #: null holds none (docs/forensics.md).
    ring: int | None = limited(None, *between(8, 1_000_000))
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    #: A folder other than the run folder; the run's own folder is created below it.
    dir: str | None = None
    #: by_type also links each file as DIR/<quant_type>/NAME.pt, where the runs of one `dir` share the folders of their
    #: formats.
    layout: CaptureLayout = CaptureLayout.by_run
