"""What the installed Transformer Engine says that this machine can run."""

from __future__ import annotations

import importlib
from typing import Any

from quantexp.errors import RunError
from quantexp.extras.transformer_engine.scheme.hardware import too_old
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe

#: The function of `transformer_engine.pytorch` that answers for a recipe.
_CHECKS = {
    Kind.MXFP8: "is_mxfp8_available",
    Kind.CURRENT: "is_fp8_available",
    Kind.DELAYED: "is_fp8_available",
    Kind.BLOCK: "is_fp8_block_scaling_available",
    Kind.NVFP4: "is_nvfp4_available",
    Kind.CUSTOM: "is_fp8_available",
}


def require_support(recipe: Recipe) -> None:
    """Refuse a recipe that this machine cannot run.

    Raises:
        RunError: with Transformer Engine's own reason.
    """
    version = te_version()
    if (old := too_old(version)) is not None:
        raise RunError(f"{recipe} {old}")
    if (reason := why_unsupported(recipe.kind)) is not None:
        raise RunError(f"Transformer Engine {version} cannot run {recipe} here: {reason}")


def support_in_words() -> str:
    """`2.11.0: Float8CurrentScaling; not MXFP8BlockScaling (Device compute capability 10.0 or higher required ...)`."""
    version = te_version()
    if (old := too_old(version)) is not None:
        return f"{version}, which is too old: quantexp {old}"
    import torch

    if not torch.cuda.is_available():
        return f"{version} is installed, and there is no GPU to run it"
    kinds = [kind for kind in Kind if kind is not Kind.CUSTOM]
    reasons = {kind.value: why_unsupported(kind) for kind in kinds}
    able = [name for name, reason in reasons.items() if reason is None]
    unable = [f"not {name} ({reason})" for name, reason in reasons.items() if reason is not None]
    return f"{version}: {'; '.join([', '.join(able) or 'no recipe', *unable])}"


def te_version() -> str:
    """The version of the imported package."""
    return str(importlib.import_module("transformer_engine").__version__)


def why_unsupported(kind: Kind) -> str | None:
    """Why this machine cannot run a recipe, in Transformer Engine's words; None if it can."""
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    available, reason = getattr(pytorch, _CHECKS[kind])(return_reason=True)
    return None if available else str(reason)
