"""Quantised operands, as the products multiply them: their values, their scales, and the statistics of both.

The values are those that were multiplied, dequantised, in the working dtype; after a Hadamard transform they are the
transform's. Where blocks have scales, the codes of these are a tensor of their own; the one scale of a tensor is in the
metadata. A forward copy that the backward uses again is the forward's and not kept a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quantexp.capture.names import TensorName, quant_type
from quantexp.capture.record.operands import SCALE, Held, held, scale_sample
from quantexp.capture.select.sample import sample_of
from quantexp.capture.statistics.summary import summarise
from quantexp.formats import Scales, TwoLevelScales, get_format
from quantexp.formats.decoding import scale_values
from quantexp.quant.hooks import PRE, Layout
from quantexp.quant.operand import scales
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Product, Site

if TYPE_CHECKING:
    from quantexp.capture.record.recorder import Recorder


class HeldRecorder:
    """The part of a rank's capture that takes quantised operands; a hook for `hook_operands`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        #: The iteration in which an operand was taken that is the same for all of it.
        self._taken: dict[tuple[ModuleId, str], int] = {}

    def __call__(
        self,
        precision: ModulePrecision,
        site: Site,
        product: Product,
        name: str,
        x: Tensor,
        values: Tensor,
        layout: Layout,
        /,
    ) -> None:
        """Take one operand, if it is quantised and asked for."""
        what = held(site, product, name, precision.operand(site, product, name))
        if what is None or not self._passes(precision, what):
            return
        if what.once and not self._is_first(precision.module, what):
            return
        with self.recorder.recording():
            self._keep(precision, what, layout(x), layout(values))

    def wants(self, precision: ModulePrecision, site: Site, product: Product, name: str, /) -> bool:
        """Whether an operand is taken now."""
        what = held(site, product, name, precision.operand(site, product, name))
        return what is not None and self._passes(precision, what)

    def _passes(self, precision: ModulePrecision, what: Held) -> bool:
        return self.recorder.passes(precision.module, what.operation, what.tensor, alike=what.once)

    def _is_first(self, module: ModuleId, what: Held) -> bool:
        key, iteration = (module, what.tensor), self.recorder.iteration
        first = self._taken.get(key) != iteration
        self._taken[key] = iteration
        return first

    def _keep(self, precision: ModulePrecision, what: Held, x: Tensor, values: Tensor) -> None:
        recorder, module = self.recorder, precision.module
        dim = what.dim(x.ndim)
        found = scales(x, what.operand, dim)
        taken = recorder.take(module, what.operation, what.tensor)
        sample = sample_of(tuple(x.shape), what.source, taken.sample_of, taken.sample_count)
        about = {"slot": what.slot, "source": what.source, "dim": dim}

        def named(tensor: str) -> TensorName:
            return TensorName(
                module.layer, module.name, what.operation, PRE, tensor, quant_type(precision)
            )

        name = named(what.tensor)
        more = {**about, "values": "after", "tensor_scale": _of_tensor(found)}
        recorder.keep(name, precision, values, recorder.summary(values), taken, sample, more)
        codes = _of_blocks(found)
        if codes is None:
            return
        assert what.operand.block is not None
        name = named(what.tensor + SCALE)
        more = {**about, "values": "scale", "tensor_scale": None}
        summary = summarise(scale_values(codes, None, get_format(what.operand.format)))
        sample = scale_sample(sample, tuple(x.shape), dim, what.operand.block)
        recorder.keep(name, precision, codes, summary, taken, sample, more)


def _of_tensor(found: Scales) -> Tensor | None:
    """The one scale of a tensor, 0-dim and where the tensor is."""
    if isinstance(found, TwoLevelScales):
        return found.tensor
    return found if found.ndim == 0 and found.is_floating_point() else None


def _of_blocks(found: Scales) -> Tensor | None:
    """The codes of the scales of blocks."""
    if isinstance(found, TwoLevelScales):
        return found.block
    return None if found.is_floating_point() else found
