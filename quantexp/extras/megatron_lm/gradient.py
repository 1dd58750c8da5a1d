"""The gradient of the first iteration under parts of a scheme, in Megatron-LM's loop (QUANTEXP_GRADIENT).

Megatron-LM has loaded its checkpoint and opened its data. Its forward and backward passes run on the same micro-batches
under each map, and its reduction leaves the gradients where its optimizer would read them. The optimizer takes no step,
and the script ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state

from quantexp.extra import Service, required
from quantexp.extras.megatron_lm.run import LmRun
from quantexp.extras.megatron_lm.step import begin_draws, mean_loss, told_micro_batches
from quantexp.model.layout import Layout
from quantexp.proof.verdict import Verdict, require
from quantexp.quant.precision import PrecisionMap
from quantexp.schema import Precision
from quantexp.training.megatron.collectives import complete_gradients
from quantexp.training.megatron.parameters import parts_of
from quantexp.training.megatron.watched import Watched


class LmGradient:
    """Takes the place of Megatron's schedule in the one iteration."""

    def __init__(
        self, run: LmRun, iteration: int, forward_backward: Callable[..., Any], optimizer: Any
    ) -> None:
        self.run, self.iteration = run, iteration
        self._forward_backward, self._optimizer = forward_backward, optimizer
        self._watched = Watched(run.chunks, run.experiment.training.seed)

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        num_microbatches: int,
        **kwargs: Any,
    ) -> NoReturn:
        """Compare the gradients, then end the process, as every rank does.

        Raises:
            EngagementError: a pass did not quantise exactly what was declared.
        """
        run, experiment = self.run, self.run.experiment
        repeat = repeatable(data_iterator, num_microbatches)
        run.observer.evaluation()
        run.state.updates_histories = False

        def run_passes(declared: PrecisionMap) -> tuple[float, Verdict]:
            run.use_map(declared)
            for model in run.models:
                model.zero_grad_buffer()
            self._optimizer.zero_grad()

            def begin(index: int) -> None:
                self._watched.begin(self.iteration, index)
                begin_draws(run, self.iteration, index)

            step = told_micro_batches(forward_step_func, begin, run.is_pipelined)
            with (
                self._watched.proving(self.iteration, declared) as verdict,
                run.weight_copies(num_microbatches),
            ):
                losses = self._forward_backward(
                    forward_step_func=step,
                    data_iterator=repeat(),
                    num_microbatches=num_microbatches,
                    **kwargs,
                )
            result = verdict()
            require(result)
            if run.args.use_distributed_optimizer:
                complete_gradients(run.models)
            return mean_loss(run, _own_loss(losses, run.device)), result

        layout = Layout.of(experiment)
        place = layout.place(torch.distributed.get_rank())
        is_scaled = experiment.training.precision is Precision.fp16
        scale = float(self._optimizer.get_loss_scale()) if is_scaled else 1.0
        parts = parts_of(run.chunks, experiment.model, layout, place)
        compare = required(Service.GRADIENT_COMPARISON, "QUANTEXP_GRADIENT")
        compare(run.context, run_passes, parts, scale, self.iteration)
        raise SystemExit(0)


def repeatable(data_iterator: Any, number: int) -> Callable[[], Any]:
    """Take an iteration's micro-batches; the function gives them once more, in Megatron's form.

    That is an iterator, one for each chunk of the model, or None on a rank that receives the tokens from another.
    """
    if isinstance(data_iterator, list):
        of_chunks = [repeatable(each, number) for each in data_iterator]
        return lambda: [each() for each in of_chunks]
    if data_iterator is None:
        return lambda: None
    batches = [next(data_iterator) for _ in range(number)]
    return lambda: iter(batches)


def _own_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Mean loss over the micro-batches of all data-parallel ranks, as `train_step` reports it; 0 before the last stage.

    A micro-batch reports the sum of its losses and its number of tokens, or, in an older form, its mean loss.
    """
    if not losses:
        return torch.zeros((), device=device)
    values = torch.stack([each["lm loss"].detach().view(-1).float() for each in losses])
    if values.shape[-1] == 1:
        return values.mean()
    total = values.sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    return total[0] / total[1]
