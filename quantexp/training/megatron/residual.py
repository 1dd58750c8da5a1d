"""Captures the residual stream in the decoder's layers.

    resid_pre   input of the first layer: the embedding's output
    resid_mid   after a layer's attention is added
    resid_post  after its MLP is added: the input of the next layer

The names are TransformerLens's. A tensor's gradient includes both paths that follow it: the branch and the stream that
bypasses it. A layer recomputed in the backward pass produces its tensors twice and their gradients once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE, TensorHook


def watch_residual(layer: nn.Module, first: bool, hook: TensorHook) -> None:
    """Pass the residual stream of a Megatron transformer layer to `hook`; the layer's input only if it is the first."""

    def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass_to_hook(hook, "resid_pre", PRE, args[0] if args else kwargs["hidden_states"])

    def before_mlp(module: Any, args: tuple[Any, ...]) -> None:
        pass_to_hook(hook, "resid_mid", POST, args[0])

    def after_layer(module: Any, args: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        pass_to_hook(hook, "resid_post", POST, result[0])

    if first:
        layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    layer.get_submodule("pre_mlp_layernorm").register_forward_pre_hook(before_mlp)
    layer.register_forward_hook(after_layer)


def pass_to_hook(hook: TensorHook, name: str, phase: str, x: Tensor) -> None:
    """Pass a tensor to `hook`, and its gradient when computed. A forward output's gradient is a backward input."""
    hook(FORWARD, phase, name, x)
    if torch.is_grad_enabled() and x.requires_grad:
        gradient_hook = _gradient_hook(hook, f"grad_{name}", PRE if phase == POST else POST)
        x.register_hook(gradient_hook)  # type: ignore[no-untyped-call]


def _gradient_hook(hook: TensorHook, name: str, phase: str) -> Callable[[Tensor], None]:
    def pass_gradient(gradient: Tensor) -> None:
        hook(BACKWARD, phase, name, gradient)

    return pass_gradient
