"""The residual stream, looked at where it passes through the decoder's layers.

    resid_pre   what enters the first layer: the embedding's output
    resid_mid   after a layer's attention was added
    resid_post  after its MLP was added, which is what enters the next layer

The names are TransformerLens's. A tensor's gradient is that of everything that follows, both of the branch and of the
stream that passes it. A layer that is recomputed in the backward shows its tensors twice, its gradients once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE, TensorHook


def watch_residual(layer: nn.Module, first: bool, hook: TensorHook) -> None:
    """Hand the stream in one of Megatron's transformer layers to `hook`, what enters it only of the first one."""

    def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        look_at(hook, "resid_pre", PRE, args[0] if args else kwargs["hidden_states"])

    def before_mlp(module: Any, args: tuple[Any, ...]) -> None:
        look_at(hook, "resid_mid", POST, args[0])

    def after_layer(module: Any, args: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        look_at(hook, "resid_post", POST, result[0])

    if first:
        layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    layer.get_submodule("pre_mlp_layernorm").register_forward_pre_hook(before_mlp)
    layer.register_forward_hook(after_layer)


def look_at(hook: TensorHook, name: str, phase: str, x: Tensor) -> None:
    """Hand over the tensor now, and its gradient once it is known; what leaves forward enters backward."""
    hook(FORWARD, phase, name, x)
    if torch.is_grad_enabled() and x.requires_grad:
        look = _gradient(hook, f"grad_{name}", PRE if phase == POST else POST)
        x.register_hook(look)  # type: ignore[no-untyped-call]


def _gradient(hook: TensorHook, name: str, phase: str) -> Callable[[Tensor], None]:
    def look(gradient: Tensor) -> None:
        hook(BACKWARD, phase, name, gradient)

    return look
