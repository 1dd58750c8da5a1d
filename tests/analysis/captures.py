"""Synthetic captures in run folders, as quantexp writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

MX8 = {"format": "mxfp8_e4m3", "block": 32, "scale_rule": "rceil", "rounding": "even"}
MX4 = {"format": "mxfp4_e2m1", "block": 32, "scale_rule": "floor", "rounding": "even"}
HIF8 = {"format": "hifp8", "rounding": "away", "scaling": "current", "saturate": True}
BF16 = {"format": "bf16"}

LINEAR_AXES = {
    "fprop.x": "input_width",
    "fprop.w": "input_width",
    "dgrad.g": "output_width",
    "dgrad.w": "output_width",
    "wgrad.g": "tokens",
    "wgrad.x": "tokens",
}


def linear_formats(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every slot of a linear module under one format."""
    return {slot: {**settings, "axis": axis} for slot, axis in LINEAR_AXES.items()}


def attention_formats(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """FA_*: q and k quantised forward and reused backward, the rest in bf16."""
    return {
        "fprop.q": {**settings, "axis": "head_dim"},
        "fprop.k": {**settings, "axis": "head_dim"},
        "dgrad_q.k": {**settings, "axis": "head_dim", "reuse": True},
        "dgrad_k.q": {**settings, "axis": "head_dim", "reuse": True},
        "fprop.P": {**BF16, "axis": "keys"},
        "fprop.v": {**BF16, "axis": "keys"},
    }


class Capture:
    """Writes the capture of one run, file by file."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.dir = run_dir / "tensors"
        self.dir.mkdir(parents=True)
        self.lines: list[dict[str, Any]] = []

    def add(
        self,
        tensor: torch.Tensor,
        name: str,
        module: str = "fc1",
        layer: int = 0,
        *,
        quant_type: str = "mxfp8",
        formats: dict[str, dict[str, Any]] | None = None,
        file: str | None = None,
    ) -> dict[str, Any]:
        """Save a tensor (unless `file` names an existing one) and write its line."""
        layer_type = "attention" if module == "attention" else "linear"
        backward = "grad" in name or (file is not None and name == "weight")
        after = name in ("output", "attn_weights") or name.startswith(
            ("grad_in", "grad_w", "grad_q", "grad_k", "grad_v")
        )
        component = "FA" if layer_type == "attention" else "linear"
        operation, phase = "backward" if backward else "forward", "post" if after else "pre"
        if file is None:
            index = f"L{layer}" if layer_type == "attention" else f"L{layer}-{module}"
            file = (
                f"{quant_type}/20250908_095220_{len(self.lines):04d}_{layer_type}_{index}_{operation}_"
                f"{phase}_{component}_{quant_type}_{name}.pt"
            )
            path = self.dir / file
            path.parent.mkdir(exist_ok=True)
            torch.save({"tensor": tensor, "metadata": {"layer": layer}}, path)
        line = {
            "file": file,
            "module": module,
            "layer": layer,
            "layer_type": layer_type,
            "operation": operation,
            "phase": phase,
            "component": component,
            "quant_type": quant_type,
            "tensor": name,
            "iteration": 1,
            "micro_batch": 0,
            "rank": 0,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.numel() * tensor.element_size(),
            "hash": "0" * 16,
            "formats": {} if formats is None else formats,
        }
        self.lines.append(line)
        self.write()
        return line

    def write(self, tail: str = "") -> None:
        """Write the manifest, with `tail` at its end."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        (self.dir / "manifest.jsonl").write_text(text + tail)

    def add_layers(self, num_layers: int, tokens: int = 64, width: int = 64) -> None:
        """Add a decoder under FA_linear_mxfp8: attention and four linear modules, both passes."""
        generator = torch.Generator().manual_seed(7)

        def normal(scale: float, *shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

        heads = max(1, width // 64)
        for layer in range(num_layers):
            for name in ("query", "key", "value", "output"):
                x = normal(1.5, tokens, 1, heads, 64)
                self.add(x, name, "attention", layer, formats=attention_formats(MX8))
            for module, wide in (("qkv", 1), ("proj", 1), ("fc1", 4), ("fc2", 1)):
                formats = linear_formats(MX8)
                x = normal(1.0, tokens, 1, width)
                x[..., :: max(1, width // 8)] *= 2.0 ** (4 + layer)
                g = normal(2.0**-12, tokens, 1, wide * width)
                w = normal(0.02, wide * width, width)
                self.add(x, "input", module, layer, formats=formats)
                line = self.add(w, "weight", module, layer, formats=formats)
                self.add(g.flip(0) * 2.0**8, "output", module, layer, formats=formats)
                self.add(g, "grad_output", module, layer, formats=formats)
                self.add(w, "weight", module, layer, formats=formats, file=line["file"])
                self.add(x * 2.0**-10, "grad_input", module, layer, formats=formats)

    def add_config(self) -> None:
        """Write the names that a title shows."""
        (self.run_dir / "config.yaml").write_text(
            "model: {name: llama32-1b}\n"
            "dataset: {name: wikipedia, label: wikipedia (built-in sample)}\n"
            "quant: {name: FA_linear_mxfp8}\ncapture: {dir: null}\n"
        )

    def add_metrics(self, losses: list[float]) -> None:
        """Write one line for each iteration."""
        lines = [json.dumps({"iteration": i, "loss": x}) for i, x in enumerate(losses, start=1)]
        (self.run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
