"""Builds `SPEC`: checks Megatron-LM's arguments, composes the scheme, and attaches the proof to the training loop.

All ranks must compose the same experiment. Megatron-LM asks for the spec when it builds the model, and its ranks
compare at once. From 0.19 on it asks before it connects its ranks, and they compare as soon as that is done.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from quantexp.errors import ConfigError, QuantexpError
from quantexp.extras.megatron_lm.described import QUANT, experiment_of
from quantexp.extras.megatron_lm.folder import plain
from quantexp.extras.megatron_lm.refused import require_possible
from quantexp.schema import Experiment

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def build_spec() -> ModuleSpec | None:
    """The spec of every layer; it also replaces what the loop calls, so that the first iteration is proved.

    Ends every rank with one line if one has refused an argument, or has another scheme. None if this rank has refused,
    and ends when the ranks are connected.

    Raises:
        ConfigError: this process is not one of Megatron-LM that builds its model.
    """
    args, version = _megatron_lm()
    experiment, refused = _composed(args, version)
    _when_connected(lambda: _agree(experiment, refused))
    if experiment is None:
        return None
    from quantexp.extras.megatron_lm.layers import layer_spec
    from quantexp.extras.megatron_lm.loop import attach

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
    from quantexp.training.megatron.without_te import release

    try:
        import megatron.core
        from megatron.training import get_args

        return get_args(), release(megatron.core)
    except (ImportError, AssertionError) as error:
        raise ConfigError(
            "quantexp.megatron_lm.SPEC is for Megatron-LM's scripts, which build it after they have parsed their "
            f"arguments ({error}); run pretrain_gpt.py --spec quantexp.megatron_lm SPEC in a checkout of Megatron-LM"
        ) from error


def _composed(args: Any, version: str) -> tuple[Experiment | None, str]:
    """This rank's experiment; None and the reason if it is refused."""
    try:
        require_possible(args, version)
        return experiment_of(args, os.environ), ""
    except QuantexpError as error:
        return None, str(error)


def _when_connected(compare: Callable[[], None]) -> None:
    """Call a function now, or as soon as Megatron-LM has connected its ranks."""
    import torch
    from megatron.training import training

    if torch.distributed.is_initialized():
        compare()
        return
    original = training.initialize_megatron

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        compare()
        return result

    training.initialize_megatron = initialize_megatron


def _agree(experiment: Experiment | None, refused: str) -> None:
    """End every rank if one has refused, or composed another experiment."""
    from quantexp.training.megatron.collectives import gather

    outcomes = gather((refused, "" if experiment is None else _digest(experiment)))
    for rank, (words, _) in enumerate(outcomes):
        if words:
            leave(ConfigError(words if refused else f"rank {rank}: {words}"))
    if others := [rank for rank, (_, each) in enumerate(outcomes) if each != outcomes[0][1]]:
        leave(
            ConfigError(
                f"{QUANT} and its companions must describe the same scheme and capture on every rank; that of rank "
                f"{others[0]} is not that of rank 0; pass the same variables and files to all"
            )
        )


def _digest(experiment: Experiment) -> str:
    content = json.dumps(plain(dataclasses.asdict(experiment)), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
