"""`quantexp list`."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from quantexp.cli.flags import KINDS
from quantexp.cli.list import choices, format_rows, record, show, show_names
from quantexp.cli.main import main
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir
from quantexp.formats import Family, decode, get_format
from quantexp.formats.codes import code_values
from quantexp.formats.definitions.files import shipped_formats
from quantexp.formats.table import FORMATS
from quantexp.quant.scheme import SCHEMES

Captured = pytest.CaptureFixture[str]


def names(kind: str, config_dir: Path | None = None) -> list[str]:
    return [choice.name for choice in choices(kind, config_dir)]


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("models", "model"),
        ("datasets", "dataset"),
        ("presets", "training"),
        ("captures", "capture"),
        ("launchers", "launcher"),
        ("layouts", "parallel"),
        ("sizes", "size"),
        ("experiments", "experiment"),
        ("formats", "format"),
    ],
)
def test_kind_lists_every_file_of_its_group(kind: str, group: str) -> None:
    assert names(kind) == sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def test_schemes_are_the_ten_in_their_order_and_then_the_rest() -> None:
    assert names("schemes")[:10] == list(SCHEMES)
    more = names("schemes")[10:]
    assert more == sorted(f"more/{f.stem}" for f in (conf_dir() / "quant" / "more").glob("*.yaml"))
    assert {"more/FA_full_hifp8", "more/linear_nvfp4", "more/linear_mxfp4_sr_rht"} <= set(more)


@pytest.mark.parametrize("kind", [kind for kind, group in KINDS.items() if group])
def test_every_shipped_choice_has_a_description(kind: str) -> None:
    assert [choice.name for choice in choices(kind, None) if not choice.about] == []


def test_every_group_is_listed() -> None:
    folders = {folder.name for folder in conf_dir().iterdir() if folder.is_dir()}
    assert set(filter(None, KINDS.values())) == folders


def test_formats_have_bits_block_scale_and_range() -> None:
    rows = {row["name"]: row for row in format_rows()}
    assert list(rows) == [*FORMATS, *shipped_formats()]
    assert rows["mxfp8_e4m3"] == {
        "name": "mxfp8_e4m3",
        "about": "OCP Microscaling Formats (MX) v1.0",
        "aliases": ["mxfp8"],
        "element": "e4m3",
        "element_bits": 8,
        "values": 253,
        "bits": 8.25,
        "block": 32,
        "scale": "E8M0 a block",
        "largest": 448.0,
        "smallest": 2.0**-9,
        "code": "compiled code",
    }
    assert rows["nvfp4_e2m1"]["scale"] == "E4M3 a block, float32 a tensor"
    assert rows["bf16"]["smallest"] == 2.0**-133
    assert rows["fp8_128x128"]["block"] == [128, 128]
    assert "arXiv 2412.19437" in str(rows["fp8_128x128"]["about"])
    assert (rows["mxint8"]["values"], rows["mxint8"]["code"]) == (255, "compiled code")
    assert rows["nvfp4_four_over_six"]["code"] == "torch code"


def test_every_format_has_as_many_values_as_its_codes_mean() -> None:
    for row in format_rows():
        fmt = get_format(str(row["name"]))
        if fmt.family is not Family.BF16:
            values = {v for v in code_values(fmt.element) if math.isfinite(v)}
            assert row["values"] == len(values), fmt.name
    bf16 = next(row for row in format_rows() if row["name"] == "bf16")
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    assert bf16["values"] == len(set(every[every.isfinite()].tolist()))


def test_formats_of_a_folder_of_ones_own_come_last(tmp_path: Path) -> None:
    (tmp_path / "format").mkdir()
    file = tmp_path / "format" / "mine.yaml"
    file.write_text("# What it is for.\nelement: e3m3\nblock: row\nscale: ue5m3\n")
    row = format_rows(tmp_path)[-1]
    keys = ("name", "about", "block", "scale")
    assert [row[key] for key in keys] == ["mine", "What it is for.", "row", "UE5M3 a row"]
    file.write_text("element: e3m3\nblok: 3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: unknown key blok; a format has element"):
        format_rows(tmp_path)


#: Formats whose codes mean values by themselves.
PLAIN = ("hifp8", "fp8_e4m3", "fp8_e5m2")


@pytest.mark.parametrize("name", PLAIN)
def test_largest_and_smallest_are_those_of_all_codes(name: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = decode(codes, torch.tensor(1.0), name, dtype=torch.float32).abs()
    values = values[values.isfinite() & (values > 0)]
    row = next(row for row in format_rows() if row["name"] == name)
    assert (row["largest"], row["smallest"]) == (values.max().item(), values.min().item())


def test_formats_fit_80_columns_a_line_each() -> None:
    out = io.StringIO()
    show({"formats": format_rows()}, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines[2:] if line[1] != " "]
    assert names == [*FORMATS, *shipped_formats()]


def test_list_of_a_mistyped_kind_suggests_one() -> None:
    with pytest.raises(ConfigError, match=r"got 'schems'; did you mean schemes\?$"):
        choices("schems", None)


def test_a_missing_config_dir_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir must be a folder, got '.*none'"):
        choices("schemes", tmp_path / "none")


#: Combinations of the ten's own choices.
OWN = {"more/FA_full_hifp8", "more/FA_full_mxfp4", "more/FA_full_mxfp8"}


def test_a_scheme_of_other_formats_or_options_cites_its_source() -> None:
    about = {choice.name: choice.about for choice in choices("schemes", None)[10:]}
    assert about.keys() > OWN
    for name in about.keys() - OWN:
        assert "arXiv" in about[name] or "OCP" in about[name], name


def test_description_of_a_scheme_is_its_sites_and_of_a_file_its_comment() -> None:
    about = {choice.name: choice.about for choice in choices("schemes", None)}
    assert about["FA_linear_mxfp8"] == "linear mxfp8, QK mxfp8, PV none"
    assert about["more/FA_full_mxfp8"].startswith("Q and K of the attention scores as in FA_mxfp8")
    fast = {choice.name: choice.about for choice in choices("presets", None)}["fast"]
    assert fast.startswith("The quick test: ")


def test_own_choices_are_listed_too(tmp_path: Path) -> None:
    (tmp_path / "quant" / "more").mkdir(parents=True)
    (tmp_path / "quant" / "own.yaml").write_text("# My own.\ndefaults: []\n")
    (tmp_path / "quant" / "more" / "odd.yaml").write_text("defaults: []\n")
    (tmp_path / "quant" / "april").mkdir()
    (tmp_path / "quant" / "april" / "deep.yaml").write_text("# Deep.\n")
    about = {choice.name: choice.about for choice in choices("schemes", tmp_path)}
    assert about["own"] == "My own."
    assert about["more/odd"] == ""
    assert about["april/deep"] == "Deep."
    assert set(SCHEMES) < set(about)


@pytest.mark.parametrize("kind", ["widgets", "runs"])
def test_unknown_kind_lists_the_kinds(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"list must be one of models, datasets, .*got '{kind}'"):
        choices(kind, None)


def test_list_without_a_kind_lists_all_but_the_runs(tmp_path: Path) -> None:
    assert list(record([], None, tmp_path)) == [kind for kind in KINDS if kind != "runs"]


def test_list_without_a_kind_is_short_and_has_the_ten_schemes(tmp_path: Path) -> None:
    """A line for each kind where the names fit, and every name whole."""
    out = io.StringIO()
    show_names(record([], None, tmp_path), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    words = " ".join(lines)
    for kind in ("models", "datasets", "presets", "formats", "experiments"):
        assert [name for name in names(kind) if f" {name}" not in words] == []
    more = len(names("schemes")) - len(SCHEMES)
    assert f"{', '.join(SCHEMES)} and {more} more" in " ".join(words.split())


def test_list_schemes_has_the_ten_apart_from_the_others(capsys: Captured) -> None:
    assert main(["list", "schemes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:11]] == ["schemes", *SCHEMES]
    assert lines[11] == "more schemes"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("models", "llama32-1b"),
        ("datasets", "dolma"),
        ("schemes", "FA_linear_hifp8"),
        ("presets", "fast"),
        ("captures", "tensors"),
    ],
)
def test_list_prints_each_kind(capsys: Captured, kind: str, name: str) -> None:
    assert main(["list", kind]) == 0
    assert name in capsys.readouterr().out
    assert main(["list", kind, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content) == [kind]
    assert name in [row["name"] for row in content[kind]]


def test_list_of_schemes_begins_with_the_ten(capsys: Captured) -> None:
    main(["list", "schemes", "--json"])
    rows = json.loads(capsys.readouterr().out)["schemes"]
    assert [row["name"] for row in rows[:10]] == list(SCHEMES)


def test_list_of_an_unknown_kind_is_refused(capsys: Captured) -> None:
    assert main(["list", "widgets"]) == 1
    assert capsys.readouterr().err.startswith("quantexp: list must be one of models, datasets, ")
