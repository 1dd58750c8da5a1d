"""Reads the names of a run from its configuration; all of them may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.errors import RunError
from quantexp.model.label import describe_model
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import moved, read_config


@dataclass(frozen=True)
class RunNames:
    """The names for a figure's title; None if the configuration does not have them."""

    run: str
    model: str | None = None
    dataset: str | None = None
    scheme: str | None = None
    #: The folder of the tensors, if not in the run folder.
    capture_dir: str | None = None
    #: Whether tokens attend only to their own document.
    mask_documents: bool = False
    #: The model with its changes and its size (`describe_model`).
    model_label: str | None = None
    #: The working precision: bf16, fp16 or fp32.
    precision: str | None = None


def read_names(run: RunDir) -> RunNames:
    """The names in config.yaml; a dataset's label wins over its name.

    Raises:
        RunError: no such folder, or a config.yaml that is not a configuration.
    """
    if not run.root.is_dir():
        raise RunError(
            f"{run.root} is not a run folder: there is no such folder; give one of runs/"
        )
    return names_of(run, read_config(run))


def names_of(run: RunDir, config: Mapping[str, Any]) -> RunNames:
    """`read_names` of a configuration that has been read."""
    name, tensors = run.root.resolve().name, _text(config, "capture", "dir")
    if tensors is not None:
        root = _text(config, "paths", "root") or str(run.root.parent)
        tensors = moved(tensors, root, run.root.parent)
    dataset = _text(config, "dataset", "label") or _text(config, "dataset", "name")
    return RunNames(
        name,
        _text(config, "model", "name"),
        dataset,
        _text(config, "quant", "name"),
        tensors,
        _text(config, "dataset", "mask_documents") == "True",
        describe_model(section(config, "model")) or None,
        _text(config, "training", "precision"),
    )


def section(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """A group of a configuration; empty if it does not have it."""
    content = config.get(group)
    return content if isinstance(content, dict) else {}


def _text(config: Mapping[str, Any], group: str, key: str) -> str | None:
    value = section(config, group).get(key)
    return None if value is None else str(value)
