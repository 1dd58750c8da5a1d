"""Builds `SPEC`: checks Megatron-LM's arguments, composes the scheme, and attaches the proof to the training loop."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from quantexp.errors import ConfigError, QuantexpError
from quantexp.megatron_lm.described import QUANT, experiment_of
from quantexp.megatron_lm.folder import plain
from quantexp.megatron_lm.refused import require_possible
from quantexp.schema import Experiment

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def build_spec() -> ModuleSpec:
    """The spec of every layer; it also replaces what the loop calls, so that the first iteration is proved.

    Ends the process with one line, on every rank, if an argument is refused.

    Raises:
        ConfigError: this process is not one of Megatron-LM that builds its model.
    """
    args, version = _megatron_lm()
    from quantexp.megatron_lm.layers import layer_spec
    from quantexp.megatron_lm.loop import attach

    try:
        experiment = _agreed(args, version)
    except QuantexpError as error:
        leave(error)
    attach(experiment, args, version)
    return layer_spec(experiment.model, sequence_parallel=args.sequence_parallel)


def leave(error: QuantexpError) -> NoReturn:
    """End the process with a user's error: one line, and no traceback."""
    sys.stdout.flush()
    raise SystemExit(f"quantexp: {error}") from None


def _megatron_lm() -> tuple[Any, str]:
    """Megatron-LM's arguments, and the version of the megatron.core that runs: the checkout's.

    Raises:
        ConfigError: Megatron-LM's arguments are not parsed, or its training package is not there. The wheel of
            Megatron-Core has that package from 0.17 on, without the scripts.
    """
    try:
        import megatron.core
        from megatron.training import get_args

        return get_args(), str(megatron.core.__version__)
    except (ImportError, AssertionError) as error:
        raise ConfigError(
            "quantexp.megatron_lm.SPEC is for Megatron-LM's scripts, which build it after they have parsed their "
            f"arguments ({error}); run pretrain_gpt.py --spec quantexp.megatron_lm SPEC in a checkout of Megatron-LM"
        ) from error


def _agreed(args: Any, version: str) -> Experiment:
    """The experiment, which all ranks compose for themselves and compare.

    Raises:
        ConfigError: a rank refused it, or composed another one.
    """
    from quantexp.training.megatron.collectives import gather

    experiment: Experiment | None = None
    refused = digest = ""
    try:
        require_possible(args, version)
        experiment = experiment_of(args, os.environ)
        digest = _digest(experiment)
    except QuantexpError as error:
        refused = str(error)
    outcomes = gather((refused, digest))
    for rank, (words, _) in enumerate(outcomes):
        if words:
            raise ConfigError(words if refused else f"rank {rank}: {words}")
    if others := [rank for rank, (_, each) in enumerate(outcomes) if each != outcomes[0][1]]:
        raise ConfigError(
            f"{QUANT} and its companions must describe the same scheme and capture on every rank; that of rank "
            f"{others[0]} is not that of rank 0; pass the same variables and files to all"
        )
    assert experiment is not None
    return experiment


def _digest(experiment: Experiment) -> str:
    content = json.dumps(plain(dataclasses.asdict(experiment)), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
