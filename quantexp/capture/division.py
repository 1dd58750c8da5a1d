"""Which part of each captured tensor a rank holds, and which rank stores a tensor that several hold alike.

Tensor parallelism divides along (I input width, O output width):

    column layer (qkv, q-proj, kv-up, fc1)      input whole; weight O; output, grad_output O; grad_input tokens
    row layer (proj, fc2)                       input, grad_input I; weight I; output tokens; grad_output whole
    attention                                   heads
    residual stream, router                     tokens
    norm                                        weight whole; output tokens, of queries and keys heads

Tokens are divided by tensor parallelism only with sequence parallelism, else these tensors are whole. Context
parallelism divides the tokens of all of them (of scores, the queries); weights are alike on its ranks, and the weight
gradient of a micro-batch is a sum over them. If several ranks share a key-value head, it is alike on them, and its
gradient a sum over them. Routed experts are divided by expert-tensor parallelism alone: their tokens follow from the
router, and the tensors whose tokens would be divided are sums.

Context parallelism gives rank r the chunks r and 2 CP - 1 - r of 2 CP, which balances causal attention. fc1 has gate
and up, and a rank's share of each. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from quantexp.capture.names import RESIDUAL, ROUTER
from quantexp.capture.operands import source_of
from quantexp.capture.parts import Part, Range
from quantexp.model.decoder import ATTENTION, is_norm, is_routed
from quantexp.model.layout import Layout, Place
from quantexp.model.shards import Shard
from quantexp.schema import Experiment

#: Tensors that are equal on every rank that has the same part of the model, whatever its micro-batch.
ALIKE = frozenset({"weight", "main_grad"})
_OF_SCORES = frozenset({"attn_weights", "exp_scores", "grad_attn_weights", "grad_scores"})
_KEY_VALUE = frozenset({"key", "value", "grad_key", "grad_value"})
#: The norms of heads, whose results ranks divide like these tensors of attention.
_HEADS = {"q-norm": "query", "k-norm": "key"}
#: Tensors of the shape of a weight.
WEIGHT_LIKE = frozenset({"weight", "grad_weight", "main_grad"})
#: The axis along which tensor parallelism divides the tensors of a linear layer; others are whole or divided by tokens.
_COLUMN_LAYER = {"output": -1, "grad_output": -1}
_ROW_LAYER = {"input": -1, "grad_input": -1}
#: The tensor of each kind of layer that the ranks compute as partial sums.
_REDUCED = {False: "grad_input", True: "output"}


@dataclass(frozen=True)
class Split:
    """How the ranks of a group hold a tensor: divided along an axis, as summands, or alike."""

    size: int
    #: This rank's index in the group.
    index: int
    #: None if each rank has the tensor's full extent.
    axis: int | None = None
    #: Whether the ranks hold summands.
    is_sum: bool = False
    #: This rank's chunks of the axis, of `num_chunks` equal ones.
    chunks: tuple[int, ...] = ()
    num_chunks: int = 0

    @property
    def is_alike(self) -> bool:
        """Whether all ranks hold the same values."""
        return self.axis is None and not self.is_sum

    def cut(self, ranges: Iterable[Range], extent: int) -> list[Range]:
        """The part of consecutive ranges, which together have this extent."""
        each = extent // self.num_chunks
        return [
            piece
            for chunk in self.chunks
            for piece in _within(ranges, chunk * each, (chunk + 1) * each)
        ]


def _within(ranges: Iterable[Range], start: int, stop: int) -> Iterable[Range]:
    """The pieces of ranges between two positions in them, laid one after the other."""
    at = 0
    for first, last in ranges:
        low, high = max(start - at, 0), min(stop - at, last - first)
        if low < high:
            yield first + low, first + high
        at += last - first


@dataclass(frozen=True)
class Holder:
    """One rank of a layout, and the parts that it holds."""

    layout: Layout
    place: Place
    #: Key-value heads of the whole model.
    num_query_groups: int
    #: Whether `q-norm` is that of a latent, not of heads.
    has_latents: bool = False

    @classmethod
    def of(cls, experiment: Experiment, rank: int) -> Holder:
        """A rank of an experiment."""
        layout = Layout.of(experiment)
        model = experiment.model
        return cls(layout, layout.place(rank), model.num_query_groups, model.mla is not None)

    def data_rank(self, module: str) -> int:
        """The index among the ranks that hold the same part of a module for other micro-batches."""
        return self.place.expert_data if is_routed(module) else self.place.data

    def metadata(self, module: str, part: Part) -> dict[str, object]:
        """What a layout adds to the metadata of a tensor."""
        if self.layout.is_whole:
            return {}
        shard = {} if part.is_whole else {"shard": part.record()}
        return {"data_rank": self.data_rank(module), **shard}

    def stores(self, module: str, tensor: str, alike: bool | None = None) -> bool:
        """Whether this rank stores its part: of ranks that hold the same values, the first one does.

        Args:
            module: the module's name.
            tensor: the tensor's name, that of a quantised operand or of its scales too.
            alike: whether it is the same for every micro-batch; None goes by the name.
        """
        if alike is None:
            alike = tensor in ALIKE
        if alike and self.data_rank(module) != 0:
            return False
        if self.layout.is_whole:
            return True
        return all(split.index == 0 for split in self.splits(module, tensor) if split.is_alike)

    def part(self, module: str, tensor: str, shape: tuple[int, ...]) -> Part:
        """The part of the whole that a rank's tensor of this shape is; for block scales, of the values' shape."""
        if self.layout.is_whole:
            return Part(shape)
        whole = list(shape)
        ranges: dict[int, list[Range]] = {}
        splits = self.splits(module, tensor)
        divided = [(split.axis % len(shape), split) for split in splits if split.axis is not None]
        for axis, split in divided:
            whole[axis] *= split.size
        for axis, split in divided:
            before = ranges.get(axis, [(0, whole[axis])])
            ranges[axis] = split.cut(before, sum(stop - start for start, stop in before))
        cuts = tuple(Shard(axis, tuple(ranges[axis])) for axis in sorted(ranges))
        return Part(tuple(whole), cuts, prod(split.size for split in splits if split.is_sum))

    def local_shape(self, module: str, tensor: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor."""
        shape = list(whole)
        for split in self.splits(module, tensor):
            if split.axis is not None:
                shape[split.axis] //= split.size
        return tuple(shape)

    def splits(self, module: str, tensor: str) -> list[Split]:
        """How each group of several ranks holds a tensor, from the outermost division of an axis to the innermost."""
        tensor = source_of(tensor)
        both = [] if is_routed(module) else [self._over_context(tensor)]
        if module == ATTENTION:
            both += self._over_heads(tensor)
        elif module in _HEADS and not self.has_latents and tensor != "weight":
            both += self._over_heads(_HEADS[module])
        else:
            both.append(self._over_tensor(module, tensor))
        return [split for split in both if split.size > 1]

    def _over_context(self, tensor: str) -> Split:
        size, index = self.layout.context, self.place.context
        if tensor in WEIGHT_LIKE:
            return Split(size, index, is_sum=tensor == "grad_weight")
        chunks = (index, 2 * size - 1 - index)
        return Split(size, index, 2 if tensor in _OF_SCORES else 0, False, chunks, 2 * size)

    def _over_heads(self, tensor: str) -> list[Split]:
        size, index, groups = self.layout.tensor, self.place.tensor, self.num_query_groups
        if tensor not in _KEY_VALUE or groups >= size:
            return [_divided(size, index, 1 if tensor in _OF_SCORES else 2)]
        sharing = size // groups
        is_sum = tensor.startswith("grad_")
        return [
            _divided(groups, index // sharing, 2),
            Split(sharing, index % sharing, is_sum=is_sum),
        ]

    def _over_tensor(self, module: str, tensor: str) -> Split:
        size, index = self.layout.tensor, self.place.tensor
        routed = is_routed(module)
        if routed:
            size, index = self.layout.expert_tensor, self.place.expert_tensor
        by_tokens = _divided(size, index, 0) if self.layout.sequence else Split(size, index)
        if module in (RESIDUAL, ROUTER) or (is_norm(module) and tensor != "weight"):
            return by_tokens
        if is_norm(module):
            return Split(size, index)
        is_row = module == "proj" or module.endswith("fc2")
        if tensor == _REDUCED[is_row]:
            return Split(size, index, is_sum=True) if routed else by_tokens
        if tensor in WEIGHT_LIKE:
            axis: int | None = 1 if is_row else 0
        else:
            axis = (_ROW_LAYER if is_row else _COLUMN_LAYER).get(tensor)
        if axis is None:
            return Split(size, index)
        return _divided(size, index, axis, 2 if module.endswith("fc1") else 1)


def _divided(size: int, index: int, axis: int, pieces: int = 1) -> Split:
    """A contiguous share of an axis, or of each of its equal pieces."""
    chunks = tuple(piece * size + index for piece in range(pieces))
    return Split(size, index, axis, False, chunks, pieces * size)
