"""Attention in tiles by Triton kernels on an NVIDIA GPU: what they support, and how they are called.

    products of T x T    forward 3: S twice, o; backward 9: S and dP three times each, dq, dk, dv; 11 if a scale
                         of dS depends on its amax
    reads and writes     T x D and T x E: o, dq, dk, dv are written once; reads as stated in `triton_forward` and
                         `triton_backward`, from cache for all but the first tile of a head; T x T: none

Supported: bfloat16 and float16; heads of up to 256; a causal mask or any given mask; P and dS in the working
dtype, in MX in blocks of 32 under every scale rule, or in HiF8 with no scale or one of its own amax, rounded to
nearest; reused copies of P. The torch tiles handle every other declaration of P or dS (other formats and blocks,
delayed scales, a transform, 3/4, stochastic rounding, a clipped gradient, exp(S - m) undivided, delta of o) and
float32. q, k, v and dO arrive quantised, in any format.

The kernels round where the torch tiles round, to the same dtypes, and quantise by the same arithmetic. Differences:
- S, dP and sums over keys or queries are float32 sums in another order: about one in some thousands is rounded to its
  other neighbour in the working dtype; one unit in the last place of S becomes exp(S) in P;
- exp is the device's (2 units in the last place; results below 2^-126 are 0), and P is a product with 1 / l.
P and dS therefore differ occasionally by one unit in the last place and, where that decides, by one step of their grid.
The amax of P is that of 1 / l, as the largest of a row is exp(0) / l. Sums do not depend on program order: the same
input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantexp.formats import Axis, Family, QuantSpec, Rounding, Scaling, finite_amax
from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import gpu, is_torch_alone
from quantexp.formats.kernels.gpu_panels import on
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels.launches import (
    LAUNCHES,
    Constants,
    Heads,
    Launch,
    OfDS,
    OfP,
    launch_for,
)
from quantexp.quant.attention.plain import by_token
from quantexp.quant.attention.tile_products import TILE_OPERANDS
from quantexp.quant.multiply import product_scale
from quantexp.quant.precision import Entry, ModulePrecision
from quantexp.quant.sites import (
    DGRAD_K_DS,
    DGRAD_K_Q,
    DGRAD_P_DO,
    DGRAD_P_V,
    DGRAD_Q_DS,
    DGRAD_Q_K,
    DGRAD_V_DO,
    DGRAD_V_P,
    FPROP_K,
    FPROP_P,
    FPROP_Q,
    FPROP_V,
    Product,
    Site,
    Slot,
)
from quantexp.quant.whole_amax import follows_own_amax, reduced

#: The kinds of HOW (`triton_tiles`).
_NOT, _MX, _HIF8 = 0, 1, 2

Amaxes = dict[Slot, Tensor]
#: q, k and v as [T, B, H or G, D or E] and dO as [N, T, E], quantised as each slot declares.
Quantised = Callable[[Slot], Tensor]


def claims(precision: ModulePrecision, q_TBHD: Tensor, v_TBGE: Tensor) -> bool:
    """Whether the kernels support an attention module as declared."""
    width = max(q_TBHD.shape[-1], v_TBGE.shape[-1])
    return (
        not is_torch_alone()
        and q_TBHD.dtype in (torch.bfloat16, torch.float16)
        and width <= max(LAUNCHES)
        and not any(obstacles(precision))
        and gpu.reads(q_TBHD)
    )


def obstacles(precision: ModulePrecision) -> Iterator[Entry]:
    """The slots of an attention module that the kernels do not support."""
    for entry in precision.entries():
        is_tile = entry.slot.operand in TILE_OPERANDS
        if is_tile and not (entry.spec.softmax.is_stock and _claims_operand(entry.spec)):
            yield entry


def _claims_operand(spec: QuantSpec) -> bool:
    if not spec.quantised:
        return True
    if spec.needs_step_state or spec.clip_gradient or spec.is_pre_scaled:
        return False
    return gpu.has_own_kernel(spec)


class Kernels:
    """One micro-batch of one attention module: its scales and the rows of its softmax.

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # N = B*H
    """

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.precision = call.precision
        #: m and 1 / l of each row in the forward pass, [N, T], float32.
        self.rows: tuple[Tensor, Tensor] | None = None
        #: The amaxes that determine the scales of P and dS in the last pass.
        self.amaxes: Amaxes = {}

    def forward(self, quantised: Quantised, amaxes: Amaxes | None = None) -> Tensor:
        """The output o, [N, T, E], of q, k and v; under scales of these amaxes, by default their own."""
        from quantexp.quant.attention.kernels import triton_forward as kernels

        q, k, v = (quantised(slot) for slot in (FPROP_Q, FPROP_K, FPROP_V))
        T, B, H, _ = q.shape
        self.amaxes = {}
        self.rows = _rows(q), _rows(q)
        of_p, constants, launch = self._of_p(q, k), _constants(q, v), _launch(q, v)
        grid = _grid(q, launch.rows)
        o = v.new_empty(B * H, T, v.shape[3])
        with on(q):
            kernels.softmax_rows[grid](of_p, constants, **launch.options)
            self._keep_amax([FPROP_P], lambda: finite_amax(of_p.inverse_NT.to(q.dtype)), amaxes)
            kernels.forward[grid](
                of_p,
                v=_layout(v),
                o=_layout(by_token(o, B)),
                scale_P=self._scale_of(FPROP_P, q),
                scale_o=self._scale(Site.PV, Product.FPROP),
                HOW_P=self._how(FPROP_P),
                CONST=constants,
                **launch.options,
            )
        return o

    def backward(
        self, quantised: Quantised, amaxes: Amaxes | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v in every query head, [N, T, D or E]; dq and dk before the softmax scale.

        Args:
            quantised: q and k as in the scores, and all operands of the backward pass except P and dS.
            amaxes: determine the scales of P and dS; by default their own.
        """
        from quantexp.quant.attention.kernels import triton_backward as kernels

        q, k, v = quantised(FPROP_Q), quantised(FPROP_K), quantised(DGRAD_P_V)
        T, B, H, _ = q.shape
        self.amaxes = {}
        of_p, constants, launch = self._of_p(q, k), _constants(q, v), _launch(q, v)
        of_dS = OfDS(
            v=_layout(v),
            dO=_layout(by_token(quantised(DGRAD_P_DO), B)),
            d_NT=_rows(q),
            scale_dP=self._scale(Site.PV, Product.DGRAD_P),
        )
        by_rows = _grid(q, launch.rows)

        def amax_of_ds() -> Tensor:
            bits = torch.zeros((), dtype=torch.int32, device=q.device)
            kernels.gradient_amax[by_rows](of_p, of_dS, bits, constants, **launch.options)
            return bits.view(torch.float32)

        dq, dk, dv = (x.new_empty(B * H, T, x.shape[3]) for x in (q, q, v))
        with on(q):
            kernels.gradient_rows[by_rows](of_p, of_dS, constants, **launch.options)
            self._keep_amax([DGRAD_V_P], lambda: finite_amax(of_p.inverse_NT.to(q.dtype)), amaxes)
            self._keep_amax([DGRAD_Q_DS, DGRAD_K_DS], amax_of_ds, amaxes)
            kernels.gradient_of_q[by_rows](
                of_p,
                of_dS,
                k_dS=_layout(quantised(DGRAD_Q_K)),
                dq=_layout(by_token(dq, B)),
                scale_dS=self._scale_of(DGRAD_Q_DS, q),
                scale_dq=self._scale(Site.QK, Product.DGRAD_Q),
                HOW_dS=self._how(DGRAD_Q_DS),
                CONST=constants,
                **launch.options,
            )
            kernels.gradient_of_kv[_grid(q, launch.keys)](
                of_p,
                of_dS,
                q_dS=_layout(quantised(DGRAD_K_Q)),
                dO_P=_layout(by_token(quantised(DGRAD_V_DO), B)),
                dk=_layout(by_token(dk, B)),
                dv=_layout(by_token(dv, B)),
                scale_dS=self._scale_of(DGRAD_K_DS, q),
                scale_P=self._scale_of(DGRAD_V_P, q),
                scale_dk=self._scale(Site.QK, Product.DGRAD_K),
                scale_dv=self._scale(Site.PV, Product.DGRAD_V),
                HOW_dS=self._how(DGRAD_K_DS),
                HOW_P=self._how(DGRAD_V_P),
                CONST=constants,
                **launch.options,
            )
        return dq, dk, dv

    def _scale(self, site: Site, product: Product) -> float:
        return product_scale(self.precision, site, product)

    def _keep_amax(
        self, slots: list[Slot], amax: Callable[[], Tensor], known: Amaxes | None
    ) -> None:
        """Store the amax of those slots whose scale depends on it; computed once, unless known."""
        slots = [slot for slot in slots if follows_own_amax(self.precision.spec(slot))]
        if not slots:
            return
        if known is None:
            self.amaxes |= dict.fromkeys(slots, reduced(self.precision.module, amax()))
        else:
            self.amaxes |= {slot: known[slot] for slot in slots}

    def _scale_of(self, slot: Slot, x: Tensor) -> Tensor | None:
        """The scale of a whole P or dS, on x's device."""
        amax = self.amaxes.get(slot)
        return None if amax is None else tensor_scale(x, self.precision.spec(slot), amax)

    def _how(self, slot: Slot) -> tuple[object, ...]:
        """HOW of `triton_tiles`."""
        spec = self.precision.spec(slot)
        if not spec.quantised:
            return (_NOT,)
        if spec.fmt.family is Family.HIF8:
            is_power = spec.scaling is not Scaling.EXACT
            return (_HIF8, is_power, spec.rounding is Rounding.AWAY, spec.saturate)
        constants = gpu.mx_constants(spec.fmt.element, spec.scale_rule, spec.rounding)
        return (_MX, spec.axis is Axis.KEYS, *constants.values())

    def _mask(self, B: int) -> tuple[Tensor, int, int] | None:
        """The mask's bytes, and its strides over sequences and queries."""
        if self.call.mask is None:
            return None
        mask = self.call.mask.contiguous().view(torch.uint8)
        return mask, mask.stride(0) if len(mask) == B > 1 else 0, mask.stride(2)

    def _of_p(self, q_TBHD: Tensor, k_TBGD: Tensor) -> OfP:
        assert self.rows is not None
        T, B, H, _ = q_TBHD.shape
        m, inverse = self.rows
        return OfP(
            q=_layout(q_TBHD),
            k=_layout(k_TBGD),
            mask=self._mask(B),
            m_NT=m,
            inverse_NT=inverse,
            T=T,
            H=H,
            SHARE=H // k_TBGD.shape[2],
            a=self.call.softmax_scale * self._scale(Site.QK, Product.FPROP),
        )


def padded(width: int) -> int:
    """The tile width for a head: a power of two that matrix instructions accept."""
    return max(16, 1 << (width - 1).bit_length())


def _constants(q_TBHD: Tensor, v_TBGE: Tensor) -> Constants:
    D, E = q_TBHD.shape[3], v_TBGE.shape[3]
    launch = _launch(q_TBHD, v_TBGE)
    return Constants(D, E, padded(D), padded(E), launch.rows, launch.keys, not q_TBHD.is_cuda)


def _launch(q_TBHD: Tensor, v_TBGE: Tensor) -> Launch:
    return launch_for(padded(max(q_TBHD.shape[3], v_TBGE.shape[3])))


def _grid(q_TBHD: Tensor, length: int) -> tuple[int]:
    """One program per tile of so many tokens."""
    T, B, H, _ = q_TBHD.shape
    return (-(-T // length) * B * H,)


def _rows(q_TBHD: Tensor) -> Tensor:
    T, B, H, _ = q_TBHD.shape
    return torch.empty(B * H, T, dtype=torch.float32, device=q_TBHD.device)


def _layout(x_TBHW: Tensor) -> Heads:
    """A tensor in the form the kernels read."""
    x = x_TBHW if x_TBHW.stride(3) == 1 else x_TBHW.contiguous()
    return x, x.stride(1), x.stride(2), x.stride(0)
