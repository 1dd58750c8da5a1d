"""What `quantexp list` can list, the shells that can complete a command line, and the filters of captured tensors."""

from __future__ import annotations

#: The keys that select captured tensors.
FILTERS = ("layer=", "rank=", "iteration=", "operation=", "tensor=", "module=")
SHELLS = ("bash", "zsh", "fish")
#: What can be listed -> the configuration group; None for what is no group.
KINDS: dict[str, str | None] = {
    "models": "model",
    "datasets": "dataset",
    "schemes": "quant",
    "formats": "format",
    "presets": "training",
    "captures": "capture",
    "launchers": "launcher",
    "layouts": "parallel",
    "sizes": "size",
    "experiments": "experiment",
    "runs": None,
}
