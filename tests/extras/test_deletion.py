"""Without the folder of an extra everything else works, and its verbs say that they are not installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from quantexp import __version__, extra
from quantexp.cli import verbs
from quantexp.errors import ConfigError
from quantexp.extra import GROUP, Extra, Verb, extras
from tests.conftest import TINY

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(path.parent.name for path in (ROOT / "quantexp/extras").glob("*/__init__.py"))
#: What users train first.
MAIN_JOB = ["model=llama32-1b", "dataset=wikipedia", "quant=FA_linear_mxfp8", "training=fast"]
#: Overrides that only the extra can serve.
ASKED = {
    "bisect": ["gradient.only=true", "training.stop_after=1"],
    "evaluate": ["evaluate.only=true", "training.start_from=runs/bf16@1"],
    "forensics": ["capture.ring=4"],
    "transformer_engine": ["quant.backend=transformer_engine"],
}
_COMMANDS = """\
import contextlib, io, json, sys
from quantexp.cli.main import main
from quantexp.extra import extras
results = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps({"results": results, "extras": list(extras())}))
"""


def entry_points() -> dict[str, dict[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"console_scripts": project["scripts"], **project["entry-points"]}


def copied(folder: Path) -> None:
    """Copy the package, its launchers and its configuration, laid out as a wheel is."""
    sources = {"quantexp": "quantexp", "conf": "quantexp/conf"}
    launchers = ("quantexp_launchers", "hydra_plugins")
    sources |= {f"launchers/{name}": name for name in launchers}
    for source, target in sources.items():
        shutil.copytree(
            ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__")
        )


def write_metadata(folder: Path, points: dict[str, dict[str, str]]) -> None:
    metadata = folder / f"quantexp-{__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: quantexp\nVersion: {__version__}\n"
    )
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in named.items())])
        for group, named in points.items()
    )
    (metadata / "entry_points.txt").write_text("\n\n".join(groups))


def commands(folder: Path, *words: list[str]) -> dict[str, Any]:
    """Run commands of a copy in one fresh process: the code, output and messages of each, and the extras."""
    result: dict[str, Any] = json.loads(output(folder, "-c", _COMMANDS, json.dumps(words)))
    return result


def output(folder: Path, *words: str) -> str:
    """What Python prints with a copy on its path, in an empty folder."""
    empty = folder.with_name("empty")
    empty.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    process = subprocess.run(
        [sys.executable, *words],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_every_extra_of_this_project_is_installed() -> None:
    assert sorted(entry_points()[GROUP]) == EXTRAS
    assert [*extras()] == EXTRAS


#: The entry points of an environment may be older than its source: once, that of the removed folder stays.
CASES = [(EXTRAS[0], True), *((name, False) for name in EXTRAS)]


@pytest.mark.parametrize(("name", "has_entry"), CASES)
def test_without_its_folder_everything_else_works(
    name: str, has_entry: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    copied(folder)
    shutil.rmtree(folder / "quantexp/extras" / name)
    points = entry_points()
    if not has_entry:
        del points[GROUP][name]
    write_metadata(folder, points)
    verbs = [*extras()[name].verbs]
    others = [verb for extra in extras().values() for verb in extra.verbs if verb not in verbs]
    plan = ["plan", "--json", *MAIN_JOB]
    asked = [["plan", *MAIN_JOB, *words] for words in [ASKED.get(name)] if words]
    verbs_alone = [[verb, "RUN"] for verb in verbs]
    result = commands(folder, ["--help"], ["list"], plan, *verbs_alone, *asked)
    assert result["extras"] == [other for other in EXTRAS if other != name]
    shown, listed, planned, *refused = result["results"]
    for code, _, errors in (shown, listed, planned):
        assert (code, errors) == (0, "")
    assert all(f"\n  {verb} " in shown[1] for verb in others)
    assert "FA_linear_mxfp8" in listed[1]
    assert len(json.loads(planned[1])["precision_map"]) > 0
    messages = [f"{verb} is not installed: " for verb in verbs]
    messages += [f"{words[len(MAIN_JOB) + 1]} needs the extra {name}, " for words in asked]
    for message, (code, out, errors) in zip(messages, refused, strict=True):
        assert (code, out) == (1, "")
        assert errors.startswith(f"quantexp: {message}")
        assert errors.count("\n") == 1
    assert not any(f"\n  {verb} " in shown[1] for verb in verbs)


@pytest.mark.slow
def test_a_run_trains_is_proved_captures_and_is_reported_without_any_extra(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    copied(folder)
    for name in EXTRAS:
        shutil.rmtree(folder / "quantexp/extras" / name)
    write_metadata(folder, {**entry_points(), GROUP: {}})
    shown = output(folder, "-m", "quantexp", *TINY, "quant=FA_linear_mxfp8", "capture=tensors")
    (run,) = (tmp_path / "empty/runs").glob("*/status.json")
    assert json.loads(run.read_text())["state"] == "completed", shown
    precision = json.loads((run.parent / "precision.json").read_text())
    assert {entry["status"] for entry in precision["entries"]} == {"engaged"}
    assert (run.parent / "tensors/manifest.jsonl").is_file()
    output(folder, "-m", "quantexp", "report", str(run.parent))
    assert (run.parent / "report.html").is_file()


class _Point:
    """An entry point of another package."""

    def __init__(self, name: str, value: str, extra: Extra | None = None) -> None:
        self.name, self.value, self.module, self.extra = name, value, value.partition(":")[0], extra

    def load(self) -> Extra | None:
        return self.extra


@pytest.mark.parametrize(
    ("points", "message"),
    [
        # Its `native watch` would prove whatever its `native spec` computes.
        (
            [_Point("transformer_engine", "other.package:EXTRA")],
            "registers other.package:EXTRA as the extra transformer_engine, which is "
            "quantexp.extras.transformer_engine:EXTRA",
        ),
        (
            [_Point("mine", "one:EXTRA"), _Point("mine", "two:EXTRA")],
            "registers two:EXTRA as the extra mine, which is one:EXTRA",
        ),
        (
            [_Point("mine", "one:EXTRA", Extra({"compare": Verb("", "", ())}))],
            "the extra mine has the verb compare, which there is already",
        ),
        (
            [_Point(name, f"{name}:EXTRA", Extra({"look": Verb("", "", ())})) for name in "ab"],
            "the extra b has the verb look, which there is already",
        ),
    ],
)
def test_no_package_takes_the_place_of_an_extra_or_a_verb(
    points: list[_Point], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)
    for module, name in ((extra, "_points"), (extra, "extra_named"), (verbs, "all_verbs")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    with pytest.raises(ConfigError, match=re.escape(message)):
        verbs.all_verbs()
