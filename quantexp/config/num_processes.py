"""The number of a run's processes where `launcher.num_processes=0` leaves it to the request and the layout."""

from __future__ import annotations

import dataclasses
import math

from quantexp.schema import Experiment


def with_num_processes(experiment: Experiment) -> Experiment:
    """The experiment itself, or with `launcher.num_processes=0` the one with a number.

    It is a process for each requested GPU, or else the fewest that the layout needs, equally many on every node.
    """
    launcher = experiment.launcher
    if launcher.num_processes:
        return experiment
    if launcher.gpus_per_node:
        number = launcher.nodes * launcher.gpus_per_node
    else:
        number = math.lcm(launcher.nodes, _fewest(experiment))
    complete = dataclasses.replace(launcher, num_processes=max(1, number))
    return dataclasses.replace(experiment, launcher=complete)


def _fewest(experiment: Experiment) -> int:
    """The smallest number of processes in which every group of the layout is complete."""
    parallel = experiment.parallel
    dense = parallel.tensor * parallel.context * parallel.pipeline
    if experiment.model.moe is None:
        return dense
    return math.lcm(dense, parallel.expert * (parallel.expert_tensor or 1) * parallel.pipeline)
