"""Which tensors a configuration asks for, with their shapes: torch-free, so that `plan` knows the price beforehand.

# T tokens, B micro-batch, H query heads, G key-value heads, D head_dim
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from quantexp.quant.precision import ATTENTION, ModuleId, decoder_modules
from quantexp.schema import CaptureConfig, CaptureLevel, Experiment
from quantexp.sizes import element_bytes, linear_shapes, num_micro_batches_each

#: Tensors kept only with `capture.attn_weights`.
ATTENTION_WEIGHTS = frozenset({"attn_weights", "grad_attn_weights"})
#: Tensors kept only with `capture.weight_grads`.
WEIGHT_GRADS = frozenset({"grad_weight", "main_grad"})


@dataclass(frozen=True)
class Expected:
    """One tensor that a captured micro-batch will give."""

    module: ModuleId
    operation: str
    phase: str
    tensor: str
    shape: tuple[int, ...]
    bytes_each: int
    #: Once a captured iteration (weights, main gradients) instead of once a micro-batch.
    once: bool = False
    #: Another tensor's file: the backward's weight is the forward's.
    shared: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the values on disk; the file's own framing (some 2 kB) comes on top."""
        return 0 if self.shared else prod(self.shape) * self.bytes_each


def wanted(capture: CaptureConfig, tensor: str) -> bool:
    """Whether the configuration keeps tensors of this name."""
    if tensor in ATTENTION_WEIGHTS:
        return capture.attn_weights
    return capture.weight_grads if tensor in WEIGHT_GRADS else True


def is_captured(capture: CaptureConfig, iteration: int) -> bool:
    """Whether an iteration (from 1) is captured."""
    if capture.level is CaptureLevel.off or iteration < capture.first_iteration:
        return False
    return capture.control_iter == 0 or iteration < capture.first_iteration + capture.control_iter


def takes_micro_batch(capture: CaptureConfig, index: int) -> bool:
    """Whether a micro-batch (from 0) of a captured iteration is captured."""
    return capture.collect_micro_batches == 0 or index < capture.collect_micro_batches


def last_captured(experiment: Experiment) -> int:
    """The last iteration that is captured; 0 where nothing is."""
    iterations = range(1, experiment.training.iterations + 1)
    return max((i for i in iterations if is_captured(experiment.capture, i)), default=0)


def expected_tensors(experiment: Experiment) -> Iterator[Expected]:
    """Every tensor one captured micro-batch gives."""
    for module, _ in decoder_modules(experiment.model):
        tensors = (
            _attention(experiment, module)
            if module.name == ATTENTION
            else _linear(experiment, module)
        )
        yield from (t for t in tensors if wanted(experiment.capture, t.tensor))


def capture_bytes(experiment: Experiment) -> int:
    """Bytes of full tensors the whole run will store; 0 unless `capture.level` is tensors."""
    if experiment.capture.level is not CaptureLevel.tensors:
        return 0
    training, capture = experiment.training, experiment.capture
    iterations = sum(is_captured(capture, i) for i in range(1, training.iterations + 1))
    num_micro_batches = num_micro_batches_each(experiment)
    micro_batches = sum(takes_micro_batch(capture, i) for i in range(num_micro_batches))
    tensors = list(expected_tensors(experiment))
    each = sum(t.num_bytes for t in tensors if not t.once)
    once = sum(t.num_bytes for t in tensors if t.once)
    return iterations * (once + micro_batches * each * experiment.launcher.num_processes)


def _linear(experiment: Experiment, module: ModuleId) -> Iterator[Expected]:
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    shape = linear_shapes(experiment.model)[module.name]
    x, y = (T, B, shape.input_width), (T, B, shape.output_width)
    w = (shape.output_width, shape.input_width)
    size = element_bytes(experiment.training)
    yield Expected(module, "forward", "pre", "input", x, size)
    yield Expected(module, "forward", "pre", "weight", w, size, once=True)
    yield Expected(module, "forward", "post", "output", y, size)
    yield Expected(module, "backward", "pre", "grad_output", y, size)
    yield Expected(module, "backward", "pre", "weight", w, size, once=True, shared=True)
    yield Expected(module, "backward", "post", "grad_input", x, size)
    yield Expected(module, "backward", "post", "grad_weight", w, size)
    yield Expected(module, "backward", "post", "main_grad", w, 4, once=True)


def _attention(experiment: Experiment, module: ModuleId) -> Iterator[Expected]:
    T, B = experiment.training.seq_length, experiment.training.micro_batch_size
    model, size = experiment.model, element_bytes(experiment.training)
    H, G, D = model.num_attention_heads, model.num_query_groups, model.head_dim
    q, kv, P, o = (T, B, H, D), (T, B, G, D), (B, H, T, T), (T, B, H * D)
    yield Expected(module, "forward", "pre", "query", q, size)
    yield Expected(module, "forward", "pre", "key", kv, size)
    yield Expected(module, "forward", "pre", "value", kv, size)
    yield Expected(module, "forward", "post", "attn_weights", P, size)
    yield Expected(module, "forward", "post", "output", o, size)
    yield Expected(module, "backward", "pre", "grad_output", q, size)
    yield Expected(module, "backward", "post", "grad_attn_weights", P, size)
    yield Expected(module, "backward", "post", "grad_query", q, size)
    yield Expected(module, "backward", "post", "grad_key", kv, size)
    yield Expected(module, "backward", "post", "grad_value", kv, size)
