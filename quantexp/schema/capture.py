"""The configuration of a capture: which tensors, when, how much of each, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class CaptureLevel(Enum):
    """What is kept of a captured tensor."""

    off = "off"
    stats = "stats"
    tensors = "tensors"


class CaptureValues(Enum):
    """Which values of a product's operands are kept: before they are quantised, after it, or both."""

    before = "before"
    after = "after"
    both = "both"


class StoreKind(Enum):
    """What captured values are kept in."""

    pt = "pt"
    safetensors = "safetensors"


class SampleOf(Enum):
    """What a sample of a captured tensor is made of."""

    rows = "rows"
    blocks = "blocks"
    heads = "heads"


@dataclass
class CaptureRule:
    """Changes what is kept of the tensors it names; of several rules the later wins. An empty list means all."""

    #: Layers, from 0; negative from the end.
    layers: list[int] = field(default_factory=list)
    #: Shell patterns on the module (qkv, proj, fc1, fc2, attention, residual, router, expert*).
    modules: list[str] = field(default_factory=list)
    #: forward, backward.
    operations: list[str] = field(default_factory=list)
    #: Shell patterns on the tensor (input, weight, grad_*, ...); a quantised operand has the name of the tensor it is
    #: made from, and its own (input_fprop, *_wgrad, ...).
    tensors: list[str] = field(default_factory=list)
    #: off leaves them out, stats keeps their statistics, tensors their values too.
    level: CaptureLevel | None = None
    values: CaptureValues | None = None
    sample_count: int | None = None
    sample_of: SampleOf | None = None


@dataclass
class CaptureConfig:
    """What is kept of the tensors that pass the sites."""

    name: str = "stats"
    level: CaptureLevel = CaptureLevel.stats
    #: Iterations, and ranges of them with first and last included: [1, 100, 200-210].
    iterations: list[str] = field(default_factory=list)
    #: Every so many iterations: N, 2N, 3N, ...
    every: int | None = None
    #: Iterations 1, 2, 4, 8, ...
    powers_of_two: bool = False
    #: No iteration before this one, from 1.
    first_iteration: int = 1
    #: How many to capture, of those that the keys above name or from there on; 0 is all, null one without those keys
    #: and all with them.
    control_iter: int | None = None
    #: How many micro-batches of each captured iteration; 0 is all.
    collect_micro_batches: int = 1
    #: End the run, as completed, once everything asked for is on disk.
    stop_after_capture: bool = False
    #: before: tensors as they come. after: operands as each product multiplies them, with their scales, in the place of
    #: tensors that no product multiplies as they come. both: all of them.
    values: CaptureValues = CaptureValues.before
    #: Ordered rules on what is kept of which tensor.
    rules: list[CaptureRule] = field(default_factory=list)
    #: Keep at most so many rows, blocks or heads of each tensor's values, the same ones every time; 0 is all.
    sample_count: int = 0
    sample_of: SampleOf = SampleOf.rows
    #: A format that the statistics judge each tensor by (mxfp8, mxfp4, hifp8, ...), whatever the scheme; null is none.
    format: str | None = None
    #: The values of a run may take so much, in units of 1e9 bytes; null is what the disk has.
    max_gb: float | None = None
    #: Train on, without further captures, once captured tensors cannot be written any more (full disk).
    train_on_if_full: bool = False
    #: A `.pt` file for each tensor, or large safetensors shards, which are faster to write.
    store: StoreKind = StoreKind.pt
    #: Host memory for tensors that wait to be written, in units of 1e9 bytes; training waits while it is full.
    queue_gb: float = 1.0
    #: The attention probabilities, their gradient and that of the scores: they grow with the sequence squared.
    attn_weights: bool = False
    #: This rank's weight gradient of the micro-batch, and main_grad after the reduction.
    weight_grads: bool = False
    #: The residual stream after the embedding and after each layer's attention and MLP, and its gradients.
    residual: bool = False
    #: What each router scores the experts with, before softmax, and its gradients (models with experts).
    router_logits: bool = False
    #: Elsewhere than in the run folder; the run's own folder is made below it.
    dir: str | None = None
