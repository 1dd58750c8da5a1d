"""The drawn tokens of what one pass of a decoder layer shows, and the names of the modules that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import in_backward, unseen
from quantexp.proof.bits import are_equal, num_unequal
from quantexp.proof.draws import Moment, lines
from quantexp.proof.hooked import Hooked, unseen_hook
from quantexp.proof.products import Reference, are_right, num_wrong

#: Linear layers and the norms whose results they multiply, by Megatron-Core's names, with ours.
AFTER_NORM = {
    "linear_qkv": ("qkv", "input_layernorm"),
    "linear_q_proj": ("q-proj", "input_layernorm"),
    "linear_q_down_proj": ("q-down", "input_layernorm"),
    "linear_kv_down_proj": ("kv-down", "input_layernorm"),
    "linear_q_up_proj": ("q-up", "q_layernorm"),
    "linear_kv_up_proj": ("kv-up", "kv_layernorm"),
}
#: The norms in messages.
NORMS = {
    "input_layernorm": "the norm before attention",
    "pre_mlp_layernorm": "the norm before the feed-forward",
    "q_layernorm": "the norm of q",
    "k_layernorm": "the norm of k",
    "kv_layernorm": "the norm of the latent",
}
#: What is compared together: of a wide layer, some dozen MB.
_TOGETHER = 16
#: Tokens of a pass that are compared.
TOKENS = 8


@dataclass
class Pass:
    """One forward pass of the layer, and the backward pass that follows it."""

    moment: Moment
    #: The angles of the rotary embedding, [at least T, 1, 1, D].
    angles: Tensor | tuple[Tensor, Tensor] | None
    num_sequences: int
    #: Whether this forward pass has a graph, as the first one of a layer that is recomputed whole has not.
    has_graph: bool = field(default_factory=torch.is_grad_enabled)
    #: The drawn tokens of what was seen; gradients have the names of their tensors after a `d `.
    seen: dict[str, Tensor] = field(default_factory=dict)
    #: Tokens of a sequence in attention's products, which may be more than the layer's.
    num_tokens: int = 0
    _picked: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def picked(self, number: int) -> Tensor:
        """The drawn ones of so many rows, or of the tokens of all sequences."""
        return self._places(number, 1)[0]

    def drawn(self, x: Tensor) -> Tensor:
        """The drawn tokens of [T, B, ...], or the drawn rows of [rows, width]."""
        x = x.detach()
        if x.dim() == 2:
            return x[self.picked(len(x))] if len(x) else x
        return x[self._places(*x.shape[:2])]

    def _places(self, T: int, B: int) -> tuple[Tensor, Tensor]:
        """The drawn tokens of all B sequences, and the sequence of each."""
        if (T, B) not in self._picked:
            picked = lines(self.moment.choice("between"), T * B, 1, TOKENS)
            self._picked[T, B] = picked // B, picked % B
        return self._picked[T, B]

    def drawn_angles(self, name: str) -> Tensor | None:
        """The angles of q's or k's drawn tokens, [R, 1, D]."""
        whole = self.angles[name == "k"] if isinstance(self.angles, tuple) else self.angles
        if whole is None:
            return None
        return self.drawn(whole[: self.num_tokens].expand(-1, self.num_sequences, -1, -1))


class Claim(NamedTuple):
    """What was seen, and what it must be."""

    own: Tensor
    expected: Reference | Tensor
    #: Of the border, and what is wrong otherwise.
    name: str
    words: str
    micro_batch: int


class Claims:
    """What several borders see, compared together and reported in the order of the passes."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """`report` receives the messages."""
        self._report = report
        self._claims: list[Claim] = []
        self._reported: set[tuple[str, str]] = set()

    def add(self, claim: Claim) -> None:
        """Compare it with others, not yet."""
        self._claims.append(claim)
        if len(self._claims) == _TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Compare what was seen together, and report what is wrong."""
        claims, self._claims = self._claims, []
        copies = [(e.own, e.expected) for e in claims if isinstance(e.expected, Tensor)]
        results = [(e.own, e.expected) for e in claims if isinstance(e.expected, Reference)]
        if are_equal(copies) and are_right(results):
            return
        for own, expected, name, words, micro_batch in claims:
            if isinstance(expected, Reference):
                wrong = num_wrong(own, expected)
            else:
                is_alike = own.shape == expected.shape
                wrong = num_unequal(own, expected) if is_alike else own.numel()
            if wrong:
                number = f"{wrong} of {own.numel()} drawn elements "
                self.tell(name, words, micro_batch, number)

    def tell(self, name: str, words: str, micro_batch: int, number: str = "") -> None:
        """Report what is wrong, each kind once."""
        if (name, words) not in self._reported:
            self._reported.add((name, words))
            self._report(f"{name}: {number}{words}, in micro-batch {micro_batch}")


class PassBorder(Hooked):
    """What lies between modules, while it is watched: hooks that keep the drawn tokens of a pass and compare them."""

    def __init__(self, name: str, moment: Callable[[], Moment], claims: Claims) -> None:
        """`name` begins each message; `moment` is that of the running pass; `claims` is for what is seen."""
        super().__init__()
        self._name, self._moment, self._claims = name, moment, claims
        #: The pass whose forward, or a gradient of which, is seen; None outside of one.
        self._now: Pass | None = None
        #: What left the module before it, at its moment.
        self._arriving: tuple[Moment, Tensor] | None = None
        #: The gradient of what entered, at its moment, until the module before it has it.
        self._returned: tuple[Moment, Tensor] | None = None
        #: What takes what leaves.
        self.following: PassBorder | None = None

    def _forget(self) -> None:
        self._now = self._arriving = self._returned = None
        with unseen():
            self._claims.settle()

    def _pass_on(self, following: PassBorder | None, x: Tensor) -> None:
        """Let what follows know what must enter it."""
        if following is not None and not in_backward():
            following._arriving = self._moment(), self._drawn(x)

    def _take_back(self, own: Tensor) -> None:
        """Compare the gradient of what left with that of what entered the module after it.

        They are one tensor's, and this one is seen first, unless layers are recomputed whole: each is then a graph of
        its own.
        """
        after = self.following
        if after is not None and after._returned is not None:
            moment, gradient = after._returned
            after._returned = None
            if moment == self._pass.moment:
                words = "of the gradient that entered the layer are not what left the one after it"
                self._tell(own, gradient, words)

    def _arrive(self, what: str, x: Tensor) -> None:
        """Compare what enters with what left the module before it."""
        arriving, self._arriving = self._arriving, None
        if not in_backward():
            self._returned = None
        if arriving is not None and arriving[0] == self._pass.moment and not in_backward():
            self._seen["arriving"] = arriving[1]
            self._same(what, "arriving", "left the one before it", x)

    def _same(self, what: str, source: str, words: str, x: Tensor, *_: Any) -> None:
        if source in self._seen:
            own, expected = self._drawn(x), self._seen[source]
            self._tell(own, expected, f"that entered {what} are not what {words}")

    def _on_input(self, module: nn.Module, see: Callable[..., None]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if self._now is not None:
                with unseen():
                    see(*args[:3])

        self._hook(module.register_forward_pre_hook(hook))

    def _on_output(self, module: nn.Module, see: Callable[[Any, Any], None]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._now is not None:
                with unseen():
                    see(output, args)

        self._hook(module.register_forward_hook(hook))

    def _on_gradient(
        self, x: Tensor, name: str, check: Callable[[Tensor], None] | None = None
    ) -> None:
        """Keep the drawn tokens of a tensor's gradient, and check them.

        Not in the first pass of a layer that is recomputed whole: its result has a graph for a moment, which Megatron
        replaces, and a hook on the tensor that is registered meanwhile silences all later ones (torch 2.13). This one
        is therefore on the node, where the hooks of the tensor have already run.
        """
        own = self._now
        if own is None or not own.has_graph or not x.requires_grad:
            return

        def see(gradient: Tensor) -> None:
            before, self._now = self._now, own
            try:
                own.seen[f"d {name}"] = drawn = own.drawn(gradient)
                if name == "x":
                    self._returned = own.moment, drawn
                if check is not None:
                    check(drawn)
            finally:
                self._now = before

        if x.grad_fn is None:
            x.register_hook(unseen_hook(see))  # type: ignore[no-untyped-call]
        else:
            hook, place = unseen_hook(see), x.output_nr
            x.grad_fn.register_prehook(lambda g: None if g[place] is None else hook(g[place]))

    @property
    def _pass(self) -> Pass:
        assert self._now is not None
        return self._now

    @property
    def _seen(self) -> dict[str, Tensor]:
        return self._pass.seen

    def _drawn(self, x: Tensor) -> Tensor:
        return self._pass.drawn(x)

    def _tell(self, own: Tensor, expected: Reference | Tensor, words: str) -> None:
        """Report elements that are not those of a product or sum, or whose bits are not those of a tensor."""
        if isinstance(expected, Tensor) and own.numel() == expected.numel():
            expected = expected.reshape(own.shape)
        micro_batch = self._pass.moment.micro_batch
        self._claims.add(Claim(own, expected, self._name, words, micro_batch))
