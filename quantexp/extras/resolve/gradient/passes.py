"""The gradients of a seed's checkpoints under each arm, against those in fp32 on the same weights and batches.

The batches are those that the run would have trained with after the checkpoint, each with the draws of its iteration.
The passes are those of a step (`quantexp.training.gradients`). The first one under a map is proved completely, all
others in drawn parts, as the iterations of a run are; precision.json of an arm's folder has the proof of the whole
scheme, and of each of its parts alone before it. The weights are those that the run multiplied, rounded to its working
precision, in fp32 too: what differs is the arithmetic alone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.config.load import read
from quantexp.errors import EngagementError
from quantexp.extras.resolve.gradient.design import is_random, parts_alone
from quantexp.extras.resolve.gradient.estimates import estimates_of
from quantexp.extras.resolve.gradient.results import WHOLE
from quantexp.memory.room import require_memory_here
from quantexp.model.layout import Layout
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment, Precision, QuantConfig
from quantexp.training.context import RunContext
from quantexp.training.observer import RunObserver

if TYPE_CHECKING:
    from quantexp.extras.resolve.gradient.errors import Reference
    from quantexp.quant.precision import PrecisionMap
    from quantexp.training.megatron.passes import Batch
    from quantexp.training.megatron.step import Stepper
    from quantexp.training.proofs import Proofs


def run_gradients(
    folder: Path, branches: Sequence[Mapping[str, Any]], num_batches: int, draws: int, by: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each arm measures, by its name; arms of one checkpoint follow each other and share its reference.

    A proof that fails is a result: the arm has no estimates then.

    Raises:
        DataError: weights or text are missing.
        RunError: the model does not fit into the memory there is.
        EngagementError: the passes in fp32 are not proved.
    """
    for _, group in itertools.groupby(branches, key=lambda each: each["checkpoint"]):
        reference = None
        for each in group:
            run, begin = RunDir(folder / each["name"]), time.process_time()
            experiment = read(run.config)
            if reference is None:
                own = RunDir(folder / f"{each['name']}-fp32")
                own.root.mkdir(exist_ok=True)
                reference = reference_gradients(own, experiment, num_batches)
            content: dict[str, Any] = {"failure": None, "signal": reference.signal()}
            content["groups"] = list(reference.groups)
            try:
                content["parts"] = errors_of(run, experiment, reference, draws, by)
            except EngagementError as error:
                content |= {"failure": str(error), "parts": {}}
            yield each["name"], {**content, "cpu_s": time.process_time() - begin}


@contextlib.contextmanager
def _passes(run: RunDir, experiment: Experiment) -> Iterator[_Passes]:
    """The passes of a model at the checkpoint; the proof is written into the folder of `run`."""
    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    from quantexp.training.megatron.data_loader import data_of, rank_batches
    from quantexp.training.megatron.model import scheme_spec
    from quantexp.training.megatron.numerics_state import use_numerics
    from quantexp.training.megatron.session import session
    from quantexp.training.megatron.step import Stepper

    require_memory_here(experiment)
    context, training = RunContext(run, experiment), experiment.training
    process = session(training, layout=Layout.of(experiment))
    with process as device, contextlib.redirect_stdout(sys.stderr):
        batches = rank_batches(experiment, context.rank, *data_of(experiment))
        observer = RunObserver(context, device, batches.text_of)
        spec = scheme_spec(experiment.model, experiment.quant.backend)
        numerics = use_numerics(experiment, weights_once=training.weight_cache)
        with contextlib.closing(observer), numerics as state:
            stepper = Stepper(experiment, spec, device, observer, state)
            yield _Passes(stepper, observer.proofs, batches.train)
            observer.proofs.write_drawn()


class _Passes:
    """Passes of a stepper, each proved."""

    def __init__(self, stepper: Stepper, proofs: Proofs, batches: Iterator[Batch]) -> None:
        from quantexp.training.gradients import StepPasses

        self.stepper, self._proofs, self._batches = stepper, proofs, batches
        self._passes = StepPasses(stepper)
        self._proved: PrecisionMap | None = None

    def batches(self, number: int) -> list[list[Batch]]:
        """The micro-batches of the next steps."""
        each = self.stepper.num_micro_batches
        return [list(itertools.islice(self._batches, each)) for _ in range(number)]

    def run(self, iteration: int, batches: Sequence[Batch], declared: PrecisionMap) -> None:
        """Leave the gradients in the stepper's parts.

        Raises:
            EngagementError: the passes did not quantise exactly what the map declares.
        """
        proofs, watched = self._proofs, self._passes.watched
        prove = proofs.of_drawn if declared is self._proved else proofs.of_products
        with prove(watched, iteration, declared):
            self._passes.run(iteration, batches, declared)
        self._proved = declared


def reference_gradients(run: RunDir, experiment: Experiment, num_batches: int) -> Reference:
    """Those in fp32 of the batches after an experiment's checkpoint.

    Raises:
        QuantexpError: as `run_gradients`.
    """
    single = copy.deepcopy(experiment)
    single.quant, single.training.precision = QuantConfig("bf16"), Precision.fp32
    with _passes(run, single) as passes:
        from quantexp.extras.resolve.gradient.errors import reference_of
        from quantexp.training.gradients import gradient_of, map_of
        from quantexp.training.megatron.transformer_config import DTYPES

        parts, first = passes.stepper.parts, single.first_iteration
        for part in parts.values():
            values = part.tensor.detach()
            values.copy_(values.to(DTYPES[experiment.training.precision]))
        declared, gradients = map_of(single, first), []
        for k, batch in enumerate(passes.batches(num_batches)):
            passes.run(first + k, batch, declared)
            own = {name: gradient_of(part).detach().clone() for name, part in parts.items()}
            gradients.append(own)
        return reference_of(passes.stepper, gradients)


def errors_of(
    run: RunDir, experiment: Experiment, reference: Reference, draws: int, by: Sequence[str]
) -> dict[str, dict[str, list[Any]]]:
    """The estimates of each part of a scheme alone and of the whole, by scaling.

    Raises:
        EngagementError: a pass did not quantise exactly what was declared.
    """
    with _passes(run, experiment) as passes:
        from quantexp.extras.resolve.gradient.errors import Errors
        from quantexp.training.gradients import map_of

        of_batches, first = passes.batches(len(reference.of_batches)), experiment.first_iteration
        results = {}
        for name, off in {**parts_alone(experiment, by), WHOLE: ()}.items():
            errors, declared = Errors(passes.stepper, reference), map_of(experiment, first, off)
            number = draws if is_random(declared) else 1
            for k, batch in enumerate(of_batches):
                for d in range(number):  # numbers that no step of the run draws
                    passes.run(first + k + d * experiment.training.iterations, batch, declared)
                    errors.add(k)
                errors.end_batch(number)
            tallies = errors.tallies().items()
            results[name] = {scaling: list(map(estimates_of, own)) for scaling, own in tallies}
    return results
