"""What becomes of the projections' results before attention multiplies them: split, normed, rotated; and back.

grouped queries     qkv, [R, G (H / G + 2) D] -> q, k (normed and rotated), v
latent              kv-up, [R, H (D + E)] -> a part of k, and v

# R drawn tokens, H heads, G key-value heads, D head_dim, E head_dim of values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.proof.between import Norm, Rotation
from quantexp.proof.products import Reference

#: What was seen, what it must be (bit for bit if it is a tensor), and what is wrong otherwise.
Claim = tuple[Tensor, Reference | Tensor, str]


@dataclass(frozen=True)
class ProjectedHeads:
    """One pass of an attention module; gradients have the names of their tensors after a `d `."""

    attention: Any
    config: Any
    #: q, k, v, and what left `linear_qkv` or `linear_kv_up_proj`, `q_layernorm` and `k_layernorm`.
    seen: Mapping[str, Tensor]
    #: The angles of q's or k's drawn tokens, [R, 1, at most D]; None without a rotary embedding.
    angles: Callable[[str], Tensor | None]
    norm_of: Callable[[str, Tensor], Norm]

    def entered(self) -> Iterator[Claim]:
        """Of q, k and v as they enter attention."""
        if "linear_kv_up_proj" in self.seen:
            up = self.seen["linear_kv_up_proj"]
            yield from self._latent(up, "", "that entered attention as {} are not kv-up's")
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
        angles, x = self.angles(name), self.seen[name]
        return Rotation(
            x.new_zeros(len(x), 1, 0) if angles is None else angles, self.config.rotary_interleaved
        )
