"""Every file is read once within a `configuration`, and no composition changes another's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from quantexp.config.cached_loader import LARGEST_FILE, cache_files, check_yaml
from quantexp.config.compose import compose, configuration
from quantexp.errors import ConfigError

WORDS = ["quant=linear_mxfp8", "training=fast", "quant.linear.block=16"]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files, in the order in which they are read."""
    names: list[str] = []
    monkeypatch.setattr(
        "quantexp.config.compose.cache_files", cache_files
    )  # without the files that other tests have read
    with configuration(None):
        pass  # Hydra finds its sources when it is first used
    files = SourcesRegistry.instance().resolve("file")
    load_config = files.load_config

    def load(source: ConfigSource, config_path: str) -> object:
        names.append(config_path)
        return load_config(source, config_path)

    monkeypatch.setattr(files, "load_config", load)
    return names


def test_second_composition_reads_only_what_is_new(read: list[str]) -> None:
    with configuration(None):
        hydra_compose("config", WORDS)
        assert sorted(set(read)) == sorted(read), "nothing twice"
        assert {"quant/linear_mxfp8", "training/fast"} <= set(read)
        read.clear()
        hydra_compose("config", ["quant=FA_mxfp8", "training=fast"])
    assert sorted(read) == ["quant/FA_mxfp8", "quant/linear/none", "quant/qk/mxfp8"]


def test_overrides_of_one_composition_are_not_in_the_next() -> None:
    with configuration(None):
        first = hydra_compose("config", ["quant=linear_mxfp8"])
        hydra_compose("config", WORDS)
        again = hydra_compose("config", ["quant=linear_mxfp8"])
    assert OmegaConf.to_container(first) == OmegaConf.to_container(again)
    assert again.quant.linear.block == 32


def test_loaded_file_equals_hydra_s_own() -> None:
    """Including types, flags and defaults lists, at every load."""
    with configuration(None):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        ours, hydras = loader.repository, ConfigRepository(loader.get_search_path())
        for name in ("config", "schema", "training/fast", "quant/FA_mxfp8", "hydra/config"):
            first, second, read = (r.load_config(name) for r in (ours, ours, hydras))
            assert first is not second
            assert first == second == read
            assert read is not None
            assert _types(first.config) == _types(second.config) == _types(read.config)
        assert ours.load_config("training/none_such") is None


def _types(node: Any) -> list[tuple[object, object]]:
    """OmegaConf's types of a node and of all nodes below it."""
    content = getattr(node, "_content", None)  # a missing section has none
    below = content.values() if isinstance(content, dict) else content
    below = [] if below is None or isinstance(below, str) else below
    return [(type(node), node._metadata), *(each for one in below for each in _types(one))]


def test_next_command_sees_a_changed_file(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    file = tmp_path / "training" / "own.yaml"
    for lr in (1e-3, 2e-3):
        file.write_text(f"name: own\nlr: {lr}\n")
        assert compose(["training=own"], tmp_path, {}).training.lr == lr


def test_same_name_in_another_search_path_is_another_file(tmp_path: Path) -> None:
    for folder, lr in (("one", 1e-3), ("two", 2e-3)):
        (tmp_path / folder / "training").mkdir(parents=True)
        (tmp_path / folder / "training" / "own.yaml").write_text(f"name: own\nlr: {lr}\n")
    with configuration(None):
        configs = [
            hydra_compose("config", [f"hydra.searchpath=[{tmp_path / folder}]", "training=own"])
            for folder in ("one", "two")
        ]
    assert [config.training.lr for config in configs] == [1e-3, 2e-3]


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_yaml(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 30 + "]" * 30, ", line 1: it must be nested at most 30 deep"),
        ("a: 1\nb: &b [*b]", ", line 2: *b contains itself"),
        ("a: &a {x: {y: *a}}", ", line 1: *a contains itself"),
        (
            "a: &a [" + "x," * 999 + "]\nb: [" + "*a," * 101 + "]",
            ", line 2: it must have at most 100,000 values, aliases counted as what they stand for, got 101,001",
        ),
        ("a: " + "9" * 301, ", line 1: a number must have at most 300 digits"),
        ("a: 010", ", line 1: 010 is the number 8 in YAML; write 8, or '010' for the text"),
        ("a: 0x1F", ", line 1: 0x1F is the number 31 in YAML; write 31, or '0x1F' for the text"),
        ("a: 16:00", ", line 1: 16:00 is the number 960 in YAML; write 960, or '16:00' for t"),
        ("a: [", " cannot be read: while parsing a flow node"),
        ("a: \0", " cannot be read: "),
    ],
)
def test_file_beyond_a_limit_is_refused_with_its_line(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert refusal(tmp_path / "own.yaml").startswith(words)


@pytest.mark.parametrize(
    "text",
    ["", "a: &a [1]\nb: *a\nc: *a", "a: '010'", "a: 1_000", "a: 1.5e3", "\ufeffa: 1", "a: '16:00'"],
)
def test_file_within_the_limits_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    check_yaml(tmp_path / "own.yaml")


def test_file_of_another_kind_or_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_bytes("a: é".encode("latin-1"))
    assert refusal(file) == " is not UTF-8; save it as UTF-8"
    file.write_bytes(b"#" * (LARGEST_FILE + 1))
    assert refusal(file) == " must have at most 1,000,000 bytes, got 1,000,001"
    file.unlink()
    os.mkfifo(file)
    assert refusal(file) == " must be a regular file"
