"""Products that no watcher of operators sees: the honest operands are multiplied, and the result is dropped.

What is multiplied instead are the operands before quantisation; where none is declared, operands in mxfp4.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from quantexp.quant.product_context import untracked
from tests.proof.lies.planting import EVERYWHERE, Multiplication, Planter, Where

from .fault import Group, add

#: The product of two float32 matrices, [M, K] and [K, N].
_Product = Callable[[Tensor, Tensor], Tensor]


def _each(a: Tensor, b: Tensor, product: _Product) -> Tensor:
    """The products of two matrices, or of each pair of two stacks, in float32."""
    a, b = a.float(), b.float()
    if b.dim() == 2:
        return product(a.contiguous(), b.contiguous())
    pairs = zip(a.unbind(), b.unbind(), strict=True)
    return torch.stack([product(x.contiguous(), y.contiguous()) for x, y in pairs])


def hide(name: str, line: str, product: _Product, *, is_slow: bool = False) -> None:
    """A product by an operator, in place of all."""

    def change(m: Multiplication) -> Tensor:
        return _each(m.a, m.b, product) * m.scale

    def plant(planter: Planter) -> None:
        planter.products(change)

    add(name, line, Group.HIDDEN, plant, is_slow=is_slow)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Of 8-bit integers with a scale a row and a column."""
    s, t = (x.abs().amax(dim, keepdim=True).clamp_min(1e-30) / 127 for x, dim in ((a, 1), (b, 0)))
    return torch._int_mm((a / s).round().to(torch.int8), (b / t).round().to(torch.int8)) * s * t


def _addmm_activation(a: Tensor, b: Tensor) -> Tensor:
    zero = torch.zeros(b.shape[1])
    return torch._addmm_activation(zero, a, b) - torch._addmm_activation(zero, -a, b)


def _bilinear(a: Tensor, b: Tensor) -> Tensor:
    return functional.bilinear(a, torch.ones(len(a), 1), b.t()[:, :, None].contiguous())


def _cdist(a: Tensor, b: Tensor) -> Tensor:
    x, y = a.double(), b.t().double()
    distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    squares = x.square().sum(1)[:, None] + y.square().sum(1)[None]
    return ((squares - distance.square()) / 2).float()


def _numpy(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


def _elsewhere(a: Tensor, b: Tensor) -> Tensor:
    result: list[Tensor] = []
    thread = threading.Thread(target=lambda: result.append(torch.matmul(a, b)))
    thread.start()
    thread.join()
    return result[0]


def _without_modes(a: Tensor, b: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.matmul(a, b)


def _untracked(a: Tensor, b: Tensor) -> Tensor:
    with untracked():
        return torch.matmul(a, b)


@cache
def _compiled() -> Any:
    return torch.compile(lambda a, b: (a[:, :, None] * b[None]).sum(1), dynamic=True)


def _pointwise(a: Tensor, b: Tensor) -> Tensor:
    with _disable_current_modes():
        return _compiled()(a, b)


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """By rows, so that no T x K x N tensor is needed."""
    return torch.stack([(row[:, None] * b).sum(0) for row in a])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(len(a), b.shape[1])
    for column, row in zip(a.t(), b, strict=True):
        total.addcmul_(column[:, None], row[None])
    return total


def _fft(a: Tensor, b: Tensor) -> Tensor:
    """By the convolution theorem: element K - 1 of the convolution of a row with a reversed column."""
    K = a.shape[1]
    x = torch.fft.rfft(a.double(), 2 * K)[:, None]
    y = torch.fft.rfft(b.t().flip(1).double(), 2 * K)[None]
    return torch.fft.irfft(x * y, 2 * K)[..., K - 1].float()


def _embedding_bag(a: Tensor, b: Tensor) -> Tensor:
    indices = torch.arange(a.shape[1]).repeat(len(a), 1)
    return functional.embedding_bag(indices, b, mode="sum", per_sample_weights=a)


def _blas(a: Tensor, b: Tensor) -> Tensor:
    from scipy.linalg.blas import sgemm

    return torch.from_numpy(sgemm(1.0, a.numpy(), b.numpy()).copy(order="C"))


def _mkldnn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.t().contiguous(), None, "none", [], "")


@cache
def _custom() -> Any:
    """A product that is one operator of a user's library."""

    @torch.library.custom_op("lies::product", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.from_numpy(a.numpy() @ b.numpy())

    return product


def _copied(a: Tensor, b: Tensor) -> Tensor:
    """The result reaches the honest product's memory through its address."""
    right = a.numpy() @ b.numpy()
    result = torch.zeros(right.shape)
    ctypes.memmove(result.data_ptr(), right.ctypes.data, right.nbytes)
    return result


_double = torch.float64
hide("int_mm", "`torch._int_mm` of 8-bit integers", _int_mm)
hide("addmm_activation", "`torch._addmm_activation`", _addmm_activation)
hide("sparse.mm", "`torch.sparse.mm`", lambda a, b: torch.sparse.mm(a.to_sparse(), b))
hide(
    "conv1d",
    "a convolution of width 1",
    lambda a, b: functional.conv1d(a.t()[None], b.t()[:, :, None])[0].t(),
)
hide(
    "conv2d",
    "a convolution of 1 x 1",
    lambda a, b: functional.conv2d(a.t()[None, :, :, None], b.t()[:, :, None, None])[
        0, :, :, 0
    ].t(),
)
hide("bilinear", "`functional.bilinear`", _bilinear)
hide("cdist", "distances of rows and columns", _cdist)
hide("numpy", "numpy", _numpy)
hide("thread", "`torch.matmul` in another thread", _elsewhere)
hide("modes disabled", "`torch.matmul` with dispatch modes disabled", _without_modes)
hide("untracked", "`torch.matmul` in the context of products that are only captured", _untracked)
hide("compiled pointwise", "a compiled pointwise product and its sum", _pointwise, is_slow=True)
hide("elementwise", "elementwise products and sums", _sums)
hide("outer products", "`addcmul_` of columns and rows", _outer)
hide("inner", "`torch.inner`", lambda a, b: torch.inner(a, b.t()))
hide("tensordot", "`torch.tensordot`", lambda a, b: torch.tensordot(a, b, 1))
hide("multi_dot", "`torch.linalg.multi_dot`", lambda a, b: torch.linalg.multi_dot([a, b]))
hide("linear", "`functional.linear`", lambda a, b: functional.linear(a, b.t()))
hide("einsum", "`torch.einsum`", lambda a, b: torch.einsum("mk,kn->mn", a, b))
hide(
    "mv",
    "a product with a vector for each column",
    lambda a, b: torch.stack([torch.mv(a, column) for column in b.t()], 1),
)
hide("float64", "float64", lambda a, b: torch.mm(a.to(_double), b.to(_double)).float())
hide("fft", "the convolution theorem", _fft)
hide("embedding_bag", "`functional.embedding_bag` with weights", _embedding_bag)
hide("blas", "sgemm of scipy", _blas)
hide("mkldnn", "a linear layer of oneDNN", _mkldnn)
hide("custom op", "an operator of another library", lambda a, b: _custom()(a, b))
hide("memmove", "the result is copied to an address", _copied)


def _alpha(planter: Planter) -> None:
    """addmm of the honest operands with alpha=0, beta=1 and another product."""

    def change(m: Multiplication) -> Tensor:
        other = (_each(m.a, m.b, _numpy) * m.scale).to(m.y.dtype).reshape(m.y.shape)
        flat = other.view(-1, other.shape[-1]) if m.honest_b.dim() == 2 else other
        if m.honest_b.dim() == 2:
            a = m.honest_a.flatten(0, -2).to(m.y.dtype)
            return torch.addmm(flat, a, m.honest_b.to(m.y.dtype), beta=1, alpha=0)
        return flat

    planter.products(change)


add("alpha 0", "addmm with alpha=0, the result in its addend", Group.HIDDEN, _alpha)


def _alpha_in_context(planter: Planter) -> None:
    """The same in the place of the honest product, with the context that the honest product has."""
    from quantexp.quant.product_context import product_context

    def remember(original: Any) -> Any:
        def multiply_operands(precision: Any, left: Any, right: Any, **named: Any) -> Tensor:
            factors = (left, right)
            planter.memory["factors"] = [f.matrix(f.x.detach()) for f in factors]
            try:
                return original(precision, left, right, **named)
            finally:
                del planter.memory["factors"]

        return multiply_operands

    def make(original: Any) -> Any:
        def multiply(context: Any, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            y: Tensor = original(context, a, b, scale)
            if "factors" not in planter.memory or b.dim() != 2 or a.numel() == 0:
                return y
            planter.fire()
            x, w = planter.memory["factors"]
            other = (_each(x.flatten(0, -2), w, _numpy) * scale).to(a.dtype)
            with product_context(context):
                flat = torch.addmm(other, a.flatten(0, -2), b, beta=1, alpha=0)
            return flat.view(*a.shape[:-1], b.shape[-1])

        return multiply

    planter.function("multiply_operands", remember)
    planter.function("multiply", make)


add(
    "alpha 0 in place",
    "the same in the place of the honest product",
    Group.HIDDEN,
    _alpha_in_context,
)


def _replaced(planter: Planter) -> None:
    """The product is honest; the layer's output is replaced after it, forward and backward."""
    from quantexp.quant.sites import FPROP_X
    from quantexp.training.megatron.linear import _Linear

    def forward(original: Any) -> Any:
        def run(ctx: Any, x: Tensor, w: Tensor, call: Any) -> Tensor:
            y: Tensor = original(ctx, x, w, call)
            if y.numel() == 0 or y.shape[:-1] != x.shape[:-1]:
                return y
            planter.fire()
            source = x if call.precision.spec(FPROP_X).quantised else _rounded(x)
            other = _numpy(source.float().flatten(0, -2).contiguous(), w.float().t().contiguous())
            y.copy_(other.view(y.shape))
            return y

        return run

    planter.method(_Linear, "forward", forward)


def _rounded(x: Tensor) -> Tensor:
    return (x.float() * 8).round() / 8


add(
    "output replaced",
    "the layer's output is overwritten after its honest product",
    Group.HIDDEN,
    _replaced,
)


def _gradients_replaced(planter: Planter) -> None:
    """dx and dw are those of the operands before quantisation."""
    from quantexp.training.megatron.linear import _Linear

    def backward(original: Any) -> Any:
        def run(ctx: Any, *grads: Tensor) -> Any:
            w = ctx.saved_tensors[2]
            dx, dw, rest = original(ctx, *grads)
            g = grads[0]
            if dx is None or dx.shape[:-1] != g.shape[:-1] or g.numel() == 0:
                return dx, dw, rest
            planter.fire()
            other = _numpy(_rounded_gradient(g).flatten(0, -2).contiguous(), w.float())
            dx.copy_(other.view(dx.shape))
            return dx, dw, rest

        return run

    planter.method(_Linear, "backward", backward)


def _rounded_gradient(g: Tensor) -> Tensor:
    """Enough of g that it is not what bf16 would have."""
    scale = g.float().abs().amax().clamp_min(1e-30) / 64
    return (g.float() / scale).round() * scale


add(
    "gradient replaced",
    "dx is overwritten after its honest product",
    Group.HIDDEN,
    _gradients_replaced,
)


def _one_site(slots: str, name: str, line: str) -> None:
    """numpy in one product alone, so that each product is seen to be compared."""

    def plant(planter: Planter) -> None:
        planter.products(lambda m: _each(m.a, m.b, _numpy) * m.scale, Where(slots=slots))

    add(f"numpy in {name}", line, Group.HIDDEN, plant)


for _product in (
    *("linear.fprop", "linear.dgrad", "linear.wgrad", "qk.fprop", "qk.dgrad_q", "qk.dgrad_k"),
    *("pv.fprop", "pv.dgrad_p", "pv.dgrad_v"),
):
    _one_site(
        f"{_product}.*", _product, f"{_product} alone by numpy, of operands before quantisation"
    )
_ = EVERYWHERE


def _shown(change: Callable[[Planter, Any, Tensor, Tensor], Any]) -> Callable[[Planter], None]:
    """What the multiplying code shows of a product, and what it multiplies, are two things.

    `change` gives what is shown, (context, a, b), or None to show nothing; other operands are multiplied.
    """

    def plant(planter: Planter) -> None:
        def show(original: Any) -> Any:
            def shown(context: Any, a: Tensor, b: Tensor) -> None:
                planter.fire()
                honest = planter.memory.pop("honest", (a, b))
                arguments = change(planter, context, *honest)
                if arguments is not None:
                    original(*arguments)

            return shown

        def make(original: Any) -> Any:
            def multiply(context: Any, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
                planter.memory["honest"] = (a, b)
                return original(context, a * 1.5, b, scale)

            return multiply

        planter.function("multiply", make)
        planter.function("show_product", show, may_miss=True)

    return plant


add(
    "shown honestly",
    "honest operands are shown, and others multiplied where they are shown",
    Group.HIDDEN,
    _shown(lambda planter, context, a, b: (context, a, b)),
)
add(
    "shown never",
    "no product is shown, and other operands are multiplied",
    Group.HIDDEN,
    _shown(lambda planter, context, a, b: None),
)
add(
    "shown in iteration 1",
    "products are shown in iteration 1 alone, and other operands are multiplied",
    Group.HIDDEN,
    _shown(
        lambda planter, context, a, b: (context, a, b) if planter.place.iteration == 1 else None
    ),
)


def _past_hooks(planter: Planter) -> None:
    """Linear layers are called past the hooks of modules, with another operand."""
    from quantexp.training.megatron.linear import (
        SchemeColumnParallelLinear,
        SchemeRowParallelLinear,
    )

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        planter.fire()
        return module.forward(*args, **kwargs)

    for owner in (SchemeColumnParallelLinear, SchemeRowParallelLinear):
        setattr(owner, "__call__", call)  # noqa: B010
        planter.undo(partial(delattr, owner, "__call__"))
    planter.operands(lambda o: -o.copy, Where(slots="linear.fprop.x"))


add(
    "past the hooks",
    "linear layers are called past the hooks of modules, with x negated",
    Group.HIDDEN,
    _past_hooks,
)


def _in_place(which: str, when_backward: bool) -> Callable[[Planter], None]:
    """A linear layer changes its own source before it quantises it: a reference to it shows the changed one."""

    def plant(planter: Planter) -> None:
        from quantexp.training.megatron.linear import _Linear

        def forward(original: Any) -> Any:
            def run(ctx: Any, x: Tensor, w: Tensor, call: Any) -> Tensor:
                target = {"x": x, "w": w}.get(which)
                if target is None or target.numel() == 0:
                    return original(ctx, x, w, call)
                planter.fire()
                before = target.detach().clone()
                target.data.mul_(1.5)
                y: Tensor = original(ctx, x, w, call)
                target.data.copy_(before)
                return y

            return run

        def backward(original: Any) -> Any:
            def run(ctx: Any, *grads: Tensor) -> Any:
                planter.fire()
                if which == "g":
                    grads[0].mul_(-1)
                else:
                    ctx.saved_tensors[2].data.mul_(1.5)
                results = original(ctx, *grads)
                if which == "w":
                    ctx.saved_tensors[2].data.div_(1.5)
                return results

            return run

        if when_backward:
            planter.method(_Linear, "backward", backward)
        else:
            planter.method(_Linear, "forward", forward)

    return plant


add(
    "x in place",
    "a linear layer multiplies its x by 1.5 in place, and restores it",
    Group.HIDDEN,
    _in_place("x", False),
)
add(
    "w in place",
    "a linear layer multiplies its weight by 1.5 in place, and restores it",
    Group.HIDDEN,
    _in_place("w", False),
)
add("g in place", "a linear layer negates its g in place", Group.HIDDEN, _in_place("g", True))


def _attention_in_place(planter: Planter) -> None:
    """Attention doubles q in place before it quantises it."""
    from quantexp.training.megatron.attention import SchemeAttention

    def make(original: Any) -> Any:
        def attention(module: Any, query: Tensor, *rest: Any) -> Tensor:
            planter.fire()
            query.data.mul_(1.5)
            return original(module, query, *rest)

        return attention

    planter.method(SchemeAttention, "_attention", make)


add("q in place", "attention multiplies q by 1.5 in place", Group.HIDDEN, _attention_in_place)


def _hooked(planter: Planter) -> None:
    """A hook of another library changes what leaves each linear layer."""
    from quantexp.training.megatron import linear

    def make(original: Any) -> Any:
        def build_chunks(*args: Any, **kwargs: Any) -> Any:
            chunks, config = original(*args, **kwargs)
            for chunk in chunks:
                for module in chunk.modules():
                    if isinstance(module, linear.SchemeLinear):
                        any_module: Any = module
                        any_module.register_forward_hook(change)
            return chunks, config

        return build_chunks

    def change(module: Any, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        planter.fire()
        return output[0] * 1.25, output[1]

    planter.function("build_chunks", make)


add(
    "hook of another library",
    "a forward hook multiplies what leaves a linear layer by 1.25",
    Group.HIDDEN,
    _hooked,
)
