"""Combinations of a dataset's keys. Each message names the full key, the value and the allowed values."""

from __future__ import annotations

import math

from quantexp.errors import ConfigError
from quantexp.schema.dataset import DatasetConfig, PrepareConfig
from quantexp.schema.limits import POSITIVE, at_least, check_limits


def validate_data(dataset: DatasetConfig) -> None:
    """Refuse a dataset that cannot be read or prepared.

    Raises:
        ConfigError: names the first invalid key.
    """
    check_limits("dataset", dataset)
    if dataset.split is not None:
        _split(dataset.split)
    if dataset.blend is not None:
        _weights("dataset.blend", dataset.blend, "{PREFIX: 0.7, OTHER: 0.3}")
        for path, weight in dataset.blend.items():
            POSITIVE.check(f"dataset.blend[{path}]", weight)
        if dataset.path is not None:
            raise ConfigError(
                f"dataset.path={dataset.path} and dataset.blend exclude each other; drop one"
            )
    _prepare(dataset.prepare)


def _split(split: str) -> None:
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < shares[0] < math.inf:
        raise ConfigError(
            "dataset.split must be one to three weights (training, validation, test) such as 95,5,0, "
            f"training above 0, got {split!r}"
        )


def _prepare(prepare: PrepareConfig) -> None:
    if prepare.sources is not None:
        _weights("dataset.prepare.sources", prepare.sources, "{SOURCE: 1, OTHER: 0.5}")
    for source, share in (prepare.sources or {}).items():
        if not 0 < share <= 1:
            raise ConfigError(
                f"dataset.prepare.sources[{source}] must be a share in (0, 1], got {share}"
            )
    if prepare.max_chars is not None:
        at_least(prepare.min_chars).check("dataset.prepare.max_chars", prepare.max_chars)


def _weights(key: str, value: object, example: str) -> None:
    """Check that a value is a mapping from names to positive numbers, which its type cannot express."""
    numbers = isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(number, int | float) and not isinstance(number, bool)
        for name, number in value.items()
    )
    if not numbers or not value:
        raise ConfigError(f"{key} must be names with numbers such as {example}, got {value!r}")
