"""Calls formats in Python (see `python`), and refuses what they return if it is no result of quantisation."""

from __future__ import annotations

import hashlib
import json
from functools import cache

import torch
from torch import Tensor

from quantexp.errors import FormatError
from quantexp.formats.definitions.python import (
    DIGEST,
    PYTHON,
    PythonFormat,
    instance_of,
)
from quantexp.formats.types import Format


@cache
def python_instance(fmt: Format) -> PythonFormat:
    """The object of a format of the family `python`.

    Raises:
        FormatError: as `instance_of`.
    """
    content = json.loads(fmt.definition)
    return instance_of(content[PYTHON], content.get(DIGEST))


def quantise_python(
    x: Tensor, fmt: Format, axis: int, seed: int | None, offset: int | None
) -> Tensor:
    """The result of the format's `quantise`, under a generator that seed and offset determine.

    It gets a copy of x: a weight that it overwrote would be quantised in all other products, too.

    Raises:
        FormatError: it is no tensor of x's shape, dtype and device, or as `instance_of`.
    """
    words = hashlib.sha256(f"{seed or 0} {offset or 0}".encode()).digest()
    generator = torch.Generator(device=x.device)
    generator.manual_seed(int.from_bytes(words[:8], "big") >> 1)
    with torch.no_grad():
        y = python_instance(fmt).quantise(x.detach().clone(), axis=axis, generator=generator)
    is_like = isinstance(y, Tensor) and (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    if not is_like:
        got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise FormatError(
            f"quantise of the format {fmt.name} must return a tensor like x, {x.dtype} {tuple(x.shape)} on {x.device}, "
            f"got {got}"
        )
    return y
