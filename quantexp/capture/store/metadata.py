"""The metadata of a tensor in the manifest, in the statistics, and in its `.pt` file.

When a tensor is recorded, only its current context is stored. The rest is built later for many tensors in a row:
between training operations the processor's caches are cold for this code, which then takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import orjson
from torch import Tensor

from quantexp.capture.names import TensorName, formats_record
from quantexp.capture.statistics.summary import Summary
from quantexp.capture.store.deferred import Deferred
from quantexp.formats.spec import QuantSpec
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.step_state import current_state

#: Slot -> format and options.
Formats = dict[str, dict[str, object]]
#: The metadata of an original tensor: neither a quantised operand nor a scale.
BEFORE: Mapping[str, object] = {"values": "before"}
#: Types of most metadata, which need no conversion for JSON.
_JSON = frozenset({str, int, float, bool, list, dict, type(None)})


class About:
    """One tensor's metadata; each form is built once, on first use."""

    def __init__(
        self, make: Callable[[], dict[str, Any]], statistics: Summary | Deferred | None = None
    ) -> None:
        """`make` returns the metadata, including `statistics`."""
        self._make = make
        self.statistics = statistics

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> About:
        """Wrap existing metadata."""
        return cls(lambda: metadata, metadata.get("statistics"))

    def with_more(self, **more: Any) -> About:
        """The metadata with additional entries."""
        return About(lambda: self.made() | more, self.statistics)

    @property
    def deferred(self) -> Deferred | None:
        """The statistics, if they are deferred."""
        return self.statistics if isinstance(self.statistics, Deferred) else None

    @property
    def held_bytes(self) -> int:
        """The bytes that stay in memory until the statistics are computed."""
        return 0 if self.deferred is None else self.deferred.num_bytes

    def made(self) -> dict[str, Any]:
        """The metadata, built on the first call."""
        return self._metadata

    def finish(self) -> None:
        """Build every form, after the statistics are computed."""
        _ = self._json

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return self._make()

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The metadata as JSON values, with statistics and other numbers copied from the tensor's device."""
        return {
            key: value if type(value) in _JSON else _plain(value)
            for key, value in self._metadata.items()
        }

    @cached_property
    def _json(self) -> bytes:
        return orjson.dumps(self.resolved)

    def line(self, more: Mapping[str, Any] | None = None) -> bytes:
        """A line of JSON that ends with `more`."""
        parts = (self._json[1:-1], orjson.dumps(more)[1:-1] if more else b"")
        return b"{" + b",".join(filter(None, parts)) + b"}\n"


class Describer:
    """Builds the metadata of tensors in the current micro-batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        #: Module -> function that returns more metadata of a tensor by its name (the softmax scale).
        self.more: dict[ModuleId, Callable[[str], Mapping[str, object]]] = {}
        self._micro_batch: int | None = None
        self._when: Mapping[str, object] = {}
        self._declared: dict[ModuleId, tuple[ModulePrecision | None, Formats]] = {}

    def begin(self, iteration: int, micro_batch: int | None, loss_scale: float | None) -> None:
        """Set the current iteration and micro-batch; None stands for the whole iteration."""
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
        """The metadata of the current tensor; `more` says which of its values these are."""
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
        """`formats_record`, cached for modules whose slots depend only on their declaration."""
        declared, record = self._declared.get(precision.module, (None, {}))
        if declared is precision:
            return record
        record = formats_record(precision, self._of_moment)
        if not any(spec.needs_step_state for spec in precision.slots.values()):
            self._declared[precision.module] = precision, record
        return record

    def _of_moment(self, spec: QuantSpec) -> dict[str, object]:
        """The inputs of the slot's values in this micro-batch; empty for a whole iteration."""
        if self._micro_batch is None or not spec.needs_step_state:
            return {}
        return current_state().record(spec)


def _plain(value: Any) -> Any:
    if isinstance(value, Summary | Deferred):
        return value.record()
    return float(value) if isinstance(value, Tensor) else value
