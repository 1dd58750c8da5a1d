"""Records the quantised operands of the products: their values, their scales, and the statistics of both.

The values are the multiplied ones, dequantised, in the working dtype, and after a Hadamard transform if there is one.
The codes of block scales are a separate tensor; a per-tensor scale is in the metadata. A forward copy that the backward
reuses is recorded only in the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quantexp.capture.names import TensorName, quant_type
from quantexp.capture.operands import SCALE, QuantisedOperand, quantised_operand, scale_sample
from quantexp.capture.select.choice import sample_of
from quantexp.capture.statistics.summary import summarise
from quantexp.formats import Scales, TwoLevelScales
from quantexp.formats.decoding import scale_values
from quantexp.quant.hooks import PRE, Layout
from quantexp.quant.multiply import scales
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Slot

if TYPE_CHECKING:
    from quantexp.capture.record.recorder import Recorder


class OperandRecorder:
    """Records quantised operands as part of a rank's capture; a hook for `hook_operands`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        #: Operands that are constant in an iteration -> the last iteration in which they were recorded.
        self._taken: dict[tuple[ModuleId, str], int] = {}

    def __call__(
        self,
        precision: ModulePrecision,
        slot: Slot,
        x: Tensor,
        values: Tensor,
        layout: Layout,
        /,
    ) -> None:
        """Record one operand, if it is quantised and selected."""
        operand = quantised_operand(slot, precision.spec(slot))
        if operand is None or not self._passes(precision, operand):
            return
        if operand.once and not self._is_first(precision.module, operand):
            return
        with self.recorder.recording():
            self._keep(precision, operand, layout(x), layout(values))

    def wants(self, precision: ModulePrecision, slot: Slot, /) -> bool:
        """Whether an operand is recorded now."""
        operand = quantised_operand(slot, precision.spec(slot))
        return operand is not None and self._passes(precision, operand)

    def _passes(self, precision: ModulePrecision, operand: QuantisedOperand) -> bool:
        return self.recorder.passes(
            precision.module, operand.operation, operand.tensor, alike=operand.once
        )

    def _is_first(self, module: ModuleId, operand: QuantisedOperand) -> bool:
        key, iteration = (module, operand.tensor), self.recorder.iteration
        first = self._taken.get(key) != iteration
        self._taken[key] = iteration
        return first

    def _keep(
        self, precision: ModulePrecision, operand: QuantisedOperand, x: Tensor, values: Tensor
    ) -> None:
        recorder, module = self.recorder, precision.module
        dim = operand.dim(x.ndim)
        operand_scales = scales(x, operand.spec, dim)
        taken = recorder.take(module, operand.operation, operand.tensor)
        part = recorder.holder.part(module.name, operand.source, tuple(x.shape))
        sample = sample_of(part.whole, operand.source, taken.sample_of, taken.sample_count)
        about = {"slot": operand.key, "source": operand.source, "dim": dim}

        def named(tensor: str) -> TensorName:
            return TensorName(
                module.layer, module.name, operand.operation, PRE, tensor, quant_type(precision)
            )

        name = named(operand.tensor)
        more = {**about, "values": "after", "tensor_scale": _of_tensor(operand_scales)}
        recorder.keep(name, precision, values, recorder.summary(values), taken, part, sample, more)
        codes = _of_blocks(operand_scales)
        if codes is None or operand.block is None:
            return
        name = named(operand.tensor + SCALE)
        more = {**about, "values": "scale", "tensor_scale": None}
        summary = summarise(scale_values(codes, None, operand.spec.fmt))
        if sample is not None and sample["axis"] == dim and not part.has_blocks(dim, operand.block):
            sample = None  # the sample's blocks are none of this rank's
        sample = scale_sample(sample, part.whole, dim, operand.block)
        part = part.in_blocks(dim, operand.block)
        recorder.keep(name, precision, codes, summary, taken, part, sample, more)


def _of_tensor(scales_: Scales) -> Tensor | None:
    """The per-tensor scale, 0-dim, on the tensor's device; None with block scales only."""
    if isinstance(scales_, TwoLevelScales):
        return scales_.tensor
    return scales_ if scales_.ndim == 0 and scales_.is_floating_point() else None


def _of_blocks(scales_: Scales) -> Tensor | None:
    """The codes of the block scales, or their factors; None with a per-tensor scale only."""
    if isinstance(scales_, TwoLevelScales):
        return scales_.block
    return None if scales_.ndim == 0 else scales_
