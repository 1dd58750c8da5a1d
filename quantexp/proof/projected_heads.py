"""What becomes of the projections' results before attention multiplies them: split, normed, rotated; and back.

grouped queries     qkv, [R, G (H / G + 2) D] -> q, k (normed and rotated), v
latent              kv-up, [R, H (D + E)] -> a part of k, and v
                    q-proj or q-up, [R, H (D + F)] -> q, whose F last elements are rotated
                    the last F of kv-down -> the other part of each k, rotated

# R drawn tokens, H heads, G key-value heads, D head_dim, E head_dim of values, F rotated elements
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.proof.between import Norm, Rotation
from quantexp.proof.layer_pass import Pass
from quantexp.proof.products import Reference
from quantexp.proof.rotary import Rotary

#: What was seen, what it must be (bit for bit if it is a tensor), and what is wrong otherwise.
Claim = tuple[Tensor, Reference | Tensor, str]


@dataclass(frozen=True)
class ProjectedHeads:
    """One pass of an attention module; gradients have the names of their tensors after a `d `."""

    attention: Any
    config: Any
    now: Pass
    #: What is configured; None if the angles are taken as they are.
    rotary: Rotary | None
    norm_of: Callable[[str, Tensor], Norm]

    @property
    def seen(self) -> Mapping[str, Tensor]:
        """q, k, v, what left the projections, `q_layernorm` and `k_layernorm`, by name."""
        return self.now.seen

    def entered(self) -> Iterator[Claim]:
        """Of q, k and v as they enter attention."""
        yield from self._angles()
        if "linear_kv_up_proj" in self.seen:
            up = self.seen["linear_kv_up_proj"]
            yield from self._latent(up, "", "that entered attention as {} are not kv-up's")
            yield from self._turned()
        parts = self._parts("linear_qkv")
        if parts is None:
            return
        for name, part in zip("qk", parts, strict=False):
            rotation, source = self._rotation(name), self.seen.get(f"{name}_layernorm", part)
            if rotation is not None:
                words = f"that entered attention as {name} are not those of qkv, rotated"
                yield self.seen[name], rotation.forward(source), words
        yield self.seen["v"], parts[2], "that entered attention as v are not qkv's"

    def taken_back(self) -> Iterator[Claim]:
        """Of the gradient of what left the projections."""
        if not {"d q", "d k", "d v"} <= self.seen.keys():
            return
        if "d linear_kv_up_proj" in self.seen:
            up = self.seen["d linear_kv_up_proj"]
            yield from self._latent(up, "d ", "of the gradient of attention's {} are not kv-up's")
            rotation, name = self._rotation_of_latent(), f"d {self._of_queries}"
            if rotation is not None and name in self.seen:
                words = "of the gradient that entered {} are not attention's"
                plain, turned = self._split(self.seen["d q"])
                parts_q = self._split(self.seen[name].view(self.seen["d q"].shape))
                yield parts_q[0], plain, words.format("the projection of q")
                yield (
                    parts_q[1],
                    rotation.back(turned),
                    words.format("the projection of q, rotated,"),
                )
        parts, sources = self._parts("d linear_qkv"), self._parts("linear_qkv")
        if parts is None or sources is None:
            return
        for name, part, source in zip("qk", parts, sources, strict=False):
            rotation, norm = self._rotation(name), f"{name}_layernorm"
            if rotation is None:
                continue
            expected = rotation.back(self.seen[f"d {name}"])
            if norm in self.seen:
                own = self.seen[f"d {norm}"]
                yield (
                    own,
                    expected,
                    f"of the gradient that entered the norm of {name} are not {name}'s",
                )
                expected = self.norm_of(norm, source).back(own)
            yield part, expected, f"of the gradient that entered qkv as {name} are not attention's"
        words = "of the gradient that entered qkv as v are not attention's"
        yield parts[2], self.seen["d v"], words

    def _latent(self, up: Tensor, d: str, words: str) -> Iterator[Claim]:
        D, E = self.config.qk_head_dim, self.config.v_head_dim
        heads = up.view(len(up), -1, D + E)
        for name, part in (("k", heads[..., :D]), ("v", heads[..., D:])):
            yield self.seen[f"{d}{name}"][..., : part.shape[-1]], part, words.format(name)

    def _angles(self) -> Iterator[Claim]:
        """Of the angles of the drawn tokens."""
        if self.rotary is not None and not getattr(self.config, "apply_rope_fusion", False):
            T, B = self.now.num_tokens, self.now.num_sequences
            expected = self.rotary.angles(self.now.picked(T * B) // B, T, self.seen["q"].device)
            own = self.now.drawn_angles("q")
            own = torch.zeros_like(expected.values).float() if own is None else own
            yield own, expected, "of the rotary angles are not those of the configuration"

    @property
    def _of_queries(self) -> str:
        """The latent attention's projection of queries."""
        return "linear_q_proj" if "linear_q_proj" in self.seen else "linear_q_up_proj"

    def _split(self, heads: Tensor) -> list[Tensor]:
        """The part of queries or keys that stays, and the rotated one."""
        return list(
            torch.split(
                heads, [self.config.qk_head_dim, heads.shape[-1] - self.config.qk_head_dim], -1
            )
        )

    def _turned(self) -> Iterator[Claim]:
        """Of the rotated part of latent attention's queries and keys."""
        rotation, q, k = self._rotation_of_latent(), self.seen["q"], self.seen["k"]
        if rotation is None:
            return
        words = "that entered attention as {} are not those of its projection, rotated"
        if self._of_queries in self.seen:
            plain, turned = self._split(self.seen[self._of_queries].view(q.shape))
            own = self._split(q)
            yield own[0], plain, "that entered attention as q are not those of its projection"
            yield own[1], rotation.forward(turned), words.format("q")
        if self.config.tensor_model_parallel_size == 1:  # other ranks may have other tokens of it
            own_k, down = self._split(k)[1], self.seen["linear_kv_down_proj"]
            expected = rotation.forward(down[:, None, -own_k.shape[-1] :].expand(own_k.shape))
            yield own_k, expected, words.format("k")

    def _rotation_of_latent(self) -> Rotation | None:
        """That of latent attention; None if its angles are not configured here."""
        angles = self.now.drawn_angles("q")
        if self.rotary is None or angles is None:
            return None
        return Rotation(angles, False, is_latent=True, magnitude=self.rotary.magnitude)

    def _parts(self, name: str) -> list[Tensor] | None:
        """Queries, keys and values in what left qkv, or in its gradient, [R, heads, D]; None if it has others."""
        whole = self.seen.get(name)
        (H, D), G = self.seen["q"].shape[1:], self.seen["k"].shape[1]
        if whole is None or whole.shape[-1] != (H + 2 * G) * D:
            return None
        widths = [H // G * D, D, D]
        parts = torch.split(whole.view(len(whole), G, -1), widths, dim=-1)
        return [part.reshape(len(whole), -1, D) for part in parts]

    def _rotation(self, name: str) -> Rotation | None:
        """That of q or k; None if its formula is another, or follows a norm that was not seen."""
        norm = getattr(self.attention, f"{name}_layernorm", None)
        has_norm = norm is not None and next(norm.parameters(), None) is not None
        if has_norm and f"{name}_layernorm" not in self.seen:
            return None
        if getattr(self.config, "yarn_rotary_scaling_factor", None) is not None:
            return None
        angles, x = self.now.drawn_angles(name), self.seen[name]
        return Rotation(
            x.new_zeros(len(x), 1, 0) if angles is None else angles, self.config.rotary_interleaved
        )
