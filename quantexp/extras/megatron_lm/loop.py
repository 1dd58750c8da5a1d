"""Joins the run to Megatron-LM's training loop, by the names that the loop looks up in its own module at each call.

    train       everything: records how the run ends
    train_step  one iteration: forward and backward passes are proved and captured before the optimizer steps
    evaluate    belongs to no iteration: nothing is captured, no amax history advances
    save_checkpoint_and_time
                amax histories are saved in the run folder

With QUANTEXP_GRADIENT the first `train_step` compares gradients instead, and the script ends.

None of their own code is changed, and no number of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from quantexp.errors import QuantexpError
from quantexp.extras.megatron_lm.gradient import LmGradient
from quantexp.extras.megatron_lm.run import LmRun
from quantexp.extras.megatron_lm.step import LmStep
from quantexp.schema import Experiment


def attach(experiment: Experiment, args: Any, version: str) -> None:
    """Replace the functions of `megatron.training.training` for this process's run."""
    from megatron.training import training

    run = LmRun(experiment, args, version)
    for name, around in (
        ("train", _train),
        ("train_step", _train_step),
        ("evaluate", _evaluate),
        ("save_checkpoint_and_time", _save),
    ):
        original = getattr(training, name)
        setattr(training, name, functools.wraps(original)(around(run, original)))


def _train(run: LmRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except QuantexpError as error:
            run.fail(error)
            raise SystemExit(f"quantexp: {error}") from None
        except SystemExit as leaving:
            run.leave(leaving.code)
            raise
        except BaseException as error:
            run.fail(error)
            raise
        run.leave(0)
        return result

    return train


def _train_step(run: LmRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        run.attach(model)
        step = LmStep(run, forward_backward_func, optimizer)
        schedule: Callable[..., Any] = step.forward_backward
        if run.experiment.gradient.only:
            gradient = LmGradient(run, step.iteration, forward_backward_func, optimizer)
            schedule = gradient.forward_backward
        result = original(
            forward_step_func,
            data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            schedule,
            *args,
            **kwargs,
        )
        return step.finish(result)

    return train_step


def _evaluate(run: LmRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(
        forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        run.attach(model)
        with run.evaluating():
            return original(forward_step_func, data_iterator, model, *args, **kwargs)

    return evaluate


def _save(run: LmRun, original: Callable[..., Any]) -> Callable[..., Any]:
    def save_checkpoint_and_time(iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = original(iteration, *args, **kwargs)
        run.save_histories(iteration)
        return result

    return save_checkpoint_and_time
