"""One rank of several, or a part of a tensor that ranks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.proof.lies.planting import ALWAYS, Planter, When, Where

from .fault import Group, add
from .moments import other_than_declared

_LAST = When(rank=1)


def _operands(
    name: str, line: str, change: Any, where: Where, when: When, tags: str = "ranks"
) -> None:
    add(name, line, Group.LAYOUT, lambda planter: planter.operands(change, where, when), tags)


_operands("rank 1", "wrong on rank 1", other_than_declared, Where(), _LAST)
_operands(
    "rank 1 from iteration 3",
    "wrong on rank 1 from iteration 3 on",
    other_than_declared,
    Where(),
    When(3, rank=1),
)
_operands("rank 1 negated", "operands of rank 1 are negated", lambda o: -o.copy, Where(), _LAST)
_operands(
    "rank 1 wgrad",
    "rank 1's x of wgrad is noise",
    lambda o: o.image(o.planter.noise(o.x)),
    Where(slots="linear.wgrad.x"),
    _LAST,
)
_operands(
    "rank 1 attention",
    "k of rank 1 is doubled",
    lambda o: o.copy * 2,
    Where(slots="qk.fprop.k"),
    _LAST,
)
_operands(
    "rank 0 micro-batch 2",
    "wrong in a later micro-batch of rank 0",
    other_than_declared,
    Where(),
    When(rank=0, micro_batch=2),
)
_operands(
    "experts of rank 1",
    "the experts of rank 1 are wrong",
    other_than_declared,
    Where("expert*"),
    _LAST,
    "expert-ranks",
)
_operands(
    "last stage's last layer",
    "the last of four layers is wrong",
    other_than_declared,
    Where(layer=3),
    ALWAYS,
    "pipeline",
)


def _own_amax(planter: Planter) -> None:
    """A rank scales its part by the part's own amax."""

    def make(original: Any) -> Any:
        def reduced(module: Any, amax: Tensor) -> Tensor:
            planter.fire()
            return amax

        return reduced

    planter.function("reduced", make)


add(
    "amax of the own part",
    "one scale a tensor follows from a rank's own part",
    Group.LAYOUT,
    _own_amax,
    "tensor context",
)


def _own_positions(planter: Planter) -> None:
    """Random numbers follow from positions in a rank's own part."""
    from quantexp.training.megatron.numerics_state import Positions

    def make(original: Any) -> Any:
        def call(positions: Any, stream: str, shape: tuple[int, ...]) -> Any:
            if original(positions, stream, shape):
                planter.fire()
            return ()

        return call

    planter.method(Positions, "__call__", make)


add(
    "positions in the own part",
    "random numbers follow from positions in a rank's part",
    Group.LAYOUT,
    _own_positions,
    "tensor context",
)


def _not_reduced(planter: Planter) -> None:
    """dx of a column layer is a rank's own part of the sum."""
    from quantexp.training.megatron.token_exchange import Exchange, Pending

    def make(original: Any) -> Any:
        def start_reduce(exchange: Any, dx: Tensor) -> Any:
            pending = original(exchange, dx.clone())
            if not exchange.reduces:
                return pending
            pending.wait()
            planter.fire()
            if not exchange.divides_tokens:
                return Pending(dx)
            own = torch.distributed.get_rank(exchange.group)
            return Pending(dx.chunk(exchange._size)[own].clone())

        return start_reduce

    planter.method(Exchange, "start_reduce", make)


add(
    "dx not reduced",
    "dx of a column layer is a rank's own part of the sum",
    Group.LAYOUT,
    _not_reduced,
    "tensor",
)


def _gathered_twice(planter: Planter) -> None:
    """Gathered tokens are the own ones, twice."""
    from quantexp.training.megatron.token_exchange import Exchange, Pending

    def make(original: Any) -> Any:
        def start_gather(exchange: Any, x: Tensor) -> Any:
            pending = original(exchange, x)
            if not exchange.divides_tokens:
                return pending
            pending.wait()
            planter.fire()
            return Pending(torch.cat([x] * exchange._size))

        return start_gather

    planter.method(Exchange, "start_gather", make)


add(
    "own tokens gathered",
    "the gathered tokens are a rank's own, twice",
    Group.LAYOUT,
    _gathered_twice,
    "sequence",
)


def _quantised_before_gather(planter: Planter) -> None:
    """Each rank quantises its own tokens and gathers the copies: scales and blocks of parts."""
    from quantexp.formats import quantise
    from quantexp.quant.sites import FPROP_X
    from quantexp.training.megatron.linear import _Linear

    def make(original: Any) -> Any:
        def forward(ctx: Any, own_x: Tensor, w: Tensor, call: Any) -> Tensor:
            spec = call.precision.spec(FPROP_X)
            if call.exchange.divides_tokens and spec.quantised and not spec.needs_step_state:
                planter.fire()
                own_x = quantise(own_x, spec, axis=0)
            return original(ctx, own_x, w, call)

        return forward

    planter.method(_Linear, "forward", make)


add(
    "quantised before the gather",
    "a rank's own tokens are quantised, and again after the gather",
    Group.LAYOUT,
    _quantised_before_gather,
    "sequence",
)


def _keys_in_rank_order(planter: Planter) -> None:
    """Keys of all ranks in the order of ranks, not of the sequence."""
    from quantexp.quant.attention.context_parallel import SequenceShare

    def make(original: Any) -> Any:
        def gathered(share: Any, own: Tensor) -> Tensor:
            original(share, own)
            planter.fire()
            return torch.cat(list(share.all_gather(own.contiguous())))

        return gathered

    planter.method(SequenceShare, "gathered", make)


add(
    "keys in rank order",
    "the keys of all ranks are in the order of ranks",
    Group.LAYOUT,
    _keys_in_rank_order,
    "context",
)


def _own_keys_alone(planter: Planter) -> None:
    """dk and dv are a rank's own part of the sum."""
    from quantexp.quant.attention.context_parallel import SequenceShare

    def make(original: Any) -> Any:
        def own_sum(share: Any, whole: Tensor) -> Tensor:
            own = share.own_rows(whole).clone()
            original(share, whole)
            planter.fire()
            return own

        return own_sum

    planter.method(SequenceShare, "own_sum", make)


add(
    "dk of the own queries",
    "dk and dv lack the queries of other ranks",
    Group.LAYOUT,
    _own_keys_alone,
    "context",
)


def _rows_of_one_sequence(planter: Planter) -> None:
    """Experts take all rows for those of one sequence."""
    from quantexp.training.megatron.linear import SchemeLinear

    def make(original: Any) -> Any:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
            before = module.rows
            if before is not None:
                planter.fire()
                module.rows = None
            try:
                return original(module, *args, **kwargs)
            finally:
                module.rows = before

        return forward

    planter.method(SchemeLinear, "_forward_impl", make)


add(
    "rows of one sequence",
    "an expert's blocks along tokens cross sequences and sources",
    Group.LAYOUT,
    _rows_of_one_sequence,
    "experts",
)


def _rows_rolled(planter: Planter) -> None:
    """The sequence of each row of an expert is that of its neighbour."""
    from quantexp.quant.rows import Rows

    def make(original: Any) -> Any:
        def init(rows: Any, sequence: Tensor, *more: Any) -> None:
            planter.fire()
            original(rows, sequence.roll(1), *more)

        return init

    planter.method(Rows, "__init__", make)


add(
    "rows rolled",
    "an expert's rows have each other's sequences",
    Group.LAYOUT,
    _rows_rolled,
    "experts",
)
