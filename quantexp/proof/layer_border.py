"""What lies between the modules of a decoder layer, compared in float64 in some tokens of each pass.

    n = norm(x)     q, k, v -> attention -> o     h = x + proj(o)
    m = norm(h)     fc2's input = act(fc1's gate) * fc1's up     y = h + what the feed-forward returns

Each module's input must be what left the one before it, bit for bit, and each norm, rotary embedding, activation and
sum must be that of its inputs, within the roundings of its dtype (`between`); so must the gradients that these formulas
take back. A product beside the modules, by whatever library or thread, changes one of these. Layers of other kinds
(LayerNorm, dropout, fused norms) are compared as far as these formulas are theirs.

    # T tokens, B sequences, R drawn tokens, H heads, G key-value heads, D head_dim
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from quantexp.formats.torch_internals import unseen
from quantexp.proof.between import Activation, Norm, total
from quantexp.proof.draws import Moment
from quantexp.proof.hooked import plain
from quantexp.proof.layer_pass import AFTER_NORM, NORMS, Claims, Pass, PassBorder
from quantexp.proof.norm_border import NormBorder
from quantexp.proof.projected_heads import ProjectedHeads
from quantexp.proof.rotary import Rotary


class LayerEntry(PassBorder):
    """What enters a decoder layer, while the one before it is watched.

    Args:
        name: of the layer, in messages.
        layer: a Megatron-Core `TransformerLayer`.
        moment: when the running pass is.
        claims: for what is seen.
    """

    def __init__(self, name: str, layer: Any, moment: Callable[[], Moment], claims: Claims) -> None:
        super().__init__(name, moment, claims)
        self._layer = layer

    def _install(self) -> None:
        see = plain(self._enter)
        self._hook(self._layer.register_forward_pre_hook(see, with_kwargs=True, prepend=True))

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self._now = Pass(self._moment(), kwargs.get("rotary_pos_emb"), x.shape[1])
        with unseen():
            self._seen["x"] = self._drawn(x)
            self._arrive("the layer", x)
        self._on_gradient(x, "x", self._gave)

    def _gave(self, own: Tensor) -> None:
        """Compare the gradient that the layer gives back with its inside, where that is watched."""


class LayerBorder(LayerEntry):
    """One decoder layer's inside while it is watched.

    Args:
        name, layer, moment, claims: as above.
        rotary: the rotary embedding that is configured; None if its angles are taken as they are.
        norms: the norms of the map, which have gains and results of their own.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        moment: Callable[[], Moment],
        claims: Claims,
        rotary: Rotary | None = None,
        norms: Mapping[nn.Module, NormBorder] | None = None,
    ) -> None:
        super().__init__(name, layer, moment, claims)
        self._norms, self._config, self._rotary = norms or {}, layer.config, rotary
        #: What must be seen in every forward pass.
        self._due: set[str] = set()

    def _install(self) -> None:
        super()._install()
        layer, attention, mlp = self._layer, self._layer.self_attention, self._layer.mlp
        for name, module in layer.named_modules():
            if isinstance(module, nn.RMSNorm):
                own = name.rpartition(".")[2]
                self._due.add(own)
                self._on_output(module, partial(self._norm, own, module))
        for name, (own, norm) in AFTER_NORM.items():
            if hasattr(attention, name):
                see = partial(self._after_norm, own, norm)
                self._on_input(getattr(attention, name), see)
        if hasattr(attention, "rotary_pos_emb"):
            self._on_output(attention.rotary_pos_emb, self._turn)
        self._on_input(attention.core_attention, self._core)
        projections = "linear_qkv", "linear_kv_up_proj", "linear_q_proj", "linear_q_up_proj"
        checks = {
            **dict.fromkeys(projections, self._projection_gradient),
            "linear_kv_down_proj": None,
            "core_attention": None,
            "linear_proj": partial(self._passed_on, "proj", "h"),
        }
        for name, check in checks.items():
            if hasattr(attention, name):
                self._due.add(name)
                self._on_output(getattr(attention, name), partial(self._keep, name, check))
        if not getattr(self._config, "attention_output_gate", False):
            see = partial(self._same, "proj", "core_attention", "left attention's products")
            self._on_input(attention.linear_proj, see)
        see = partial(self._after_norm, "the feed-forward", "pre_mlp_layernorm")
        self._on_input(getattr(mlp, "linear_fc1", mlp), see)
        passed_on = partial(self._passed_on, "the feed-forward", "y")
        self._on_output(mlp, partial(self._keep, "mlp", passed_on))
        for name, module in mlp.named_modules():
            if hasattr(module, "linear_fc1"):
                key, check = f"{name}.fc1", partial(self._act_gradient, f"{name}.fc1")
                if "local_experts" in name:
                    self._on_input(module, partial(self._weigh, key))
                self._on_output(module.linear_fc1, partial(self._keep, key, check))
                self._on_input(module.linear_fc2, partial(self._act, key))
        self._on_output(layer, self._leave)

    def _gave(self, own: Tensor) -> None:
        self._stream_gradient("x", "h", "input_layernorm", own)

    def _leave(self, output: Any, _: Any) -> None:
        self._sum("left the layer", output[0], "h", "mlp", "the feed-forward")
        self._on_gradient(output[0], "y", self._take_back)
        for name in sorted(self._due - self._seen.keys()):
            words = f"{NORMS.get(name, name)} was not called"
            self._claims.tell(self._name, words, self._pass.moment.micro_batch)
        self._pass_on(self.following, output[0])
        self._now = None

    def _keep(self, name: str, check: Callable[[Tensor], None] | None, output: Any, _: Any) -> None:
        """Keep what a module returns, with the bias that it leaves to others."""
        y, bias = output if isinstance(output, tuple) else (output, None)
        self._seen[name] = self._drawn(y)
        if bias is not None:
            self._seen[f"{name} bias"] = bias.detach()
        if check is not None:
            self._on_gradient(y, name, check)

    def _norm(self, name: str, module: nn.RMSNorm, output: Tensor, args: tuple[Tensor]) -> None:
        if name == "input_layernorm":
            self._same(NORMS[name], "x", "entered the layer", args[0])
        elif name == "pre_mlp_layernorm":
            self._sum(f"entered {NORMS[name]}", args[0], "x", "linear_proj", "attention")
            self._seen["h"] = self._drawn(args[0])
            gradient = partial(self._stream_gradient, "h", "y", name)
            self._on_gradient(args[0], "h", gradient)
        self._on_gradient(output, name, partial(self._norm_gradient, name))
        self._seen[name] = own = self._drawn(output)
        if module in self._norms and self._norms[module].rounds_result:
            return
        expected = self._norm_of(name, self._drawn(args[0])).forward()
        self._tell(
            own, expected, f"that left {NORMS.get(name, name)} are not the norm of what entered it"
        )

    def _after_norm(self, what: str, norm: str, x: Tensor, *_: Any) -> None:
        """What leaves a norm enters a module, and the norm gets the gradient that leaves the module."""
        self._same(what, norm, "left the norm before it", x)
        self._on_gradient(x, f"{norm} in {what}")

    def _norm_gradient(self, name: str, own: Tensor) -> None:
        found = [g for key, g in self._seen.items() if key.startswith(f"d {name} in ")]
        words = f"of the gradient that entered {NORMS.get(name, name)} are not what left the modules after it"
        attention = self._layer.self_attention
        after = sum(norm == name and hasattr(attention, m) for m, (_, norm) in AFTER_NORM.items())
        if len(found) < after:
            return  # a module that is not watched has the norm's own tensor
        if len(found) == 1:
            self._tell(own, found[0], words)
        elif found:
            self._tell(own, total(*found), words)

    def _norm_of(self, name: str, x: Tensor) -> Norm:
        is_of_layer = hasattr(self._layer, name)
        module = getattr(self._layer if is_of_layer else self._layer.self_attention, name)
        border = self._norms.get(module)
        gain = module.weight.detach() if border is None else border.gain()
        return Norm(x, gain, self._config.layernorm_epsilon)

    def _stream_gradient(self, tensor: str, after: str, norm: str, own: Tensor) -> None:
        """The residual stream's gradient: what comes by the sum after it, and by the norm of it."""
        if f"d {after}" in self._seen and f"d {norm}" in self._seen:
            by_sum, by_norm = self._seen[f"d {after}"], self._seen[f"d {norm}"]
            expected = self._norm_of(norm, self._seen[tensor]).back(by_norm)
            expected = expected.plus(total(by_sum)).again()
            words = "are not the sum of the stream's and of the norm's"
            self._tell(own, expected, f"of the gradient of what entered {NORMS[norm]} {words}")

    def _passed_on(self, what: str, stream: str, own: Tensor) -> None:
        """The gradient of a branch: that of the stream to which it is added."""
        if f"d {stream}" in self._seen and not self._has_dropout():
            words = f"of the gradient that entered {what} are not the stream's"
            self._tell(own, self._seen[f"d {stream}"], words)

    def _has_dropout(self) -> bool:
        return bool(self._config.hidden_dropout) and self._layer.training

    def _sum(self, what: str, y: Tensor, stream: str, branch: str, words: str) -> None:
        """A sum of the residual stream and a branch."""
        if {stream, branch} <= self._seen.keys() and not self._has_dropout():
            x, bias = self._seen[stream], self._seen.get(f"{branch} bias")
            parts = [x, self._seen[branch], *([] if bias is None else [bias.expand_as(x)])]
            words = f"that {what} are not the sum of the stream and {words}"
            self._tell(self._drawn(y), total(*parts), words)

    def _activation(self, key: str) -> Activation | None:
        """That of a feed-forward; None if nothing of it was seen or its formula is another."""
        config, y = self._config, self._seen.get(key)
        if y is None or not len(y) or getattr(config, "activation_func_clamp_value", None):
            return None
        if config.bias_activation_fusion and config.activation_func is not functional.silu:
            return None  # fused kernels approximate other functions
        bias = self._seen.get(f"{key} bias")
        return Activation(
            y if bias is None else y.double() + bias,
            config.activation_func,
            config.gated_linear_unit,
            getattr(config, "glu_linear_offset", 0.0),
            config.bias_activation_fusion or bias is not None,
        )

    def _weigh(self, key: str, _: Tensor, factor: Tensor, *__: Any) -> None:
        """The rows of a routed expert have a factor each, the weight of the expert."""
        self._seen[f"{key} factor"] = self._drawn(factor[:, None])

    def _act(self, key: str, x: Tensor, *_: Any) -> None:
        activation = self._activation(key)
        if activation is not None:
            self._on_gradient(x, f"{key} act")
            own, factor = self._drawn(x), self._seen.get(f"{key} factor")
            expected = activation.forward(own.dtype, factor)
            self._tell(own, expected, "that entered fc2 are not the activation of what left fc1")

    def _act_gradient(self, key: str, own: Tensor) -> None:
        activation, g = self._activation(key), self._seen.get(f"d {key} act")
        if activation is not None and g is not None:
            expected = activation.back(g, self._seen.get(f"{key} factor"))
            words = "of the gradient that entered fc1 are not the activation's"
            self._tell(own, expected, words)

    def _turn(self, output: Any, _: Any) -> None:
        """Latent attention has the angles from a module of its own, some with a factor of cosine and sine."""
        self._pass.angles = output[0] if isinstance(output, tuple) else output

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Packed sequences, [tokens, heads, D], are not compared."""
        if q.dim() == 4:
            self._pass.num_tokens = len(q)
            for name, x in (("q", q), ("k", k), ("v", v)):
                self._on_gradient(x, name)
                self._seen[name] = self._drawn(x)
            for claim in self._projected().entered():
                self._tell(*claim)

    def _projection_gradient(self, _: Tensor) -> None:
        for claim in self._projected().taken_back():
            self._tell(*claim)

    def _projected(self) -> ProjectedHeads:
        attention = self._layer.self_attention
        return ProjectedHeads(attention, self._config, self._pass, self._rotary, self._norm_of)
