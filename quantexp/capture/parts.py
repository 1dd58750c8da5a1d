"""A stored part of a tensor that several ranks hold together: its whole shape, and the part's place in it.

In a line of the manifest and in the metadata of the values:

    shard: {"whole": [T, B, W], "cuts": [{"axis": 0, "ranges": [[0, 16], [48, 64]]}], "partial": 2}

`ranges` are [start, stop) along the axis, in the order in which they lie in the part; an axis without a cut is whole.
With `partial` n the whole is the sum of n such tensors. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantexp.model.shards import Shard

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """A part of a tensor; without cuts, the whole tensor or a summand of it."""

    #: The shape of the whole tensor.
    whole: tuple[int, ...]
    #: The ranges along each divided axis, by ascending axis.
    cuts: tuple[Shard, ...] = ()
    #: The number of ranks whose tensors sum to the whole at this place.
    summands: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this is the tensor itself."""
        return not self.cuts and self.summands == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        extents = {cut.axis: cut.extent for cut in self.cuts}
        return tuple(extents.get(axis, extent) for axis, extent in enumerate(self.whole))

    def ranges(self, axis: int) -> tuple[Range, ...]:
        """The ranges along an axis."""
        own = (cut.ranges for cut in self.cuts if cut.axis == axis)
        return next(own, ((0, self.whole[axis]),))

    def record(self) -> dict[str, Any]:
        """The part as in the metadata."""
        cuts = [
            {"axis": cut.axis, "ranges": [list(each) for each in cut.ranges]} for cut in self.cuts
        ]
        partial = {"partial": self.summands} if self.summands > 1 else {}
        return {"whole": list(self.whole), "cuts": cuts, **partial}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Part:
        """The part of a line, whose types have been checked.

        Raises:
            ValueError: the ranges do not lie in the whole, or do not fit the shape of the line; says how.
        """
        record = metadata["shard"]
        for ranges in (cut["ranges"] for cut in record["cuts"]):
            if any(len(each) != 2 for each in ranges):
                raise ValueError(f"shard.cuts must have ranges [start, stop], got {ranges}")
        cuts = (
            Shard(cut["axis"], tuple((start, stop) for start, stop in cut["ranges"]))
            for cut in record["cuts"]
        )
        part = cls(tuple(record["whole"]), tuple(cuts), record.get("partial", 1))
        part._require_inside()
        if list(part.shape) != metadata.get("shape"):
            raise ValueError(
                f"shard must fit the shape {metadata.get('shape')}, and its ranges have {list(part.shape)}"
            )
        return part

    def _require_inside(self) -> None:
        axes = [cut.axis for cut in self.cuts]
        if axes != sorted({axis for axis in axes if axis is not None and axis < len(self.whole)}):
            raise ValueError(
                f"shard.cuts must name ascending axes of the whole {list(self.whole)}, got {axes}"
            )
        for cut in self.cuts:
            assert cut.axis is not None
            bounds = [bound for each in cut.ranges for bound in each]
            ascending = bounds == sorted(bounds) and all(start < stop for start, stop in cut.ranges)
            if not ascending or (bounds and bounds[-1] > self.whole[cut.axis]):
                raise ValueError(
                    f"shard.cuts must have ascending ranges within 0 to {self.whole[cut.axis]} along axis {cut.axis}, "
                    f"got {[list(each) for each in cut.ranges]}"
                )

    def positions(self, axis: int, indices: Sequence[int]) -> list[int]:
        """The positions in the part of those of the whole's indices along an axis that it holds."""
        local, start = {}, 0
        for first, stop in self.ranges(axis):
            local.update({first + i: start + i for i in range(stop - first)})
            start += stop - first
        return [local[index] for index in indices if index in local]

    def sampled(self, sample: Mapping[str, Any] | None) -> Part:
        """The part of the whole's sample that this part holds; its extent may be 0."""
        if sample is None:
            return self
        axis, indices = sample["axis"], sample["indices"]
        whole = (*self.whole[:axis], len(indices), *self.whole[axis + 1 :])
        if axis not in {cut.axis for cut in self.cuts}:
            return replace(self, whole=whole)
        ranges = []
        for start, stop in self.ranges(axis):
            inside = [i for i, index in enumerate(indices) if start <= index < stop]
            if inside:
                ranges.append((inside[0], inside[-1] + 1))
        return self._with_ranges(axis, whole, tuple(ranges))

    def has_blocks(self, dim: int, block: int) -> bool:
        """Whether the blocks along a dimension are those of the whole tensor."""
        end = self.whole[dim]
        return all(
            start % block == 0 and (stop % block == 0 or stop == end)
            for start, stop in self.ranges(dim)
        )

    def in_blocks(self, dim: int, block: int) -> Part:
        """The same part of the block scales.

        Where a range is no multiple of the block, blocks are those of the rank by itself, and the whole is all ranks'
        blocks in order.
        """
        whole, extent = self.whole, -(-self.whole[dim] // block)
        if dim not in {cut.axis for cut in self.cuts}:
            return replace(self, whole=(*whole[:dim], extent, *whole[dim + 1 :]))
        ranges = self.ranges(dim)
        if self.has_blocks(dim, block):
            parts = tuple((start // block, -(-stop // block)) for start, stop in ranges)
            return self._with_ranges(dim, (*whole[:dim], extent, *whole[dim + 1 :]), parts)
        own = sum(stop - start for start, stop in ranges)
        each, index = -(-own // block), ranges[0][0] // (ranges[0][1] - ranges[0][0])
        extent = whole[dim] // own * each
        parts = ((index * each, (index + 1) * each),)
        return self._with_ranges(dim, (*whole[:dim], extent, *whole[dim + 1 :]), parts)

    def _with_ranges(self, axis: int, whole: tuple[int, ...], ranges: tuple[Range, ...]) -> Part:
        cuts = (Shard(axis, ranges) if cut.axis == axis else cut for cut in self.cuts)
        return replace(self, whole=whole, cuts=tuple(cuts))
