"""The experiment as a run folder records it in config.yaml."""

from __future__ import annotations

import copy

from quantexp.folders import user_path
from quantexp.model.checkpoints import named
from quantexp.schema import Code, Experiment


def recorded(experiment: Experiment) -> Experiment:
    """The experiment for config.yaml: without the words that are about one start only."""
    copied = with_absolute_paths(experiment)
    copied.training.restart, copied.code = False, Code.recorded
    return copied


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """A copy of the experiment whose paths are absolute, so that they do not depend on the working directory."""
    copied = copy.deepcopy(experiment)
    for node, keys in (
        (copied.paths, ("root", "cache")),
        (copied.model, ("from_hf", "init_from")),
        (copied.dataset, ("path", "tokenizer_path")),
        (copied.capture, ("dir",)),
    ):
        for key in keys:
            if getattr(node, key) is not None:
                setattr(node, key, str(user_path(getattr(node, key)).absolute()))
    if copied.training.start_from is not None:
        name, iteration = named(copied.training.start_from)
        if (run := user_path(name)).exists():
            copied.training.start_from = f"{run.absolute()}@{iteration}"
    return copied
