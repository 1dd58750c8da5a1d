"""Groups and their choices, from the folders."""

from __future__ import annotations

from pathlib import Path

from quantexp.config.choices import choice_files, comment, groups, hidden_files
from quantexp.folders import conf_dir
from quantexp.quant.scheme import CHOICES, SCHEMES


def test_groups_are_the_folders_and_the_sites_of_a_scheme() -> None:
    assert {"model", "dataset", "quant", "capture", "launcher", "experiment", "training"} <= set(
        groups()
    )
    assert groups()[-4:] == ("quant/linear", "quant/qk", "quant/pv", "quant/output")


def test_choices_of_schemes_are_the_ten_and_those_in_folders() -> None:
    names = [*choice_files("quant", None)]
    assert set(names[: len(SCHEMES)]) == set(SCHEMES)
    assert len(names) > len(SCHEMES)
    assert all(name.startswith("more/") for name in names[len(SCHEMES) :])
    assert set(choice_files("quant/linear", None)) == set(CHOICES)


def test_cuts_of_presets_are_no_models() -> None:
    assert not [name for name in choice_files("model", None) if "/" in name]


def test_own_choices_follow_the_shipped_ones_however_deep_they_lie(tmp_path: Path) -> None:
    for name in ("quant/a", "quant/april/first/b", "quant/linear/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text("")
    assert [*choice_files("quant", tmp_path)][-2:] == ["a", "april/first/b"]
    assert [*choice_files("quant/linear", tmp_path)][-1] == "c"


def test_description_that_is_not_utf_8_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("# Für mich.\nname: x\n".encode("latin-1"))
    assert comment(file) == "F\ufffdr mich."


def test_copy_of_a_shipped_file_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    shipped = (conf_dir() / "quant" / "bf16.yaml").read_text()
    (tmp_path / "quant" / "bf16.yaml").write_text(shipped)
    assert hidden_files(tmp_path) == []
    (tmp_path / "quant" / "bf16.yaml").write_text("# mine\n")
    assert hidden_files(tmp_path) == [tmp_path / "quant" / "bf16.yaml"]
