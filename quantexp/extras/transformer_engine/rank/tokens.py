"""The tensors that Transformer Engine's linear layers gather under sequence parallelism, with the tokens of all ranks.

A column layer gathers x, and a row layer g, from the ranks that share it: quantised before or, under a custom recipe,
after. Captures and the proof of engagement gather the tensor before quantisation once more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantexp.quant.sites import Operand
from quantexp.training.megatron.token_exchange import Exchange

#: The layers, by `parallel_mode`, that gather an operand.
_GATHERED_BY = {Operand.X: "column", Operand.G: "row"}


def whole_tokens(module: Any, operand: Operand, own: Tensor) -> Tensor:
    """The operand as the layer's products take it; all ranks that share the layer call this at the same point.

    `own` is what this rank has, its first dimension the tokens; it is detached.
    """
    own = own.detach()
    if not module.sequence_parallel or module.parallel_mode != _GATHERED_BY.get(operand):
        return own
    return Exchange(module.tp_group, divides_tokens=True).start_gather(own).wait()
