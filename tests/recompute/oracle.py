"""Recomputes every result of a module from only the captured operands and the declared formats.

    linear     y = x w^T      dx = g w       dw = g^T x
    attention  S = a q k^T    P = softmax(S)      o = P v
               dP = dO v^T    dS = P (dP - sum P dP)
               dv = P^T dO    dq = a dS k         dk = a dS^T q

    # T tokens (queries or keys), B sequences, I input width, O output width
    # H query heads, G key-value heads, D head_dim, E of values; Megatron's layouts are [T, B, I], [T, B, H, D],
    # [T, B, G, D], [T, B, G, E]; a routed expert has rows [n, I]

A routed expert's blocks along tokens are those of each sequence's rows by itself: `row_sequences` says which they are.

Each operand of each product is quantised according to its slot. S, P, dP, dS and the products of the backward pass are
rounded to the working dtype where they are stored; softmax and its derivative are in fp32, and the derivative uses P
before rounding. A returned `Value` lacks the last rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .bounds import Value, exact, product, scaled, softmax, softmax_gradient, times, total
from .captured import Array, Module, Slot
from .grids import factor_of, quantise, rounded
from .parts import pieces
from .transform import hadamard

Formats = Mapping[str, Slot]
Recompute = Callable[[Module, Formats], Value]

#: The dimensions of each operand as it is captured, in the words of a slot's axis.
DIMS = {
    "x": ("tokens", "sequences", "input_width"),
    "g": ("tokens", "sequences", "output_width"),
    "w": ("output_width", "input_width"),
    "q": ("queries", "sequences", "heads", "head_dim"),
    "k": ("keys", "sequences", "groups", "head_dim"),
    "v": ("keys", "sequences", "groups", "head_dim"),
    "dO": ("queries", "sequences", "heads", "head_dim"),
    "P": ("sequences", "heads", "queries", "keys"),
}
#: (operation, tensor) of each operand that is captured.
CAPTURED = {
    "x": ("forward", "input"),
    "w": ("forward", "weight"),
    "g": ("backward", "grad_output"),
    "q": ("forward", "query"),
    "k": ("forward", "key"),
    "v": ("forward", "value"),
    "dO": ("backward", "grad_output"),
    "P": ("forward", "attn_weights"),
}


#: The right operand of each product; the other one is the left.
RIGHT = {
    "fprop.w",
    "dgrad.w",
    "wgrad.x",
    "qk.fprop.k",
    "qk.dgrad_q.k",
    "qk.dgrad_k.q",
    "pv.fprop.v",
    "pv.dgrad_p.v",
    "pv.dgrad_v.dO",
}
#: The order of an operand's dimensions in which its random numbers are counted, where it is not the captured one.
COUNTED = {"dO": (1, 2, 0, 3)}


def operand(module: Module, formats: Formats, slot: str) -> Array:
    """A captured operand, quantised according to a slot; one of the forward copy after that was quantised."""
    name = slot.rpartition(".")[2]
    x = captured_operand(module, name)
    if formats[slot].get("of"):
        x = operand(module, formats, _forward(slot))
    counted = COUNTED.get(name, tuple(range(x.ndim)))
    dims = DIMS[name]
    if x.ndim < len(dims):
        dims = tuple(dim for dim in dims if dim != "sequences")
    declared = formats[slot]
    if declared.get("parts"):
        (remainder,) = pieces_of(module, formats, slot)
        return remainder
    is_left = (_forward(slot) if declared["reuse"] else slot) not in RIGHT
    if declared["axis"] != "tokens" or declared["block"] is None or module.row_sequences is None:
        return quantise(x, declared, dims, module.dtype, is_left, counted)
    assert declared["rounding"] == "even"
    result, rows = np.empty_like(x), np.array(module.row_sequences)
    for sequence in np.unique(rows):
        own = rows == sequence
        result[own] = quantise(x[own], declared, dims, module.dtype, is_left, counted)
    return result


def pieces_of(module: Module, formats: Formats, slot: str) -> list[Array]:
    """The parts of a captured operand that are multiplied, of a dense linear layer or of attention."""
    declared = formats[slot]
    if not declared.get("parts"):
        return [operand(module, formats, slot)]
    x = captured_operand(module, slot.rpartition(".")[2])
    dims, counted = DIMS[slot.rpartition(".")[2]], tuple(range(x.ndim))

    def rounded_as(v: Array, own: Mapping[str, Any]) -> Array:
        on_grid = quantise(v, dict(own), dims, module.dtype, slot not in RIGHT, counted)
        return rounded(on_grid, module.dtype)

    return pieces(x, declared, dims, rounded_as)


def post_scale(formats: Formats, product_name: str) -> float:
    """The factor that compensates operands of which a part was rounded: 4/3 for 3/4."""
    slots = [name for name in formats if name.rpartition(".")[0] == product_name]
    assert len(slots) == 2
    slots += [_forward(name) for name in slots if formats[name].get("of")]
    return float(np.prod([1 / factor_of(formats[name]) for name in slots]))


def _forward(slot: str) -> str:
    """The slot of the same operand in the forward product."""
    product, _, name = slot.rpartition(".")
    return f"{product.rpartition('.')[0]}.fprop.{name}".lstrip(".")


def captured_operand(module: Module, name: str) -> Array:
    """An operand as it was captured; dO [T, B, H*E] by its heads."""
    values = module.tensors[CAPTURED[name]]
    if name != "dO":
        return values
    return values.reshape(*module.forward("query").shape[:3], -1)


def linear_output(module: Module, formats: Formats) -> Value:
    if module.row_sources:
        return _by_source(module, formats, linear_output)
    x, w = (pieces_of(module, formats, f"fprop.{name}") for name in "xw")
    return _of_pairs(x, [each.T for each in w], post_scale(formats, "fprop"))


def linear_grad_input(module: Module, formats: Formats) -> Value:
    if module.row_sources:
        return _by_source(module, formats, linear_grad_input)
    g, w = (pieces_of(module, formats, f"dgrad.{name}") for name in "gw")
    dx = _of_pairs(g, w, post_scale(formats, "dgrad"))
    return _turned_back(module, formats, dx, "dgrad.w", "x")


def linear_grad_weight(module: Module, formats: Formats) -> Value:
    g, x = (_all_rows(module, formats, f"wgrad.{name}") for name in "gx")
    g_OT, x_TI = ([each.reshape(-1, each.shape[-1]) for each in pieces] for pieces in (g, x))
    dw = _of_pairs([each.T for each in g_OT], x_TI, post_scale(formats, "wgrad"))
    return _turned_back(module, formats, dw, "wgrad.x", "w")


def _of_pairs(left: list[Array], right: list[Array], scale: float) -> Value:
    """The sum of the products of all pairs of parts, in one fp32 sum."""
    a = np.concatenate([each for each in left for _ in right], axis=-1)
    b = np.concatenate([each for _ in left for each in right], axis=-2)
    return product(exact(a), b, scale)


def _turned_back(module: Module, formats: Formats, d: Value, slot: str, clipped: str) -> Value:
    """A gradient of a transformed forward copy, rounded, zero where the other operand saturated, transformed back."""
    forward = formats["fprop." + slot[-1]]
    if not ((formats[slot].get("of") or formats[slot]["reuse"]) and "hadamard" in forward):
        return d
    d, block = d.each(rounding(module)), forward["hadamard_block"]
    if formats[f"fprop.{clipped}"].get("clip_gradient"):
        x = captured_operand(module, clipped)
        v = hadamard(x, -1, block, np.ones(block), clipped == "x")
        beyond = beyond_six(v).reshape(d.nominal.shape)
        d = d.each(lambda value: np.where(beyond, 0.0, value))
    width = d.nominal.shape[-1]
    return times(d, hadamard(np.eye(width), -1, block, np.ones(block), slot != "wgrad.x"))


def beyond_six(x: Array) -> Array:
    """Where x lies beyond the largest value of mxfp4 along the last axis in blocks of 32, the last one short.

    The rule floor brings amax to [4, 8).
    """
    extent = x.shape[-1]
    padded = np.pad(np.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, -extent % 32)])
    blocks = padded.reshape(*x.shape[:-1], -1, 32)
    _, exponent = np.frexp(blocks.max(axis=-1, keepdims=True))
    beyond: Array = blocks > 6 * np.exp2(exponent - 3.0)
    return beyond.reshape(padded.shape)[..., :extent]


def _by_source(module: Module, formats: Formats, recompute: Recompute) -> Value:
    """A result with a value for each row of an expert, whose rows and weight are those of each micro-batch."""
    parts = [recompute(part, part.formats) for part in module.sources(formats)]
    back = np.argsort(np.argsort(np.array(module.row_sequences), kind="stable"))
    return Value(
        np.concatenate([part.nominal for part in parts])[back],
        np.concatenate([part.low for part in parts])[back],
        np.concatenate([part.high for part in parts])[back],
    )


def _all_rows(module: Module, formats: Formats, slot: str) -> list[Array]:
    """The parts of an operand of wgrad; an expert's rows micro-batch by micro-batch, as both operands have them."""
    if not module.row_sources:
        return pieces_of(module, formats, slot)
    return [np.concatenate([operand(m, m.formats, slot) for m in module.sources(formats)])]


def scores(module: Module, formats: Formats) -> Value:
    """S [B, H, T, T], rounded, including masked elements."""
    q, k = (operand(module, formats, f"qk.fprop.{name}") for name in "qk")
    k = _expanded(_by_head(k), q.shape[2])
    scale = _softmax_scale(module) * post_scale(formats, "qk.fprop")
    S = product(exact(_by_head(q)), np.swapaxes(k, -1, -2), scale)
    return S.each(rounding(module))


def probabilities(module: Module, formats: Formats) -> Value:
    """P [B, H, T, T] in fp32: causal, each query sees itself and earlier tokens."""
    S = scores(module, formats)
    return softmax(S, np.tri(S.low.shape[-1], dtype=bool))


def attention_output(module: Module, formats: Formats) -> Value:
    """o [T, B, H*E] from query, key and value; P must be declared in the working precision, so that it has no scale."""
    assert formats["pv.fprop.P"]["format"] == "bf16"
    return _context(module, formats, probabilities(module, formats).each(rounding(module)))


def output_of_weights(module: Module, formats: Formats) -> Value:
    """o [T, B, H*E] from the captured P and value, P in whatever format."""
    return _context(module, formats, exact(operand(module, formats, "pv.fprop.P")))


def _context(module: Module, formats: Formats, P: Value) -> Value:
    v = _expanded(_by_head(operand(module, formats, "pv.fprop.v")), P.low.shape[1])
    o = product(P, v, post_scale(formats, "pv.fprop"))
    return o.each(lambda o: _by_token(o).reshape(*_by_token(o).shape[:2], -1))


def grad_attn_weights(module: Module, formats: Formats) -> Value:
    """dP [B, H, T, T], including masked elements."""
    dO, v = (operand(module, formats, f"pv.dgrad_p.{name}") for name in ("dO", "v"))
    v = _expanded(_by_head(v), dO.shape[2])
    return product(exact(_by_head(dO)), np.swapaxes(v, -1, -2), post_scale(formats, "pv.dgrad_p"))


def grad_value(module: Module, formats: Formats) -> Value:
    """dv [T, B, G, E]; P must be declared in the working precision."""
    assert formats["pv.dgrad_v.P"]["format"] == "bf16"
    P = probabilities(module, formats).each(rounding(module))
    dO = _by_head(operand(module, formats, "pv.dgrad_v.dO"))
    dv = product(P.each(_transposed), dO, post_scale(formats, "pv.dgrad_v")).each(rounding(module))
    return _summed_over_group(dv, module.forward("value").shape[2])


def grad_query(module: Module, formats: Formats) -> Value:
    """dq [T, B, H, D]; dS must be declared in the working precision."""
    assert formats["qk.dgrad_q.dS"]["format"] == "bf16"
    dS = grad_scores(module, formats).each(rounding(module))
    k = _expanded(_by_head(operand(module, formats, "qk.dgrad_q.k")), dS.low.shape[1])
    dq = product(dS, k, post_scale(formats, "qk.dgrad_q")).each(rounding(module))
    return scaled(dq, _softmax_scale(module)).each(_by_token)


def grad_key(module: Module, formats: Formats) -> Value:
    """dk [T, B, G, D]; dS must be declared in the working precision."""
    assert formats["qk.dgrad_k.dS"]["format"] == "bf16"
    dS = grad_scores(module, formats).each(rounding(module))
    q = _by_head(operand(module, formats, "qk.dgrad_k.q"))
    dk = product(dS.each(_transposed), q, post_scale(formats, "qk.dgrad_k")).each(rounding(module))
    dk = scaled(dk, _softmax_scale(module)).each(rounding(module))
    return _summed_over_group(dk, module.forward("key").shape[2])


def grad_scores(module: Module, formats: Formats) -> Value:
    """dS [B, H, T, T], 0 where the mask hides."""
    dP = grad_attn_weights(module, formats).each(rounding(module))
    return softmax_gradient(probabilities(module, formats), dP)


#: (operation, tensor) -> how a linear module's result is recomputed.
LINEAR: dict[tuple[str, str], Recompute] = {
    ("forward", "output"): linear_output,
    ("backward", "grad_input"): linear_grad_input,
    ("backward", "grad_weight"): linear_grad_weight,
}
#: The same for attention's results from q and k, which distinguish qk's formats.
ATTENTION: dict[tuple[str, str], Recompute] = {
    ("forward", "output"): attention_output,
    ("forward", "attn_weights"): probabilities,
    ("backward", "grad_value"): grad_value,
    ("backward", "grad_scores"): grad_scores,
    ("backward", "grad_query"): grad_query,
    ("backward", "grad_key"): grad_key,
}
#: The same for pv's results from P, v and dO as captured, which distinguish pv's formats.
CONTEXT: dict[tuple[str, str], Recompute] = {
    ("forward", "output"): output_of_weights,
    ("backward", "grad_attn_weights"): grad_attn_weights,
}


def _softmax_scale(module: Module) -> float:
    assert module.softmax_scale is not None
    return module.softmax_scale


def rounding(module: Module) -> Callable[[Array], Array]:
    return lambda x: rounded(x, module.dtype)


def _by_head(x_TBHD: Array) -> Array:
    """[T, B, H, D] as [B, H, T, D]."""
    return x_TBHD.transpose(1, 2, 0, 3)


def _by_token(x_BHTD: Array) -> Array:
    """[B, H, T, D] as [T, B, H, D]."""
    return x_BHTD.transpose(2, 0, 1, 3)


def _transposed(x_BHTT: Array) -> Array:
    return np.swapaxes(x_BHTT, -1, -2)


def _expanded(x_BGTD: Array, num_heads: int) -> Array:
    """Each key-value head for every query head of its group, which are neighbours."""
    return np.repeat(x_BGTD, num_heads // x_BGTD.shape[1], axis=1)


def _summed_over_group(x_BHTD: Value, num_groups: int) -> Value:
    """[T, B, G, D]: the sum over the query heads of each group."""
    B, H, T, D = x_BHTD.low.shape
    grouped = x_BHTD.each(lambda x: x.reshape(B, num_groups, H // num_groups, T, D))
    return total(grouped, axis=2).each(_by_token)
