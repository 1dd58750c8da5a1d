"""Configuration of a quantisation scheme: sites, their products, the operands of each, rules, and values outside of
products.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quantexp.schema.limits import (
    ABOVE_ONE,
    FACTOR,
    FOLDER_NAME,
    POSITIVE,
    Limit,
    at_most,
    between,
    limited,
)
from quantexp.schema.training import When


@dataclass
class Rounded:
    """How values are rounded to a number format. A null value means the format's default."""

    #: A format of `quantexp list`; in a slot also `bf16` (the working precision) or `reuse` (the forward copy).
    format: str | None = None
    #: Elements that share a scale (MX formats, nvfp4), a power of two.
    block: int | None = limited(None, at_most(1 << 20))
    #: floor, rceil, ceil or even (MX formats).
    scale_rule: str | None = None
    #: even, away, zero or stochastic.
    rounding: str | None = None
    #: none, current, exact or delayed (hifp8, fp8, nvfp4: one scale per tensor); delayed for slots alone.
    scaling: str | None = None
    #: Whether values beyond the largest saturate to it instead of becoming infinite or NaN (hifp8, fp8).
    saturate: bool | None = None


@dataclass
class Part:
    """What is taken out of an operand, rounded to a format of its own and multiplied apart."""

    #: mean, channels, elements or low_rank.
    take: str | None = None
    #: The axis that the mean, or the norm of each channel, is taken over: tokens, input_width, output_width or keys.
    along: str | None = None
    #: How many channels of the largest norm, elements of the largest magnitude, or the rank; or which share of all.
    number: int | None = limited(None, *between(1, 1 << 40))
    share: float | None = limited(None, Limit(lambda s: 0 < s < 1, "must lie between 0 and 1"))
    #: Whether it is taken of the error that the slot's rounding leaves, not of the operand before.
    from_error: bool = False
    #: A format of `quantexp list`, with its own options, or `bf16` (the working precision); `none` leaves out k's mean.
    format: str | None = None


@dataclass
class Slot(Rounded):
    """One operand of one matrix product. A null value means the site's (or the format's) default."""

    #: Iterations in the amax history of delayed scaling.
    window: int | None = limited(None, at_most(100_000))
    #: The part of the operand that is rounded, true for 3/4; the product is divided by it (mxfp4, nvfp4).
    pre_scale: bool | float | None = limited(None, FACTOR)
    #: Whether the derivative of quantisation is 0, not 1, where an operand of the forward product saturated.
    clip_gradient: bool | None = None
    #: The power k of DGE, the derivative of quantisation of a linear layer's weight (arXiv 2501.17116 has 5).
    dge: float | None = limited(None, ABOVE_ONE)
    #: none, deterministic or random: a transform along the reduced axis, equal for both operands of a product.
    hadamard: str | None = None
    #: Elements per transform, a power of two; the last may be short.
    hadamard_block: int | None = limited(None, at_most(1 << 16))
    #: What a product quantises: high, the tensor in high precision; forward, in a backward product the forward's copy;
    #: or a format that x or g of a linear layer is rounded to before, along its rows, as it is stored or sent.
    of: str | None = None
    #: What is taken out of the operand in this order (linear layers, qk.fprop.k); the format rounds what remains.
    parts: list[Part] | None = None
    #: pv.fprop.P: whether it is exp(S - m), and the product is divided by the row's sum, as in flash attention.
    unnormalised: bool | None = None
    #: With it: m is so many times a maximum that several scores of a row have, or 0 (beta of arXiv 2510.04212).
    max_factor: float | None = limited(None, ABOVE_ONE)
    #: pv.fprop.P: what dS = P (dP - delta) subtracts: P, the row sums of P dP; o, those of dO o (flash attention).
    delta: str | None = None


@dataclass
class LinearFprop:
    """y = x w^T."""

    x: Slot = field(default_factory=Slot)
    w: Slot = field(default_factory=Slot)


@dataclass
class LinearDgrad:
    """dx = g w."""

    g: Slot = field(default_factory=Slot)
    w: Slot = field(default_factory=Slot)


@dataclass
class LinearWgrad:
    """dw = g^T x."""

    g: Slot = field(default_factory=Slot)
    x: Slot = field(default_factory=Slot)


@dataclass
class LinearSite(Slot):
    """Linear layers: the decoder's, or the output layer; the site's own keys are the defaults of its six slots."""

    fprop: LinearFprop = field(default_factory=LinearFprop)
    dgrad: LinearDgrad = field(default_factory=LinearDgrad)
    wgrad: LinearWgrad = field(default_factory=LinearWgrad)


@dataclass
class QkFprop:
    """S = q k^T."""

    q: Slot = field(default_factory=Slot)
    k: Slot = field(default_factory=Slot)


@dataclass
class QkDgradQ:
    """dq = dS k."""

    dS: Slot = field(default_factory=Slot)
    k: Slot = field(default_factory=Slot)


@dataclass
class QkDgradK:
    """dk = dS^T q."""

    dS: Slot = field(default_factory=Slot)
    q: Slot = field(default_factory=Slot)


@dataclass
class QkSite(Slot):
    """The attention score product."""

    fprop: QkFprop = field(default_factory=QkFprop)
    dgrad_q: QkDgradQ = field(default_factory=QkDgradQ)
    dgrad_k: QkDgradK = field(default_factory=QkDgradK)


@dataclass
class PvFprop:
    """o = P v."""

    P: Slot = field(default_factory=Slot)
    v: Slot = field(default_factory=Slot)


@dataclass
class PvDgradP:
    """dP = dO v^T."""

    dO: Slot = field(default_factory=Slot)
    v: Slot = field(default_factory=Slot)


@dataclass
class PvDgradV:
    """dv = P^T dO."""

    P: Slot = field(default_factory=Slot)
    dO: Slot = field(default_factory=Slot)


@dataclass
class PvSite(Slot):
    """The product of attention probabilities and values."""

    fprop: PvFprop = field(default_factory=PvFprop)
    dgrad_p: PvDgradP = field(default_factory=PvDgradP)
    dgrad_v: PvDgradV = field(default_factory=PvDgradV)


@dataclass
class NormFprop:
    """y = x / rms(x) * w."""

    y: Slot = field(default_factory=Slot)
    w: Slot = field(default_factory=Slot)


@dataclass
class NormSite(Slot):
    """Gains and results of the norms, of the layers, of heads or latents, and after the last layer."""

    fprop: NormFprop = field(default_factory=NormFprop)


@dataclass
class Rule(Slot):
    """Changes the slots that it covers; later rules take precedence. An empty list means all."""

    #: Layers of the decoder, from 0; negative from the end.
    layers: list[int] = field(default_factory=list)
    #: Shell patterns on the module (qkv, proj, fc1, fc2, attention, kv-*, expert*, *-norm, output).
    modules: list[str] = field(default_factory=list)
    #: linear, qk, pv, output, norm.
    sites: list[str] = field(default_factory=list)
    #: fprop, dgrad, wgrad, dgrad_q, dgrad_k, dgrad_p, dgrad_v.
    products: list[str] = field(default_factory=list)
    #: x, w, g, q, k, dS, P, v, dO, y.
    operands: list[str] = field(default_factory=list)
    #: [first, last]: iterations from 1, both included; a null last means no end.
    iterations: list[int | None] = field(default_factory=list)
    #: [first, last]: the same as shares of training.iterations, from 0 to 1.
    share: list[float] = field(default_factory=list)
    #: In place of both: a condition on the run's metrics.
    when: When | None = None


class Parameters(Enum):
    """Whose master weights are rounded."""

    #: The weights of the decoder's linear layers, those of experts included.
    linear = "linear"
    all = "all"


@dataclass
class Master(Rounded):
    """Master weights, kept in a format; a null format keeps them in float32."""

    #: linear or all.
    parameters: Parameters = Parameters.linear
    #: Add what rounding took away to Adam's first moment (ECO, arXiv 2601.22101).
    feedback: bool = False


_START = Limit(lambda share: 0 <= share < 1, "must be at least 0 and below 1")


@dataclass
class Smooth(Rounded):
    """The loss of linear weights under stochastic rounding, to second order (LOTION, arXiv 2510.08757)."""

    #: A multiple of the term.
    strength: float = limited(1.0, POSITIVE, at_most(1_000_000))


@dataclass
class Pull(Rounded):
    """Linear weights, pulled towards their values in a format (CAGE, arXiv 2510.18784)."""

    #: How strongly at the end; a multiple of the learning rate.
    strength: float = limited(10.0, POSITIVE, at_most(1_000_000))
    #: The share of the training before the pull begins; from there it grows in proportion.
    start: float = limited(0.8, _START)


@dataclass
class Reset(Rounded):
    """Resets of linear weights that oscillate between values of a format (OsciReset, arXiv 2510.27527)."""

    #: In every so many iterations, the next `over` are observed.
    every: int = limited(200, *between(3, 1_000_000))
    over: int = limited(50, *between(1, 1_000_000))
    #: A weight is reset whose rounded value went at least so many times as far as itself.
    ratio: float = limited(8.0, POSITIVE)
    #: The share of the training before the first of them.
    start: float = limited(0.6, _START)


@dataclass
class OptimizerState:
    """What is rounded after a step: moments and master weights; a null format keeps one in float32."""

    exp_avg: Rounded = field(default_factory=Rounded)
    exp_avg_sq: Rounded = field(default_factory=Rounded)
    #: Of training.optimizer=muon.
    momentum: Rounded = field(default_factory=Rounded)
    smooth: Smooth = field(default_factory=Smooth)
    pull: Pull = field(default_factory=Pull)
    reset: Reset = field(default_factory=Reset)
    master: Master = field(default_factory=Master)


class RoundedAt(Enum):
    """Where gradients are rounded on their way through the data-parallel ranks."""

    #: Each rank rounds its own gradient, and the sum is in float32.
    once = "once"
    #: The sum goes from rank to rank and is rounded before each sends it.
    each_hop = "each_hop"


@dataclass
class GradReduce(Rounded):
    """Gradients, rounded before data-parallel ranks send them to each other; a null format sends float32."""

    #: once or each_hop.
    at: RoundedAt = RoundedAt.once


#: How to get Transformer Engine.
TE_INSTALL = "pip install 'quantexp[te]'"


class Backend(Enum):
    """What quantises and multiplies the operands of the decoder's linear layers."""

    #: Operands on the format's grid in the working precision, multiplied by torch.
    emulated = "emulated"
    #: Transformer Engine's linear layers under its own recipes.
    transformer_engine = "transformer_engine"
    #: Transformer Engine's linear layers with the scheme's formats, as emulation.
    te_emulated = "te_emulated"


class NamedRecipe(Enum):
    """A recipe of Transformer Engine that no slots describe."""

    #: Delayed scaling: max / amax of the last `window` micro-batches, 1 for the first.
    delayed = "delayed"


@dataclass
class QuantConfig:
    """A scheme: the five sites, then the rules, then what is rounded outside of products."""

    #: Derived from the sites unless given; a shipped name on another composition is an error.
    name: str | None = limited(None, FOLDER_NAME)
    #: Number formats of one's own, by name: their definitions (docs/own_format.md). Those of files in a `format`
    #: folder are filled in where a slot names them.
    formats: dict[str, Any] = field(default_factory=dict)
    linear: LinearSite = field(default_factory=LinearSite)
    qk: QkSite = field(default_factory=QkSite)
    pv: PvSite = field(default_factory=PvSite)
    #: The output layer; where embeddings are tied, the embedding looks up its quantised weight.
    output: LinearSite = field(default_factory=LinearSite)
    norm: NormSite = field(default_factory=NormSite)
    rules: list[Rule] = field(default_factory=list)
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    grad_reduce: GradReduce = field(default_factory=GradReduce)
    #: emulated, transformer_engine or te_emulated; attention and the output layer are emulated under all of them.
    backend: Backend = Backend.emulated
    #: For transformer_engine: `delayed`, which scales as Transformer Engine does; null follows from the slots.
    recipe: NamedRecipe | None = None
