"""Transformer Engine's parallel linear layers, each under the recipe that its slots of the precision map have.

The forward pass enters `autocast` with that recipe; the backward pass keeps it. A change of the map changes the recipe
and resets what the module remembers of the former one. Weights are quantised anew in every forward pass: Transformer
Engine would keep a quantised copy until Megatron's schedule says that an iteration begins, which it only does under
`TransformerConfig.fp8`, and never for an evaluation (`config.disable_parameter_transpose_cache`).

A module keeps the quantizers of its first recipe when another one of the same class comes (seen in 2.11.0), so that
only the quantizers say what runs. After a module's first forward pass under a recipe they are compared with it.

Captures see the tensors outside of the layer, in high precision: its input, weight, output, and their gradients. Under
sequence parallelism the input is gathered for them once more.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.extras.transformer_engine.rank.gemm_watch import whole_tokens
from quantexp.extras.transformer_engine.rank.own_formats import scheme_recipe
from quantexp.extras.transformer_engine.rank.recipes import autocast, te_recipe
from quantexp.extras.transformer_engine.rank.support import require_support
from quantexp.extras.transformer_engine.scheme.assignment import OWN_FORMATS
from quantexp.extras.transformer_engine.scheme.operands import (
    FP32_SCALES,
    NV_SCALES,
    RANDOM_HADAMARD,
    TENSOR_EXACT,
    TENSOR_POWER_OF_TWO,
    Held,
    block_of,
    delayed_scale,
    power_of_two_scales,
)
from quantexp.extras.transformer_engine.scheme.recipes import Recipe
from quantexp.extras.transformer_engine.scheme.representation import Representation, represent
from quantexp.formats.types import Rounding, ScaleRule
from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE, no_hook
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Operand, Product, Slot
from quantexp.schema import NamedRecipe
from quantexp.training.megatron.linear import LinearLayer


class TransformerEngineLinear(LinearLayer):
    """The common part of all layers; setting `precision` chooses the recipe.

    Raises:
        RunError: when `precision` is set, if this machine cannot run its recipe.
        EngagementError: in the first forward pass under a recipe, if the quantizers are not those of the recipe.
    """

    #: None multiplies in the working precision.
    recipe: Recipe | None = None
    _precision: ModulePrecision
    #: The last recipe other than None, whose quantizers the module holds.
    _held: Recipe | None = None
    _is_checked = False
    _weight_hook: Any = None

    @property
    def precision(self) -> ModulePrecision:
        """What the precision map declares for this module."""
        return self._precision

    @precision.setter
    def precision(self, declared: ModulePrecision) -> None:
        self._precision, self.recipe = declared, self._recipe_of(declared)
        if self.recipe is None or self.recipe == self._held:
            return
        require_support(self.recipe)
        if self._held is not None:
            self._forget_quantizers()
        self._held, self._is_checked = self.recipe, False

    def _recipe_of(self, declared: ModulePrecision) -> Recipe | None:
        raise NotImplementedError

    def _recipe_object(self) -> Any:
        """Transformer Engine's object for the recipe."""
        raise NotImplementedError

    def _require_quantizers(self, recipe: Recipe) -> None:
        """Refuse quantizers that are not those of the recipe."""

    def _forget_quantizers(self) -> None:
        """Let the next forward pass make new quantizers, which it would only do for a recipe of another class."""
        module: Any = self
        module.fp8_initialized = module.fp8_meta_tensors_initialized = False
        module._fp8_workspaces.clear()
        module.fp8_meta.pop("recipe", None)
        module.fp8_meta["fp8_checkpoint"] = False

    def _multiply(self, forward: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's forward pass under its recipe, shown to the hook."""
        if self.hook is not no_hook:
            # Its gradient is then this layer's alone: latent attention has two layers of one input.
            x = x.view_as(x)
            self._show_input(x)
        with autocast(None if self.recipe is None else self._recipe_object()):
            output, bias = forward(x)
        if self.recipe is not None and not self._is_checked:
            self._require_quantizers(self.recipe)
            self._is_checked = True
        if self.hook is not no_hook and output.numel():
            self._show_output(output)
        return output, bias

    def _show_input(self, x: Tensor) -> None:
        """Show the operands of the forward pass, and let the gradients be shown when they are there."""
        module: Any = self
        with torch.no_grad():
            self.hook(FORWARD, PRE, "input", whole_tokens(module, Operand.X, x))
            self.hook(FORWARD, PRE, "weight", module.weight)
        if x.requires_grad:
            x.register_hook(  # type: ignore[no-untyped-call]
                lambda dx: self.hook(BACKWARD, POST, "grad_input", dx)
            )
        if self._weight_hook is None and module.weight.requires_grad:
            self._weight_hook = module.weight.register_hook(
                lambda dw: self.hook(BACKWARD, POST, "grad_weight", dw)
            )

    def _show_output(self, output: Tensor) -> None:
        self.hook(FORWARD, POST, "output", output)
        if output.requires_grad:
            output.register_hook(self._show_gradient)  # type: ignore[no-untyped-call]

    def _show_gradient(self, g: Tensor) -> None:
        module: Any = self
        with torch.no_grad():
            self.hook(BACKWARD, PRE, "grad_output", whole_tokens(module, Operand.G, g))
            self.hook(BACKWARD, PRE, "weight", module.weight)


class NativeLinear(TransformerEngineLinear):
    """The part of layers under Transformer Engine's own recipes."""

    def _recipe_of(self, declared: ModulePrecision) -> Recipe | None:
        found = represent(declared.alike, NamedRecipe.delayed)
        assert isinstance(found, Representation), "the configuration's checks have refused others"
        return found.recipe

    def _recipe_object(self) -> Any:
        assert self.recipe is not None
        return te_recipe(self.recipe)

    def _require_quantizers(self, recipe: Recipe) -> None:
        require_quantizers(self, self.precision.module, recipe)


class OwnFormatsLinear(TransformerEngineLinear):
    """The part of layers with the scheme's own formats; the recipe's object follows the precision map."""

    _own: Any = None

    def _recipe_of(self, declared: ModulePrecision) -> Recipe | None:
        return OWN_FORMATS if declared.is_quantised else None

    def _recipe_object(self) -> Any:
        if self._own is None:
            module: Any = self
            self._own = scheme_recipe(module)
        return self._own


class NativeColumnParallelLinear(NativeLinear, TEColumnParallelLinear):  # type: ignore[misc]
    """Transformer Engine's column-parallel layer (qkv, fc1) under its own recipe."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's forward pass."""
        return self._multiply(super().forward, x)


class NativeRowParallelLinear(NativeLinear, TERowParallelLinear):  # type: ignore[misc]
    """Transformer Engine's row-parallel layer (proj, fc2) under its own recipe."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's forward pass."""
        return self._multiply(super().forward, x)


class OwnFormatsColumnParallelLinear(OwnFormatsLinear, TEColumnParallelLinear):  # type: ignore[misc]
    """Transformer Engine's column-parallel layer with the scheme's own formats."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's forward pass."""
        return self._multiply(super().forward, x)


class OwnFormatsRowParallelLinear(OwnFormatsLinear, TERowParallelLinear):  # type: ignore[misc]
    """Transformer Engine's row-parallel layer with the scheme's own formats."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's forward pass."""
        return self._multiply(super().forward, x)


_ELEMENTS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
#: Direction and position of each operand's quantizer in `module.quantizers`.
_PLACES = {
    Operand.X: ("scaling_fwd", 0),
    Operand.W: ("scaling_fwd", 1),
    Operand.G: ("scaling_bwd", 0),
}


def require_quantizers(module: Any, name: ModuleId, recipe: Recipe) -> None:
    """Refuse a module whose quantizers are not those of its recipe.

    Raises:
        EngagementError: names the slot.
    """
    for slot, wanted in recipe.slots().items():
        got = held_by_module(module, slot)
        if (aspect := got.differs(wanted)) is not None:
            raise EngagementError(
                f"{name} {slot}: Transformer Engine's quantizer has {aspect} {getattr(got, aspect)}, and {recipe} has "
                f"{getattr(wanted, aspect)}"
            )


def held_by_module(module: Any, slot: Slot) -> Held:
    """What the quantizer of one operand makes of it."""
    direction, index = _PLACES[slot.operand]
    quantizer = module.quantizers[direction][index]
    element = _ELEMENTS[quantizer.dtype.name]
    match type(quantizer).__name__:
        case "MXFP8Quantizer":
            return Held(element, block_of(1, 32), power_of_two_scales(ScaleRule.RCEIL))
        case "Float8CurrentScalingQuantizer":
            powers = quantizer.force_pow_2_scales
            return Held(element, scale=TENSOR_POWER_OF_TWO if powers else TENSOR_EXACT)
        case "Float8Quantizer":
            history = module.fp8_meta[direction].amax_history.shape[0]
            return Held(element, scale=delayed_scale(history))
        case "Float8BlockQuantizer":
            rows = quantizer.block_len if quantizer.block_scaling_dim == 2 else 1
            powers = power_of_two_scales(ScaleRule.RCEIL)
            scale = powers if quantizer.force_pow_2_scales else FP32_SCALES
            return Held(element, block_of(rows, quantizer.block_len), scale)
        case "NVFP4Quantizer":
            is_transformed = quantizer.with_rht and slot.product is Product.WGRAD
            rounding = Rounding.STOCHASTIC if quantizer.stochastic_rounding else Rounding.EVEN
            return Held(
                element,
                block_of(16 if quantizer.with_2d_quantization else 1, 16),
                NV_SCALES,
                RANDOM_HADAMARD if is_transformed else "none",
                rounding.value,
            )
        case other:
            raise EngagementError(f"{slot} has a quantizer that no recipe makes: {other}")
