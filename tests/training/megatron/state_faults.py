"""Keeps each rank's own gradients, and plants faults, for `test_rounded_state_in_layouts`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quantexp.model.shards import WHOLE
from quantexp.training.megatron import grad_reduce, rounded_pieces, shared_blocks
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.grad_reduce import GradientRounding

#: The environment variable with the folder for each rank's own gradients.
FOLDER = "OWN_GRADIENTS"


@contextlib.contextmanager
def keep_own_gradients() -> Iterator[None]:
    """Every rank writes its gradients of the first step as they are before the reduction."""
    plain = GradientRounding.finalize
    file = Path(os.environ[FOLDER]) / f"{os.environ['RANK']}.pt"

    def finalize(rounding: GradientRounding, *args: Any, **kwargs: Any) -> None:
        if not file.exists():
            tensors: dict[str, Any] = {n: part.tensor for n, part in rounding._parts.items()}
            own = {name: tensor.main_grad.clone() for name, tensor in tensors.items()}
            torch.save(own, file)
        plain(rounding, *args, **kwargs)

    with mock.patch.object(GradientRounding, "finalize", finalize):
        yield


@contextlib.contextmanager
def nothing_rounded() -> Iterator[None]:
    """Values go on as they are."""
    with mock.patch.object(rounded_pieces.RoundedPiece, "round", return_value=None):
        yield


@contextlib.contextmanager
def rounded_beside() -> Iterator[None]:
    """A copy of the gradients is rounded, and the gradients are sent."""
    plain = rounded_pieces.RoundedPiece.values

    def values(piece: rounded_pieces.RoundedPiece, box: Any) -> Any:
        return plain(piece, box).clone()

    with mock.patch.object(rounded_pieces.RoundedPiece, "values", values):
        yield


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Megatron's reduction does not happen."""
    with mock.patch.object(grad_reduce, "finalize_model_grads", return_value=None):
        yield


@contextlib.contextmanager
def blocks_of_own_range() -> Iterator[None]:
    """A block that two ranks share is two blocks."""
    plain = rounded_pieces.RoundedPiece.boxes

    def boxes(piece: rounded_pieces.RoundedPiece) -> list[Any]:
        return [dataclasses.replace(box, cut=None) for box in plain(piece)]

    with mock.patch.object(rounded_pieces.RoundedPiece, "boxes", boxes):
        yield


@contextlib.contextmanager
def amax_of_own_range() -> Iterator[None]:
    """The scale of a moment follows each rank's own range."""
    plain = gather

    def own(value: Any) -> list[Any]:
        is_amaxes = isinstance(value, dict) and all(isinstance(x, float) for x in value.values())
        return [value] if is_amaxes else plain(value)

    with mock.patch.object(shared_blocks, "gather", own):
        yield


@contextlib.contextmanager
def amax_of_own_part() -> Iterator[None]:
    """The scale of a gradient follows each rank's own part of it."""
    plain = GradientRounding._amax

    def own(rounding: GradientRounding, piece: rounded_pieces.RoundedPiece) -> Any:
        whole = dataclasses.replace(piece.piece, shard=WHOLE)
        return plain(rounding, dataclasses.replace(piece, piece=whole))

    with mock.patch.object(GradientRounding, "_amax", own):
        yield
