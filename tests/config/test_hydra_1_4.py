"""What this code needs of Hydra and OmegaConf, and what Hydra 1.4 with OmegaConf 2.4 would break.

pyproject.toml keeps both back. These tests pass with the versions that it takes. With OmegaConf 2.4 each is expected to
fail for the reason beside it, and the last lines of the output list them; one that then passes is an error, so that
the list stays true.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import hydra
import omegaconf
import pytest
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from quantexp.config.compose import compose
from quantexp.config.sweep.variants import listed


def _release(module: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in module.__version__.split(".")[:2])


def breaks(why: str, *, until_hydra: tuple[int, ...] | None = None) -> pytest.MarkDecorator:
    """A mark for what OmegaConf 2.4 breaks, where Hydra itself does until a version of it."""
    is_new = _release(omegaconf) >= (2, 4)
    is_broken = is_new and (until_hydra is None or _release(hydra) < until_hydra)
    return pytest.mark.xfail(is_broken, reason=f"OmegaConf 2.4: {why}", strict=True)


@breaks("register_new_resolver warns that it is deprecated", until_hydra=(1, 4))
def test_hydra_registers_its_resolvers_without_a_warning() -> None:
    setup_globals()


@breaks(
    "version_base, a Version where Hydra 1.3 declares a text, warns; 1.4.0rc3 deprecates it for 1.5"
)
def test_an_experiment_is_composed_without_a_warning_of_version_base() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)
        assert compose(["quant=bf16"]).quant.name == "bf16"


@breaks("a tuple stays a tuple, and run folders, identities and messages have lists")
def test_a_tuple_becomes_a_list() -> None:
    assert OmegaConf.to_container(OmegaConf.create({"iterations": (1, 5)})) == {
        "iterations": [1, 5]
    }


@breaks("YAML of more than 10,000 nodes is refused, and a file may list 10,000 points")
def test_a_file_lists_as_many_points_as_a_sweep_may_have(tmp_path: Path) -> None:
    file = tmp_path / "points.yaml"
    file.write_text("".join(f"- {{training.seed: {seed}}}\n" for seed in range(10_000)))
    assert len(listed(file, [])) == 10_000
