"""Every YAML that ships is composed and loaded, and every composition of sites has its name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from quantexp.config.compose import compose
from quantexp.config.load import read, save
from quantexp.config.sweep.points import Point, compose_points
from quantexp.config.validate.experiment import validate
from quantexp.folders import conf_dir
from quantexp.memory.room import needed_gb
from quantexp.proof.declaration import Declaration
from quantexp.quant.alignment import unaligned_slots
from quantexp.quant.precision import precision_map
from quantexp.quant.scheme import CHOICES, SCHEMES, derived_name
from quantexp.schema import Experiment, QuantConfig

from .shipped import words_of

FILES = sorted(file.relative_to(conf_dir()).with_suffix("") for file in conf_dir().rglob("*.yaml"))
#: A group below another one is chosen with slashes; quant/more is a folder of the group quant.
SUBGROUPS = {f"quant/{site}" for site in ("linear", "qk", "pv", "output")}
#: Presets that cut a model down: they are chosen together with it.
CUT = "model/cut"


def choice(file: Path) -> list[str]:
    """The override that chooses a file."""
    group, name = str(file.parent), file.name
    if file == Path("config"):
        return []
    if group == CUT:
        training, _, model = name.partition("_")
        return [f"training={training}", f"model={model}"]
    if group in SUBGROUPS:
        return [f"{group}={name}"]
    group, _, folder = group.partition("/")
    if group == "quant":
        return words_of(f"{folder}/{name}" if folder else name)
    chosen = f"{group}={folder + '/' if folder else ''}{name}"
    if group == "parallel" and name != "none":
        model = name.rpartition("_")[0] or "llama32-1b"
        return [f"model={model}", chosen, "memory=1000"]
    return [f"+{chosen}" if group in ("experiment", "size") else chosen]


#: Shipped formats are read in tests/formats/declared.
CHOSEN = [file for file in FILES if file.parts[0] not in ("experiment", "format")]


@pytest.mark.parametrize("file", CHOSEN, ids=str)
def test_shipped_file_is_an_experiment_of_its_name(file: Path, tmp_path: Path) -> None:
    """A scheme's configuration, read a second time for the proof, also agrees with its map."""
    experiment = compose(choice(file), None, {})
    save(experiment, tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml") == experiment
    group = file.parts[0]
    if str(file.parent) not in {*SUBGROUPS, CUT} and group != "config":
        section = experiment.training if group == "size" else getattr(experiment, group)
        assert (section.kind if group == "launcher" else section.name) == file.name
    if group == "quant":
        declaration = Declaration(experiment.quant, experiment.model.num_layers)
        declared = precision_map(experiment.model, experiment.quant)
        assert declaration.differences(declared, 1) == []


@pytest.mark.parametrize("file", [f for f in FILES if str(f.parent) == CUT], ids=str)
def test_a_presets_cuts_are_in_force(file: Path) -> None:
    words = choice(file)
    cut = OmegaConf.merge(
        OmegaConf.structured(compose(words[1:], None, {}).model),
        OmegaConf.load(conf_dir() / file.with_suffix(".yaml")),
    )
    assert OmegaConf.to_object(cut) == replace(
        compose(words, None, {}).model, vocab_size=cut.vocab_size
    )


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.parts[0] == "parallel" and "x80" in f.name], ids=str
)
def test_shipped_layout_fits_and_leaves_blocks_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scheme that keeps most, and attention that keeps all scores."""
    monkeypatch.setattr("quantexp.memory.footprint.device_class", lambda _: "NVIDIA H100")
    experiment = compose([*choice(file), "quant=FA_linear_mxfp8", "capture=off"], None, {})
    processes = int(file.name.rpartition("_")[2].partition("x")[0])
    assert experiment.launcher.num_processes == processes
    assert needed_gb(experiment) <= 80
    assert unaligned_slots(experiment) == []


@cache
def points_of(*words: str) -> tuple[Point, ...]:
    """The points of a sweep, composed once for the tests of this file."""
    return tuple(compose_points([*words], None, {}))


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[0] == "experiment"], ids=str)
def test_shipped_experiment_is_one_or_a_sweep(file: Path, tmp_path: Path) -> None:
    points = points_of(*choice(file))
    assert points
    for point in points:
        save(point.experiment, tmp_path / "config.yaml")
        assert read(tmp_path / "config.yaml") == point.experiment


@pytest.mark.parametrize("size", ["small", pytest.param("full", marks=pytest.mark.slow)])
def test_experiments_of_a_size_share_their_bf16_runs(size: str) -> None:
    """Those that compare schemes at one rate: 3 runs of bf16, 3 perturbed ones, and only the scheme differs."""
    others = ("matched", "ten_schemes", "direct_cast", "mx_instability")
    files = [f for f in FILES if f.parts[0] == "experiment" and f.stem not in others]
    assert len(files) == 5
    shared = []
    for file in files:
        points = points_of(*choice(file), *(["size=full"] if size == "full" else []))
        assert {p.experiment.model.name for p in points} == {
            "tiny" if size == "small" else "llama32-1b"
        }
        shared.append([p.experiment for p in points if derived_name(p.experiment.quant) == "bf16"])
        schemes = {p.experiment.quant.name for p in points} - {"bf16"}
        assert len(points) == 6 + 3 * len(schemes)
    assert [len(each) for each in shared] == [6] * len(files)
    assert all(each == shared[0] for each in shared)
    assert {each.training.chaos for each in shared[0]} == {0, 1}


def test_quant_contains_exactly_the_ten_schemes() -> None:
    assert {file.stem for file in (conf_dir() / "quant").glob("*.yaml")} == set(SCHEMES)


def test_quants_folders_are_the_sites_and_more() -> None:
    folders = {folder.name for folder in (conf_dir() / "quant").iterdir() if folder.is_dir()}
    assert folders == {"linear", "qk", "pv", "output", "more"}


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


@cache
def site(group: str, name: str) -> Any:
    file = conf_dir() / "quant" / group / f"{name}.yaml"
    schema = OmegaConf.structured(QuantConfig)[group]
    return OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(file)))


def scheme_of(linear: str, qk: str, pv: str) -> QuantConfig:
    return QuantConfig(linear=site("linear", linear), qk=site("qk", qk), pv=site("pv", pv))


def test_every_combination_of_sites_has_its_name() -> None:
    for linear, qk, pv in product(CHOICES, CHOICES, CHOICES):
        names = {"linear": linear, "qk": qk, "pv": pv}
        parts = "+".join(f"{group}_{name}" for group, name in names.items() if name != "none")
        assert derived_name(scheme_of(**names)) == CANONICAL.get((linear, qk, pv), parts)


@pytest.mark.parametrize(("linear", "qk"), list(product(CHOICES, CHOICES)))
def test_every_pair_of_sites_is_valid(base: Experiment, linear: str, qk: str) -> None:
    """The third site is one of a Latin square, so that each choice of it meets each of the others."""
    pv = CHOICES[(CHOICES.index(linear) + CHOICES.index(qk)) % len(CHOICES)]
    validate(replace(base, quant=scheme_of(linear, qk, pv)))


@pytest.mark.parametrize("output", CHOICES)
def test_every_choice_of_the_output_layer_is_valid_under_its_name(
    base: Experiment, output: str
) -> None:
    quant = QuantConfig(linear=site("linear", "mxfp8"), output=site("output", output))
    validate(replace(base, quant=quant))
    assert site("output", output) == site("linear", output)
    beside = "" if output == "none" else f"+output_{output}"
    assert derived_name(quant) == f"linear_mxfp8{beside}"


@pytest.fixture(scope="module")
def base() -> Experiment:
    return compose(["model.num_layers=1"], None, {})
