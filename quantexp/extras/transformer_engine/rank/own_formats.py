"""The scheme's own formats inside Transformer Engine's linear layers, by its `CustomRecipe`.

A custom recipe gives each operand a quantizer of ours, and each product of two such operands goes to our `qgemm`
(pytorch/custom_recipes/gemm.py). Here an operand carries its tensor in high precision, and `qgemm` computes the product
functions of `quantexp.quant.linear`, which quantise both operands along the axis that the product reduces. So a layer's
results are those of the emulated layer to the bit, in every format, with blocks within a sequence, random numbers,
amaxes over ranks, operand hooks and the proof of engagement; a slot in bf16 is multiplied as it is. A copy of a weight
that Transformer Engine keeps over micro-batches cannot be stale either: it is the weight. Under sequence parallelism
Transformer Engine gathers the tensor in high precision, as it must, and warns of it; the warning is turned off.

Refused: what `qgemm` is not told of, so that it would be dropped without a message. These are gradient-accumulation
fusion (the weight gradient would be lost: `qgemm` gets no `out`), a bias that the layer adds, whose gradient is fused
with a cast that knows Transformer Engine's own formats alone, and `clip_gradient`, which needs x in dgrad.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from transformer_engine.pytorch import QuantizedTensorStorage, Quantizer

from quantexp.errors import ConfigError
from quantexp.quant.linear import dgrad, fprop, wgrad
from quantexp.quant.multiply import turned_back
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import DGRAD_W, FPROP_W, FPROP_X, WGRAD_X


class SchemeModule(Protocol):
    """A linear layer of Transformer Engine whose slots the precision map declares."""

    precision: ModulePrecision
    fuse_wgrad_accumulation: bool
    use_bias: bool


def scheme_recipe(module: SchemeModule) -> Any:
    """The recipe whose quantizers are those of a layer's slots; it follows `module.precision` when that changes.

    Raises:
        ConfigError: the layer would lose a gradient without a message.
    """
    name, bias = module.precision.module, getattr(module, "apply_bias", module.use_bias)
    if module.fuse_wgrad_accumulation:
        raise ConfigError(
            f"quant.backend=te_emulated: {name} must not have gradient-accumulation fusion, under which Transformer "
            "Engine drops the weight gradients of custom formats, got gradient_accumulation_fusion=True; set it to "
            "False"
        )
    if bias:
        raise ConfigError(
            f"quant.backend=te_emulated: {name} must not add a bias, whose gradient Transformer Engine computes for "
            "its own formats alone, got a bias; take quant.backend=emulated"
        )
    if any(module.precision.spec(slot).clip_gradient for slot in (FPROP_X, FPROP_W)):
        raise ConfigError(
            f"quant.backend=te_emulated: {name} must not have clip_gradient, which needs x where Transformer Engine "
            "multiplies g and w alone, got true; remove it, or take quant.backend=emulated"
        )
    warnings.filterwarnings("ignore", "Attempting to all-gather an unsupported quantized tensor")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    # Outputs, which are not quantised, do not ask for theirs; version 2.16 and later refuse a role without one.
    return recipes.CustomRecipe(qfactory=lambda role: SchemeQuantizer(module))


class SchemeOperand(QuantizedTensorStorage):  # type: ignore[misc]
    """An operand of a product to come: the tensor in high precision, which the product quantises.

    Transformer Engine reads `data`, `scale` and their transposes only to see that they are there.
    """

    custom = True

    def __init__(self, tensor: Tensor, quantizer: SchemeQuantizer) -> None:
        self.tensor: Tensor | None = tensor
        self._quantizer = quantizer
        self.original_shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    @property
    def data(self) -> Tensor | None:
        """The tensor itself."""
        return self.tensor

    scale = data_t = scale_t = data

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """No-op: one tensor serves both uses."""

    def clear(self) -> None:
        """Drop the tensor."""
        self.tensor = None

    def size(self, *dim: int) -> Any:
        """The shape."""
        return self.tensor.size(*dim) if self.tensor is not None else self.original_shape

    def prepare_for_saving(self) -> tuple[list[Tensor | None], SchemeOperand]:
        """The tensor, and an operand to restore it to; this one, which may be kept over micro-batches, stays whole."""
        assert self.tensor is not None
        saved = SchemeOperand(self.tensor, self._quantizer)
        saved.clear()
        return [self.tensor], saved

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take the tensor back, and return those of others."""
        self.tensor = tensors[0]
        return tensors[1:]


class SchemeQuantizer(Quantizer):  # type: ignore[misc]
    """Makes the operands of a layer, and multiplies them as the layer's slots declare."""

    custom = True

    def __init__(self, module: SchemeModule) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.internal = True
        self._module = module

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: Any = None) -> SchemeOperand:
        """An operand that carries the tensor; the product quantises it."""
        if out is not None:
            return self.update_quantized(tensor, out)
        tensor = tensor.detach()
        return SchemeOperand(tensor if dtype is None else tensor.to(dtype), self)

    def update_quantized(
        self, src: Tensor, dst: SchemeOperand, *, noop_flag: Tensor | None = None
    ) -> SchemeOperand:
        """Let an operand carry another tensor."""
        dst.tensor = src.detach().to(dst.dtype)
        return dst

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
        gemm_type: Any = None,
        qresult_x: Any = None,
        qresult_w: Any = None,
    ) -> Tensor:
        """One of the three products of the layer.

        Raises:
            ConfigError: the product has a bias, or accumulates, or another recipe made its other operand.
        """
        precision, product = self._module.precision, str(gemm_type.value)
        if bias is not None or out is not None or accumulate:
            raise ConfigError(
                f"quant.backend=te_emulated: {precision.module} {product} must not add to anything, got a bias or an "
                "accumulation"
            )
        match product:
            case "fprop":
                y = fprop(precision, qx, qw)
            case "dgrad":
                y = turned_back(precision, DGRAD_W, dgrad(precision, qx, qw))
            case _:  # g has lost its shape, which tells the tokens of each sequence
                g = qx.view(*qresult_w.original_shape[:-1], qx.shape[-1])
                y = turned_back(precision, WGRAD_X, wgrad(precision, g, qw))
        return y.to(out_dtype).flatten(0, -2)

    def _get_compatible_recipe(self) -> None:
        return None
