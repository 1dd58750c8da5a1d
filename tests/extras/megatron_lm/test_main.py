"""`python -m quantexp.megatron_lm` takes its own words out, and adds the spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.errors import ConfigError
from quantexp.extras.megatron_lm.script import main, parsed


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "pretrain_gpt.py"
    file.write_text("import os, sys\nprint(sys.argv[1:], os.environ['QUANTEXP_QUANT'])\n")
    return str(file)


def test_own_words_become_variables(script: str) -> None:
    words = ["--lr", "1", "--quantexp-quant", "mxfp8", "--quantexp-dir=runs/a", "--bf16"]
    path, arguments, variables = parsed([script, *words])
    assert path == Path(script)
    assert arguments == ["--lr", "1", "--bf16", "--spec", "quantexp.megatron_lm", "SPEC"]
    assert variables == {"QUANTEXP_QUANT": "mxfp8", "QUANTEXP_DIR": "runs/a"}


def test_the_spec_is_added_once(script: str) -> None:
    words = ["--spec", "quantexp.megatron_lm", "SPEC"]
    assert parsed([script, *words])[1] == words


def test_the_script_runs_with_the_rest(
    script: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["x"])
    monkeypatch.setattr("sys.path", ["x"])
    monkeypatch.setenv("QUANTEXP_QUANT", "")
    main([script, "--lr", "1", "--quantexp-quant", "FA_mxfp8"])
    assert capfd.readouterr().out == (
        "['--lr', '1', '--spec', 'quantexp.megatron_lm', 'SPEC'] FA_mxfp8\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantexp-quantt", "x"], "--quantexp-quantt is unknown; there are --quantexp-quant, "),
        (["--quantexp-quant", "--bf16"], "--quantexp-quant needs a value"),
        (["--quantexp-quant"], "--quantexp-quant needs a value"),
        (["--use-legacy-models"], "--use-legacy-models builds layers that no --spec describes"),
        (["--spec", "mine", "SPEC"], "--spec names other layers than quantexp's; drop it"),
    ],
)
def test_wrong_words_are_refused(script: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed([script, *words])


def test_the_first_word_is_the_script() -> None:
    with pytest.raises(SystemExit, match=r"quantexp: the first word must be .* got --bf16"):
        main(["--bf16"])
    with pytest.raises(SystemExit, match="got nothing"):
        main([])
