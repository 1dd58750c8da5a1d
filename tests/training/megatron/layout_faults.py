"""Faults of layouts, each planted in every rank; `test_layouts` shows that it notices them.

`overlapping` plants nothing: it lets a CPU overlap its collectives, as GPUs do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _replaced(target: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    return mock.patch(target, value)


@contextlib.contextmanager
def amax_of_own_part() -> Iterator[None]:
    """A tensor's scale follows each rank's own part."""
    with _replaced(
        "quantexp.training.megatron.numerics_state.reduce_amax", lambda module, amax: amax.clone()
    ):
        yield


@contextlib.contextmanager
def norm_in_float32() -> Iterator[None]:
    """Megatron's norm, whose squares are added in the order of the layout."""
    with _replaced(
        "quantexp.training.megatron.session.same_norm_in_every_layout", contextlib.nullcontext
    ):
        yield


@contextlib.contextmanager
def rows_without_source() -> Iterator[None]:
    """An expert's rows are numbered by their column alone, so that micro-batches of several ranks are mixed."""
    from quantexp.quant.rows import Rows

    plain = Rows.__init__

    def mixed(self: Rows, sequence: Tensor, num_sequences: int, *args: Any, **kwargs: Any) -> None:
        plain(self, torch.zeros_like(sequence), 1)

    with mock.patch.object(Rows, "__init__", mixed):
        yield


@contextlib.contextmanager
def rotary_gradient_in_parts() -> Iterator[None]:
    """Latent attention as Megatron has it: the gradient of the rotary key is each rank's own part."""
    from quantexp.training.megatron.latent import SchemeMLASelfAttention

    with mock.patch.object(SchemeMLASelfAttention, "_complete", lambda self, m, a, output: output):
        yield


@contextlib.contextmanager
def rotary_gradient_of_own_heads() -> Iterator[None]:
    """The same without sequence parallelism: nothing adds the gradients of the ranks' heads."""
    from quantexp.training.megatron.latent import _SumRotaryGradient

    with mock.patch.object(_SumRotaryGradient, "apply", lambda y, latent: y):
        yield


@contextlib.contextmanager
def query_norm_added_over_ranks() -> Iterator[None]:
    """Megatron adds the gradients of the query latent's norm, which every rank has whole."""
    from quantexp.training.megatron import model

    plain = model.build_chunks

    def with_sum(*args: Any, **kwargs: Any) -> Any:
        chunks, config = plain(*args, **kwargs)
        config.qk_layernorm = True
        return chunks, config

    with _replaced("quantexp.training.megatron.step.build_chunks", with_sum):
        yield


@contextlib.contextmanager
def head_norms_not_added() -> Iterator[None]:
    """The gradients of the norms of query and key heads are those of each rank's own heads."""
    from quantexp.training.megatron import model

    plain = model.build_chunks

    def without_sum(*args: Any, **kwargs: Any) -> Any:
        chunks, config = plain(*args, **kwargs)
        config.qk_layernorm = False
        return chunks, config

    with _replaced("quantexp.training.megatron.step.build_chunks", without_sum):
        yield


@contextlib.contextmanager
def context_in_plain_order() -> Iterator[None]:
    """Ranks of a context-parallel group take neighbouring chunks of a sequence."""

    def plain(x: Tensor, rank: int, num_ranks: int) -> Tensor:
        return x.chunk(num_ranks, dim=-1)[rank]

    with _replaced("quantexp.training.megatron.passes.zigzag", plain):
        yield


@contextlib.contextmanager
def latest_micro_batch_in_backward() -> Iterator[None]:
    """A pipeline's backward pass draws the random numbers of the latest forward pass."""
    with _replaced("quantexp.training.megatron.passes.begin_backward", lambda x, begin: None):
        yield


@contextlib.contextmanager
def experts_drawn_by_local_name() -> Iterator[None]:
    """Every rank's first expert has the same initial weights."""
    from quantexp.quant.step_state import seed_of as plain

    def local(seed: int, name: str) -> int:
        for expert in range(64):
            name = name.replace(f"local_experts.{expert}.", f"local_experts.{expert % 2}.")
        return plain(seed, name)

    with _replaced("quantexp.training.megatron.initial_weights.seed_of", local):
        yield


@contextlib.contextmanager
def parameters_not_marked_as_divided() -> Iterator[None]:
    """Megatron counts a divided parameter on one rank of its group alone."""
    with _replaced("quantexp.training.megatron.initial_weights.mark_divided", lambda parts: None):
        yield


@contextlib.contextmanager
def positions_in_own_part() -> Iterator[None]:
    """Random numbers follow from an element's position in a rank's own part."""
    from quantexp.training.megatron.numerics_state import Positions

    with mock.patch.object(Positions, "__call__", return_value=()):
        yield


@contextlib.contextmanager
def heads_in_own_part() -> Iterator[None]:
    """The same in attention alone."""
    from quantexp.training.megatron.numerics_state import Positions

    plain = Positions.__call__

    def found(self: Positions, stream: str, shape: tuple[int, ...]) -> Any:
        return () if " attention " in stream else plain(self, stream, shape)

    with mock.patch.object(Positions, "__call__", found):
        yield


@contextlib.contextmanager
def rows_of_own_micro_batch() -> Iterator[None]:
    """All rows of an expert draw the random numbers of a rank's own micro-batch."""
    from quantexp.quant.rows import Rows

    plain = Rows.__init__

    def own(self: Rows, sequence: Tensor, number: int, micro_batches: tuple[int, ...]) -> None:
        plain(self, sequence, number, (0,) * len(micro_batches))

    with mock.patch.object(Rows, "__init__", own):
        yield


@contextlib.contextmanager
def weight_of_own_micro_batch() -> Iterator[None]:
    """All rows of an expert are multiplied with the weight of a rank's own micro-batch."""
    from quantexp.quant.multiply import multiply_operands

    with _replaced(
        "quantexp.quant.linear.multiply_rows", lambda p, x, w, rows: multiply_operands(p, x, w)
    ):
        yield


@contextlib.contextmanager
def norm_weights_not_reduced() -> Iterator[None]:
    """Gradients of norms under sequence parallelism stay those of a rank's own tokens."""
    from quantexp.training.megatron.norm import MarkedRMSNorm

    plain = MarkedRMSNorm.__init__

    def unmarked(self: MarkedRMSNorm, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]

    with mock.patch.object(MarkedRMSNorm, "__init__", unmarked):
        yield


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """No fault: reductions and gathers run beside the computation."""
    with _replaced("quantexp.training.megatron.step.overlaps", lambda device: True):
        yield


@contextlib.contextmanager
def parameters_not_gathered() -> Iterator[None]:
    """With overlap, a rank's copies of the other ranks' parameters are those before the step."""
    from quantexp.training.megatron.step import Stepper

    with overlapping(), mock.patch.object(Stepper, "gather_parameters", return_value=None):
        yield
