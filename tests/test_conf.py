"""Every YAML that ships is composed and loaded, and every composition of sites has its name."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from quantexp.compose import compose
from quantexp.load import read, save
from quantexp.paths import conf_dir
from quantexp.quant.scheme import CHOICES, SCHEMES

FILES = sorted(
    file.relative_to(conf_dir()).with_suffix("") for file in conf_dir().rglob("*.yaml")
)
#: A group below another one is chosen with slashes; quant/more is a folder of the group quant.
SUBGROUPS = {f"quant/{site}" for site in ("linear", "qk", "pv")}


def choice(file: Path) -> list[str]:
    """The override that chooses a file."""
    group, name = str(file.parent), file.name
    if file == Path("config"):
        return []
    if group in SUBGROUPS:
        return [f"{group}={name}"]
    group, _, folder = group.partition("/")
    chosen = f"{group}={folder + '/' if folder else ''}{name}"
    return [f"+{chosen}" if group == "experiment" else chosen]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_shipped_file_is_an_experiment_and_survives_its_config_yaml(
    file: Path, tmp_path: Path
) -> None:
    experiment = compose(choice(file), None, {})
    save(experiment, tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml") == experiment


@pytest.mark.parametrize(
    "file", [f for f in FILES if str(f.parent) not in SUBGROUPS and f.parent.name], ids=str
)
def test_shipped_choice_has_its_files_name(file: Path) -> None:
    experiment = compose(choice(file), None, {})
    group = file.parts[0]
    if group != "experiment":
        assert getattr(experiment, group).name == file.name


def test_quant_holds_exactly_the_ten_schemes() -> None:
    assert {file.stem for file in (conf_dir() / "quant").glob("*.yaml")} == set(SCHEMES)


def test_quants_folders_are_the_sites_and_more() -> None:
    folders = {folder.name for folder in (conf_dir() / "quant").iterdir() if folder.is_dir()}
    assert folders == {"linear", "qk", "pv", "more"}


#: (linear, qk, pv) -> name, written out where a scheme of the ten applies.
CANONICAL = {
    ("none", "none", "none"): "bf16",
    ("none", "mxfp8", "none"): "FA_mxfp8",
    ("none", "mxfp4", "none"): "FA_mxfp4",
    ("none", "hifp8", "none"): "FA_hifp8",
    ("mxfp8", "none", "none"): "linear_mxfp8",
    ("mxfp4", "none", "none"): "linear_mxfp4",
    ("hifp8", "none", "none"): "linear_hifp8",
    ("mxfp8", "mxfp8", "none"): "FA_linear_mxfp8",
    ("mxfp4", "mxfp4", "none"): "FA_linear_mxfp4",
    ("hifp8", "hifp8", "none"): "FA_linear_hifp8",
}


@pytest.mark.parametrize(("linear", "qk", "pv"), product(CHOICES, CHOICES, CHOICES))
def test_every_combination_of_sites_loads_under_its_name(linear: str, qk: str, pv: str) -> None:
    sites = {"linear": linear, "qk": qk, "pv": pv}
    words = [f"quant/{site}={choice}" for site, choice in sites.items()]
    parts = "+".join(f"{site}_{choice}" for site, choice in sites.items() if choice != "none")
    expected = CANONICAL.get((linear, qk, pv), parts)
    assert compose(["model.num_layers=1", *words], None, {}).quant.name == expected
