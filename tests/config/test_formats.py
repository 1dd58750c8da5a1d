"""Formats of a scheme's own: found by their names, kept in the run's configuration, part of its identity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.config.formats import definitions
from quantexp.config.load import read, save
from quantexp.errors import ConfigError
from quantexp.launch.identity import identity
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.quant.sites import FPROP_W, FPROP_X
from quantexp.schema import Experiment

Tiny = Callable[..., Experiment]
MINE = "element: e3m3\nblock: 24\nscale: ue5m3\n"
SLOT = "quant.linear.fprop.x.format=mine"
INLINE = "+quant.formats.mine={element: e3m3, block: 24, scale: ue5m3}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own" / "format").mkdir(parents=True)
    (tmp_path / "own" / "format" / "mine.yaml").write_text(MINE)
    return tmp_path / "own"


def composed(folder: Path | None, *words: str) -> Experiment:
    return compose(["training=fast", "model=tiny", *words], folder, {})


def test_a_file_is_found_by_the_name_in_a_slot_a_rule_or_the_capture(folder: Path) -> None:
    for words in (
        [SLOT],
        ["quant.rules=[{layers: [0], sites: [qk], format: mine}]"],
        ["capture.format=mine"],
    ):
        formats = composed(folder, *words).quant.formats
        assert formats == {"mine": {"element": "e3m3", "block": 24, "scale": "ue5m3"}}
    assert composed(folder).quant.formats == {}


def test_the_definition_travels_with_the_run(folder: Path, tmp_path: Path) -> None:
    experiment = composed(folder, SLOT)
    save(experiment, tmp_path / "config.yaml")
    (folder / "format" / "mine.yaml").unlink()
    again = read(tmp_path / "config.yaml")
    assert again == experiment
    spec = precision_map(again.model, again.quant)[ModuleId(0, "fc1")].spec(FPROP_X)
    assert (spec.fmt.name, spec.block) == ("mine", 24)


def test_the_content_decides_the_identity_not_the_place(folder: Path, tiny: Tiny) -> None:
    inline = tiny(INLINE, SLOT)
    other = tiny(INLINE.replace("24", "48"), SLOT)
    assert inline.quant.name is not None
    assert inline.quant.name != other.quant.name
    assert identity(inline, "cpu")["scheme"] != identity(other, "cpu")["scheme"]
    assert composed(folder, SLOT).quant.name == inline.quant.name


def test_a_site_in_one_format_of_ones_own_is_named_after_it(folder: Path) -> None:
    name = composed(folder, "quant.linear.format=mine").quant.name
    assert name is not None
    assert name.startswith("linear_mine~")


def test_a_scheme_file_may_declare_its_formats(folder: Path) -> None:
    (folder / "quant").mkdir()
    (folder / "quant" / "own.yaml").write_text(
        "formats: {inline: {element: int4, block: 16}}\nlinear: {format: inline}\n"
    )
    experiment = composed(folder, "quant=own")
    assert experiment.quant.name == "own"
    changed = composed(folder, "quant=own", "quant.formats.inline.block=32")
    assert str(changed.quant.name).startswith("linear_inline~")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SLOT], "quant.linear.fprop.x.format must be one of .*, got 'mine'"),
        (
            ["quant.formats.mine=3"],
            r"unknown key quant.formats.mine; write \+quant.formats.mine=...",
        ),
        (["+quant.formats.mine=3"], "quant.formats.mine must be keys with values, got 3"),
        (
            ["+quant.formats.a-b={element: e3m3}"],
            "quant.formats.a-b must have a name of 1 to 64 letters",
        ),
        (
            ["+quant.formats.mxfp8={element: e3m3}"],
            "quant.formats.mxfp8 has the name of a format of quantexp",
        ),
        (
            ["+quant.formats.mxint8={element: e3m3}"],
            "quant.formats.mxint8 has the name of a shipped format and another definition",
        ),
        (
            ["+quant.formats.mine={element: e3m3, block: 8, scale: q}"],
            "quant.formats.mine: scale must be one of e8m0",
        ),
        (
            ["quant.linear.fprop.x.format=fp8_128x128"],
            "quant.linear.fprop.x.format fp8_128x128 has blocks of 128 rows, which are for weights, got it for "
            "linear.fprop.x; give x a format with blocks of one row",
        ),
        (
            ["quant.linear.format=no_module:Own"],
            "quant.formats.no_module:Own: there is no module no_module for the format",
        ),
        (["capture.format=none_such"], "capture.format must be one of .*mxint8.*, got 'none_such'"),
        (
            ["quant=more/linear_nvfp4_recipe", "model.num_layers=2"],
            "quant.rules of linear_nvfp4_recipe leave nothing quantised in the 2 layers of tiny in iterations "
            "1 to [0-9]+; take more layers",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        composed(None, *words)
    assert "\n" not in str(caught.value)


def test_a_wrong_file_is_named(folder: Path) -> None:
    (folder / "format" / "mine.yaml").write_text("element: e3m3\nblok: 3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: unknown key blok"):
        composed(folder, SLOT)


def test_a_file_with_a_shipped_name_and_another_definition_is_refused(folder: Path) -> None:
    (folder / "format" / "mxint8.yaml").write_text(MINE)
    words = (
        r"mxint8\.yaml has the name of a shipped format and another definition; rename the file$"
    )
    with pytest.raises(ConfigError, match=words):
        definitions("mxint8", folder)
    with pytest.raises(ConfigError, match="has the name of a shipped file"):
        composed(folder, "quant.linear.fprop.x.format=mxint8")


def test_a_file_with_the_name_of_a_format_of_the_table_is_refused(folder: Path) -> None:
    (folder / "format" / "mxfp8.yaml").write_text(MINE)
    words = r"mxfp8\.yaml has the name of a shipped file or format, which would be taken instead"
    with pytest.raises(ConfigError, match=words):
        composed(folder, "quant.linear.fprop.x.format=mxfp8")


def test_definitions_of_named_formats_are_read_for_requantise(folder: Path, tmp_path: Path) -> None:
    read_ = definitions("mine,mxfp8,mxint8", folder)
    assert json.loads(read_["mine"])["block"] == 24
    assert set(read_) == {"mine", "mxint8"}
    with pytest.raises(ConfigError, match="--config-dir must be a folder"):
        definitions("mine", tmp_path / "none")


def test_a_class_has_the_digest_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "formats_with_a_digest.py"
    file.write_text("class Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    word = "quant.linear.fprop.w.format=formats_with_a_digest:Own"
    first = composed(None, word)
    spec = precision_map(first.model, first.quant)[ModuleId(0, "fc1")].spec(FPROP_W)
    assert json.loads(spec.fmt.definition)["python"] == "formats_with_a_digest:Own"
    assert str(first.quant.name).startswith("linear_Own~")
    file.write_text("class Own:\n    quantise = None\n")
    assert composed(None, word).quant.name != first.quant.name
