"""The points of sweeps, and own files that define some."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.config.sweep.points import Point, compose_points
from quantexp.errors import ConfigError

OWN = """\
defaults:
  - linear: mxfp8
  - qk: none
  - pv: none
  - _self_

name: own
linear:
  dgrad:
    g: {format: bf16}
"""


EXPERIMENT = """\
# @package _global_
defaults:
  - override /training: fast
  - override /capture: "off"
  - _self_
training:
  iterations: 4
  min_lr: ${training.lr}
"""


SWEEP = """\
# @package _global_
hydra: {sweeper: {params: {quant: "bf16,FA_mxfp8", training.seed: "5"}}}
sweep:
  first: {quant: FA_*}
  seeds: 2
"""


def points(*words: str, config_dir: Path | None = None) -> list[Point]:
    return compose_points(list(words), config_dir, {})


def schemes(*words: str, config_dir: Path | None = None) -> list[str | None]:
    return [point.experiment.quant.name for point in points(*words, config_dir=config_dir)]


def refusal(*words: str, config_dir: Path | None = None) -> str:
    """The message that refuses a sweep; always one line."""
    with pytest.raises(ConfigError) as caught:
        points(*words, config_dir=config_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)
