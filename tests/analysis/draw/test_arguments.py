from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantexp.analysis.draw.arguments import Request, numbers, request_of, words_of
from quantexp.cli.arguments import parser_of
from quantexp.errors import ConfigError


def parsed(*words: str) -> Request:
    return request_of(parser_of("draw").parse_intermixed_args(list(words)))


def test_flags_and_words_are_equivalent() -> None:
    flags = parsed("a", "--layer", "0-3", "--tensor", "grad_*", "--out", "draw")
    words = parsed("a", "layer=0-3", "tensor=grad_*", "out=draw")
    assert flags == words
    assert flags.filters == {"layer": "0-3", "tensor": "grad_*"}
    assert flags.out == Path("draw")


@pytest.mark.parametrize(
    "words",
    [
        ["a"],
        ["a", "b", "--layer", "0-3", "tensor=grad_*", "--out", "draw", "--force", "--jobs", "3"],
        ["a", "--only", "heatmaps,statistics", "--formats", "SVG,png"],
    ],
)
def test_the_words_of_a_request_are_that_request(words: list[str]) -> None:
    request = parsed(*words)
    assert parsed(*words_of(request)) == request


def test_several_folders_with_options_are_one_request() -> None:
    request = parsed("a", "b", "--only", "heatmaps,statistics", "--formats", "SVG", "--jobs", "3")
    assert request.folders == ["a", "b"]
    assert request.only == ("heatmaps", "statistics")
    assert (request.formats, request.jobs, request.force) == (("svg",), 3, False)
    assert parsed("a").formats == ("png",), "PDF is on request"


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    assert parsed("lr=0.1").folders == ["lr=0.1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=x"], "draw takes a DIR"),
        (["a", "colour=red"], "colour must be one of layer, rank, .*, got colour=red"),
        (["a", "layer=1", "--layer", "2"], "layer is given twice: 2 and 1"),
        (["a", "layer=one"], "layer must be numbers and ranges such as 0,4-7, got 'one'"),
        (["a", "layer=7-4"], "layer must be numbers and ranges"),
        (["a", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["a", "--formats", "jpg"], "--formats must be of png, pdf, svg, got 'jpg'"),
        (["a", "--formats", ""], "--formats must be of png, pdf, svg, got ''"),
    ],
)
def test_misuse_is_refused_with_the_allowed_values(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(*words)


def test_numbers_take_lists_and_ranges_with_their_ends() -> None:
    assert [list(one) for one in numbers("layer", "0, 4-6,9:9")] == [[0], [4, 5, 6], [9]]


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom quantexp.cli.main import main\n"
        "try: main(['draw', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0
    assert "--iteration" in process.stdout
