"""What a ring takes, and how much memory that needs; computed without torch, for `plan`."""

from __future__ import annotations

from dataclasses import replace

from quantexp.capture.select.budget import price_of_iteration
from quantexp.quant.precision import PrecisionMap
from quantexp.schema import CaptureConfig, CaptureLevel, CaptureValues, Experiment

#: Bytes of a tensor's statistics and metadata in memory, at most, as measured by its test (test_price.py).
TENSOR_BYTES = 5_000
#: An id of a token.
_ID_BYTES = 8


def ring_config(capture: CaptureConfig) -> CaptureConfig:
    """What a ring and its dossiers take: all tensors, as statistics or whole; no rule and no sample."""
    return replace(
        capture,
        level=CaptureLevel.tensors,
        values=CaptureValues.before,
        rules=[],
        sample_count=0,
        train_on_if_full=True,
    )


def ring_bytes(experiment: Experiment, declared: PrecisionMap) -> int:
    """The host memory of the rings of all processes, once they are full; 0 without one."""
    length, training = experiment.capture.ring, experiment.training
    if length is None:
        return 0
    taken = replace(experiment, capture=ring_config(experiment.capture))
    tokens = training.global_batch_size * training.seq_length * _ID_BYTES
    return length * (price_of_iteration(taken, declared).statistics * TENSOR_BYTES + tokens)


def ring_and_dossier_bytes(experiment: Experiment, declared: PrecisionMap) -> tuple[int, int]:
    """The bytes of `ring_bytes` and of `dossier_bytes`."""
    return ring_bytes(experiment, declared), dossier_bytes(experiment, declared)


def dossier_bytes(experiment: Experiment, declared: PrecisionMap) -> int:
    """The values of a dossier on disk: those of one iteration."""
    taken = replace(experiment, capture=ring_config(experiment.capture))
    return price_of_iteration(taken, declared).num_bytes
