"""Bytes of moments and master weights: here, and in the formats of a scheme on hardware."""

from __future__ import annotations

from typing import TypedDict

from quantexp.model.sizes import num_linear_parameters, num_matrix_parameters, num_parameters
from quantexp.model.training_state import MOMENTS, MOMENTUM
from quantexp.quant.outside_products import LINEAR, MASTER, moment_slots, weight_slots
from quantexp.schema import Experiment


class StateBytes(TypedDict):
    """Over all processes."""

    moment_bytes: int
    packed_moment_bytes: int
    master_bytes: int
    packed_master_bytes: int


def state_bytes(experiment: Experiment) -> StateBytes:
    """Moments and master weights in float32, and with those that the scheme rounds in their formats."""
    number, matrices = num_parameters(experiment.model), num_matrix_parameters(experiment)
    return {
        "moment_bytes": 8 * number - 4 * matrices,
        "packed_moment_bytes": _packed_moments(experiment, number, matrices),
        "master_bytes": 4 * number,
        "packed_master_bytes": _packed_master(experiment, number),
    }


def _packed_moments(experiment: Experiment, number: int, matrices: int) -> int:
    rounded = {
        slot.operand: slot.spec.fmt.bits_each(slot.spec.block)
        for slot in moment_slots(experiment.quant)
    }
    bits = (number - matrices) * sum(rounded.get(moment, 32) for moment in MOMENTS)
    return round((bits + matrices * rounded.get(MOMENTUM, 32)) / 8)


def _packed_master(experiment: Experiment, number: int) -> int:
    bits = 32.0 * number
    for slot in weight_slots(experiment.quant):
        if slot.product == MASTER:
            rounded = num_linear_parameters(experiment.model) if slot.module == LINEAR else number
            bits -= rounded * (32 - slot.spec.fmt.bits_each(slot.spec.block))
    return round(bits / 8)
