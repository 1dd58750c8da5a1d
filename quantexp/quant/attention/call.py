"""What one call of an attention module has besides q, k and v, for every path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quantexp.quant.attention.context_parallel import SequenceShare
from quantexp.quant.hooks import TensorHook, no_hook
from quantexp.quant.precision import ModulePrecision

#: Whether a hook needs a tensor, by operation and name.
TensorFilter = Callable[[str, str], bool]


def no_tensor_wanted(operation: str, name: str) -> bool:
    """The filter of a module without hooks: no tensor is needed."""
    return False


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention module."""

    precision: ModulePrecision
    #: The factor of the scores, a in the docstrings of the paths.
    softmax_scale: float
    #: Receives the gradients, and the tensors that `wants` selects.
    hook: TensorHook = no_hook
    #: Whether the hook needs P, the gradient of P, or that of the scores.
    wants: TensorFilter = no_tensor_wanted
    #: True where a query does not see a key, [B or 1, 1, T queries, T keys]; None means causal.
    mask: Tensor | None = None
    #: The rank's part of each sequence: then q, k and v have its tokens only; None means whole sequences.
    share: SequenceShare | None = None

    def all_keys(self, x_TBGD: Tensor) -> Tensor:
        """k or v of whole sequences."""
        return x_TBGD if self.share is None else self.share.gathered(x_TBGD)

    def own_keys(self, gradient_TBGD: Tensor, x_TBGD: Tensor) -> Tensor:
        """The gradient of k or v as it reached this call, from that of whole sequences; in the dtype of x, k or v."""
        if self.share is None:
            return gradient_TBGD
        return self.share.own_sum(gradient_TBGD).to(x_TBGD.dtype)
