"""What is written of a tensor: in the manifest, among the statistics, and in a `.pt` file of its own.

Where a tensor passes, only what belongs to the moment is noted. The rest is made for many tensors in a row: between
training's operations the interpreter finds nothing of its own in the processor's caches, and the same code takes
several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import orjson
from torch import Tensor

from quantexp.capture.names import TensorName, formats_record
from quantexp.capture.record.deferred import Deferred
from quantexp.capture.statistics.summary import Summary
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.slots import Operand
from quantexp.quant.step_state import current_state

#: Slot -> format and options.
Formats = dict[str, dict[str, object]]
#: Of a tensor as it came: neither a quantised operand nor a scale.
BEFORE: Mapping[str, object] = {"values": "before"}
#: What most metadata is.
_JSON = frozenset({str, int, float, bool, list, dict, type(None)})


class About:
    """One tensor's metadata, each form of it made once, when it is asked for."""

    def __init__(
        self, make: Callable[[], dict[str, Any]], statistics: Summary | Deferred | None = None
    ) -> None:
        """`make` gives the metadata, `statistics` among them."""
        self._make = make
        self.statistics = statistics

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> About:
        """Of metadata that there is already."""
        return cls(lambda: metadata, metadata.get("statistics"))

    def with_more(self, **more: Any) -> About:
        """The same, and something else."""
        return About(lambda: self.made() | more, self.statistics)

    @property
    def deferred(self) -> Deferred | None:
        """The statistics, where they were left for later."""
        return self.statistics if isinstance(self.statistics, Deferred) else None

    @property
    def held_bytes(self) -> int:
        """What is held in memory until the statistics are counted."""
        return 0 if self.deferred is None else self.deferred.num_bytes

    def made(self) -> dict[str, Any]:
        """The metadata; made now, if it was not before."""
        return self._metadata

    def finish(self) -> None:
        """Have it in every form, once the statistics are counted."""
        _ = self._json

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return self._make()

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """With statistics and numbers that were left on the tensor's device as JSON holds them."""
        return {
            key: value if type(value) in _JSON else _plain(value)
            for key, value in self._metadata.items()
        }

    @cached_property
    def _json(self) -> bytes:
        return orjson.dumps(self.resolved)

    def line(self, more: Mapping[str, Any] | None = None) -> bytes:
        """A line of JSON; `more` comes last."""
        parts = (self._json[1:-1], orjson.dumps(more)[1:-1] if more else b"")
        return b"{" + b",".join(filter(None, parts)) + b"}\n"


class Describer:
    """Says of tensors what is written of them, by the micro-batch that they pass in."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        #: What else a module says of a tensor, by its name (the softmax scale).
        self.more: dict[ModuleId, Callable[[str], Mapping[str, object]]] = {}
        self._micro_batch: int | None = None
        self._when: Mapping[str, object] = {}
        self._declared: dict[ModuleId, tuple[ModulePrecision | None, Formats]] = {}

    def begin(self, iteration: int, micro_batch: int | None, loss_scale: float | None) -> None:
        """What passes from now on belongs to this micro-batch; None is the whole iteration."""
        self._micro_batch = micro_batch
        self._when = {
            "iteration": iteration,
            "micro_batch": micro_batch,
            "rank": self.rank,
            "loss_scale": loss_scale,
        }

    def about(
        self,
        name: TensorName,
        precision: ModulePrecision,
        tensor: Tensor,
        statistics: Summary | Deferred,
        more: Mapping[str, object] = BEFORE,
    ) -> About:
        """What is written of a tensor that passes now; `more` says which of its values these are."""
        shape, dtype, when = tensor.shape, tensor.dtype, self._when
        of_module, formats = self.more[precision.module](name.tensor), self._formats(precision)

        def make() -> dict[str, Any]:
            return {
                "module": name.module,
                "layer": name.layer,
                "layer_type": name.layer_type,
                "operation": name.operation,
                "phase": name.phase,
                "component": name.component,
                "quant_type": name.quant_type,
                "tensor": name.tensor,
                **more,
                **when,
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                **of_module,
                "formats": formats,
                "statistics": statistics,
            }

        return About(make, statistics)

    def _formats(self, precision: ModulePrecision) -> Formats:
        """`formats_record`, kept of a module whose slots depend on nothing but what is declared."""
        declared, record = self._declared.get(precision.module, (None, {}))
        if declared is precision:
            return record
        record = formats_record(precision, self._of_moment)
        if not any(entry.operand.needs_step_state for entry in precision.entries()):
            self._declared[precision.module] = precision, record
        return record

    def _of_moment(self, operand: Operand) -> dict[str, object]:
        """What the slot's values depended on in this micro-batch; nothing of a whole iteration."""
        if self._micro_batch is None or not operand.needs_step_state:
            return {}
        return current_state().record(operand)


def _plain(value: Any) -> Any:
    if isinstance(value, Summary | Deferred):
        return value.record()
    return float(value) if isinstance(value, Tensor) else value
