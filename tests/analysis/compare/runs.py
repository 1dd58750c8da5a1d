"""Run folders as quantexp writes them, with only the files that a comparison reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status

MX8 = {"format": "mxfp8_e4m3", "block": 32, "scale_rule": "rceil", "rounding": "even"}
BF16 = {"format": "bf16", "block": None, "scale_rule": None, "rounding": None}
TRAINING = {
    "seq_length": 128,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "iterations": 4,
    "lr": 1e-4,
    "precision": "bf16",
    "seed": 1234,
}


def entries(settings: dict[str, Any], layers: int = 2) -> list[dict[str, Any]]:
    """A precision map of two modules with the slots of fprop."""
    return [
        {
            "layer": layer,
            "module": module,
            "site": "linear",
            "product": "fprop",
            "operand": operand,
            "axis": "input_width",
            "reuse": False,
            **settings,
        }
        for layer in range(layers)
        for module in ("qkv", "fc1")
        for operand in ("x", "w")
    ]


class Runs:
    """Writes run folders below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        scheme: str = "bf16",
        losses: Sequence[float | None] | None = None,
        *,
        name: str | None = None,
        settings: dict[str, Any] | None = None,
        state: State = State.COMPLETED,
        proved: bool = True,
        data: str = "sample-1",
        **training: Any,
    ) -> RunDir:
        """Write one run; `training` changes keys of its section, in configuration and identity alike."""
        folder = name or f"llama32-1b_wikipedia_{scheme}-{len(list(self.root.glob('*'))):08x}"
        run = RunDir(self.root / folder)
        run.root.mkdir(parents=True)
        settings = settings or (BF16 if scheme == "bf16" else MX8)
        section = {**TRAINING, **training}
        if losses is None:  # each seed has its own
            losses = [loss + (section["seed"] - 1234) / 1e6 for loss in (6.0, 5.0, 4.0, 3.5)]
        config = {
            "model": {"name": "llama32-1b", "num_layers": 2},
            "dataset": {"name": "wikipedia", "label": "wikipedia (built-in sample)"},
            "quant": {"name": scheme},
            "capture": {"level": "tensors", "dir": None},
            "training": {"name": "fast", **section},
            "paths": {"root": str(self.root)},
        }
        run.config.write_text(yaml.safe_dump(config))
        provenance = {
            "quantexp": "0.1.0",
            "python": "3.11.7",
            "command": ["quantexp", f"quant={scheme}"],
            "host": "node1",
            "source": {"commit": "abc123", "diff": "", "snapshot": "0123456789abcdef"},
            "packages": {"torch": "2.13.0", "megatron-core": "0.16.1"},
            "identity": {
                "model": {"num_layers": 2},
                "data": {"tokens": data, "split": "95,5,0"},
                "scheme": [[1, entries(settings)]],
                "training": section,
                "attention_path": "plain",
                "device_class": "cpu",
                "data_parallel": 1,
                "numerics": 1,
            },
            "ran": {"host": "node2", "device": "cpu", "packages": {"torch": "2.13.0"}},
            "verified": {"state": "not verified", "words": "not verified", "certificate": None},
        }
        run.provenance.write_text(json.dumps(provenance))
        self.prove(run, scheme, settings, proved)
        lines = [
            {
                "iteration": i,
                "loss": loss,
                "step_time_s": 9.0 if i == 1 else 2.0,
                "tokens_per_s": 10.0 if i == 1 else (100.0 if scheme == "bf16" else 50.0),
                "memory_gb": 2.0 + i / 10,
            }
            for i, loss in enumerate(losses, 1)
        ]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = Status(state, created="2026-01-01T00:00:00+00:00", iteration=len(losses))
        status.iterations = section["iterations"]
        write_status(run.status, status)
        return run

    @staticmethod
    def prove(run: RunDir, scheme: str, settings: dict[str, Any], proved: bool) -> None:
        """Write precision.json."""
        quantised = settings["format"] != "bf16"
        proof = {"calls": 4, "recomputed_calls": 0, "quantised_calls": 4 * quantised}
        status = "engaged" if proved else "mismatch"
        reason = "" if proved else "3 elements are off the grid"
        map_ = [{**e, **proof, "status": status, "reason": reason} for e in entries(settings)]
        record = {
            "scheme": scheme,
            "iteration": 1,
            "proved": proved,
            "quantised_calls": 32 * quantised,
            "failures": [] if proved else ["L0 qkv fprop.x: 3 elements are off the grid"],
            "entries": map_,
        }
        run.precision.write_text(json.dumps(record))


def change_json(file: Path, **changes: Any) -> None:
    """Change top keys of a JSON file."""
    content = deepcopy(json.loads(file.read_text()))
    file.write_text(json.dumps({**content, **changes}))
