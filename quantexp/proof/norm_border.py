"""A norm whose gain or result a scheme quantises, recomputed where its result leaves the module.

    gain_D = image of w_D          n_TD = rms_norm(x_TD, gain_D)          y_TD = image of n_TD

The gain that the module shows must be the image of its parameter, bit for bit, and so must be what leaves it: torch's
norm of what entered it with that gain gives the same bits again, and their image is the result. So the gain that was
used, whatever was shown, is compared with all elements of the result. n itself is compared with the norm in float64 in
some rows (`between.Norm`).

    # T rows, D width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import in_backward, unseen
from quantexp.proof.between import Norm
from quantexp.proof.bits import num_unequal
from quantexp.proof.call import Largest
from quantexp.proof.draws import Moment, lines
from quantexp.proof.findings import Finding, Status
from quantexp.proof.hooked import Hooked, plain
from quantexp.proof.image import image, own_amax
from quantexp.proof.products import num_wrong
from quantexp.proof.verdict import Explain, Observed, compared
from quantexp.quant.precision import Entry, ModulePrecision
from quantexp.quant.product_context import ObserverHandle, ProductContext
from quantexp.quant.sites import NORM_W, NORM_Y, Slot

#: Receives the result for a slot, and whether the forward pass is recomputed.
Note = Callable[[Entry, Finding, bool], None]
#: Rows that are compared with the norm in float64.
_ROWS = 8
_NOT_SHOWN = Finding(Status.MISMATCH, "its norm showed no gain", quantised=True)
_NOT_USED = Finding(Status.MISMATCH, "its norm used the parameter as it is", quantised=False)


class NormBorder(Hooked):
    """One norm of the map while it is watched.

    Args:
        module: a norm with `weight` and `eps`.
        declared: its slots.
        moment: when the running pass is.
        largest: the maximum of an amax over the ranks that divide the result.
        note: receives the result of each slot.
        explain: says what a wrong operand is instead.
    """

    def __init__(
        self,
        module: nn.Module,
        declared: ModulePrecision,
        moment: Callable[[], Moment],
        largest: Largest,
        note: Note,
        explain: Explain,
    ) -> None:
        super().__init__()
        self.declared, self._moment, self._largest = declared, moment, largest
        self._module: Any = module
        self._note, self._explain = note, explain
        self._shown: Tensor | None = None

    @property
    def rounds_result(self) -> bool:
        """Whether what leaves the module is no norm, but its image."""
        return self.declared.spec(NORM_Y).quantised

    def gain(self) -> Tensor:
        """The gain that the norm must use."""
        return self._image(NORM_W, self._module.weight.detach())

    def _install(self) -> None:
        self._hook(ObserverHandle(self.declared.module, self._show))
        self._hook(self._module.register_forward_hook(plain(self._leave)))

    def _forget(self) -> None:
        self._shown = None

    def _show(self, _: ProductContext, __: Tensor, gain: Tensor) -> None:
        self._shown = gain.detach()

    def _leave(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        with unseen():
            x, y = args[0].detach(), output.detach()
            shown, self._shown = self._shown, None
            w, gain = self._module.weight.detach(), self.gain()
            n = self._normal(x, gain)
            expected = self._image(NORM_Y, n)
            of_gain, of_result = _NOT_SHOWN, self._finding(NORM_Y, y, n, expected)
            if shown is not None:
                of_gain = self._finding(NORM_W, shown, w, gain)
            if of_result.status is Status.MISMATCH and self._uses(w, x, y):
                of_gain = _NOT_USED if of_gain.status is not Status.MISMATCH else of_gain
                of_result = self._finding(NORM_Y, y, n, y)
            if of_result.status is not Status.MISMATCH and (wrong := self._num_wrong(x, n, gain)):
                words = f"{wrong} of its drawn elements before rounding are not the norm of what entered it"
                of_result = Finding(Status.MISMATCH, words, quantised=True)
            for slot, finding in ((NORM_Y, of_result), (NORM_W, of_gain)):
                entry = Entry(self.declared.module, slot, self.declared.spec(slot))
                self._note(entry, finding, in_backward())

    def _uses(self, gain: Tensor, x: Tensor, y: Tensor) -> bool:
        """Whether the result is that of another gain; not asked under a scale for which all ranks would be needed."""
        if self.declared.spec(NORM_Y).is_scaled:
            return False
        return not num_unequal(y, self._image(NORM_Y, self._normal(x, gain)))

    def _normal(self, x: Tensor, gain: Tensor) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), gain, self._module.eps)

    def _image(self, slot: Slot, x: Tensor) -> Tensor:
        """What a slot must be, under the amax of the whole tensor if its scale depends on one."""
        spec, amax = self.declared.spec(slot), None
        if spec.is_scaled:
            amax = self._largest(self.declared.module, own_amax(x, spec, -1))
        return image(x, spec, -1, amax=amax)

    def _finding(self, slot: Slot, own: Tensor, source: Tensor, expected: Tensor) -> Finding:
        number = num_unequal(own, expected) if own.shape == expected.shape else own.numel()
        return compared(own, source, self.declared.spec(slot), -1, number, self._explain)

    def _num_wrong(self, x: Tensor, n: Tensor, gain: Tensor) -> int:
        rows_x, rows_n = x.reshape(-1, x.shape[-1]), n.reshape(-1, x.shape[-1])
        chosen = self._moment().choice(self.declared.module, "norm")
        picked = lines(chosen, len(rows_x), 1, _ROWS)
        return num_wrong(rows_n[picked], Norm(rows_x[picked], gain, self._module.eps).forward())


def note_failure(
    observed: Observed, moment: Callable[[], Moment], entry: Entry, finding: Finding, _: bool
) -> None:
    """Report what is wrong with a slot, the first time."""
    if finding.status is Status.MISMATCH and not any(
        words.startswith(f"{entry.label}:") for words in observed.others
    ):
        words = f"declared {entry.spec.fmt.name}, {finding.reason}"
        observed.others.append(f"{entry.label}: {words}, in micro-batch {moment().micro_batch}")
