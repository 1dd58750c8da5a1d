"""Reads the entries of a published config.json: each has the type that its family declares, or is refused by name.

The experts of Mixtral and Qwen3-MoE are entries of their own, read and written here. The balancing loss of these
families, `router_aux_loss_coef`, is not read. transformers adds it only on request, over the tokens of all layers
together; ours is a sum over layers, and is chosen with `model.moe.aux_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantexp.errors import ConfigError
from quantexp.schema import AuxLoss, MoeConfig

Json = Mapping[str, Any]

#: The default of an entry that must be there.
_REQUIRED: Any = object()
#: Above every number of a model.
_LARGEST = 1e18


class Entries:
    """Typed access to a config.json with clear errors; files may store rotary parameters in an old or a new place."""

    def __init__(self, content: Json, file: Path) -> None:
        self.content, self.file = content, file
        self.rope = self._mapping("rope_parameters") or {}

    def number(
        self, key: str, content: Json | None = None, where: str = "", default: Any = _REQUIRED
    ) -> Any:
        """A finite number; the default, if there is one, for a missing or null entry."""
        value = (self.content if content is None else content).get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.file}: {where}{key} must be a number, got {value!r}")
        if not abs(value) < _LARGEST:
            raise ConfigError(f"{self.file}: {where}{key} must be below {_LARGEST:g}, got {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; the default for a missing or null entry."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {key} must be true or false, got {value!r}")
        return value

    def rope_theta(self) -> int:
        """The base period of the rotary embedding."""
        here = self.rope if "rope_theta" in self.rope else self.content
        theta = self.number("rope_theta", here)
        if theta != int(theta):
            raise ConfigError(
                f"{self.file}: rope_theta must be a whole number to be built here, got {theta}"
            )
        return int(theta)

    def rope_scaling(self, built: str) -> Json | None:
        """The scaling of rotary frequencies; None if there is none."""
        scaling = self.rope or self._mapping("rope_scaling")
        if scaling is None:
            return None
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return None
        if kind != built:
            raise ConfigError(
                f"{self.file}: rope_scaling must be of type {built} or none to be built here, got {kind!r}"
            )
        return scaling

    def _mapping(self, key: str) -> Json | None:
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {key} must be a JSON object or null, got {value!r}")
        return value


def mixtral_experts(read: Entries) -> dict[str, Any]:
    """Mixtral's experts: all layers have them, and the weights of a token's experts have a sum of 1.

    Raises:
        ConfigError: a missing or unsupported number.
    """
    return _experts(read, "num_local_experts", "intermediate_size", 0, True)


def qwen3_experts(read: Entries) -> dict[str, Any]:
    """Qwen3-MoE's experts: the first layers may have a plain feed-forward.

    Raises:
        ConfigError: a missing or unsupported number.
    """
    # transformers 5 writes num_experts under another name.
    key = "num_experts" if "num_experts" in read.content else "num_local_experts"
    normalised = read.flag("norm_topk_prob", False)
    return _experts(read, key, "moe_intermediate_size", _dense_layers(read), normalised)


def _experts(
    read: Entries, num_experts: str, width: str, num_dense_layers: int, normalised: bool
) -> dict[str, Any]:
    top_k = read.number("num_experts_per_tok")
    if normalised and top_k < 2:
        raise ConfigError(
            f"{read.file}: num_experts_per_tok must be at least 2 to be built here, got {top_k}: the normalised "
            "weight of a single expert is 1 and leaves its router without a gradient"
        )
    return {
        "num_experts": read.number(num_experts),
        "top_k": top_k,
        "expert_ffn_hidden_size": read.number(width),
        "num_shared_experts": 0,
        "num_dense_layers": num_dense_layers,
        "norm_topk_prob": normalised,
        "routed_scaling_factor": 1.0,
        "aux_loss": AuxLoss.none.name,
        "aux_loss_coefficient": 0.0,
    }


def _dense_layers(read: Entries) -> int:
    """The number of first layers without experts."""
    layers = read.content.get("mlp_only_layers")
    if layers is None:
        return 0
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        raise ConfigError(
            f"{read.file}: mlp_only_layers must be the first layers ([], [0], [0, 1], ...) to be built here, got "
            f"{layers!r}"
        )
    return len(layers)


def mixtral_json(moe: MoeConfig) -> dict[str, Any]:
    """The published form of Mixtral's experts."""
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_ffn_hidden_size,
        **_balancing_json(moe),
    }


def qwen3_json(moe: MoeConfig) -> dict[str, Any]:
    """The published form of Qwen3-MoE's experts."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn_hidden_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "mlp_only_layers": list(range(moe.num_dense_layers)),
        "decoder_sparse_step": 1,
        **_balancing_json(moe),
    }


def _balancing_json(moe: MoeConfig) -> dict[str, Any]:
    return {"output_router_logits": False, "router_aux_loss_coef": moe.aux_loss_coefficient}
