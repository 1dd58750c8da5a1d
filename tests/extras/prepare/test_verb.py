from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from quantexp.cli.main import main
from quantexp.data.binary import pair_paths
from quantexp.data.prepare import make, run
from quantexp.data.prepare.inputs import inputs_hash
from quantexp.data.prepare.job import make_job
from quantexp.data.prepared import read_card
from quantexp.errors import DataError
from quantexp.folders import quoted
from tests.data.prepare.made import config, content_of, dump, lines, prepared, rows, texts

Captured = pytest.CaptureFixture[str]


def words(source: Path, *more: str) -> list[str]:
    return ["prepare", "dataset=dolma", f"dataset.source={source}", "dataset.tokenizer=byte", *more]


def test_the_command_prepares_reports_and_prints_how_to_train(
    in_tmp: Path, capsys: Captured
) -> None:
    (in_tmp / "a.jsonl").write_bytes(lines([*rows(texts(60)), *rows(texts(9), "books")]) + b"no")
    assert main(words(in_tmp / "a.jsonl", "dataset.split='8,1,1'")) == 0
    text = capsys.readouterr().out
    for row in (
        r"train ",
        "validation ",
        "test ",
        "rejected",
        "books ",
        "tokens up to",
    ):
        assert row in text
    prefix = in_tmp / "data" / "dolma"
    last = f"rejected  1 of 70 records could not be read: {prefix}.rejected.jsonl"
    assert text.splitlines()[-1] == last
    assert f"train quantexp dataset=dolma dataset.path={prefix} ..." in text
    assert main(words(in_tmp / "a.jsonl", "dataset.split='8,1,1'")) == 0
    assert "prepared before, from the same input in the same way:" in capsys.readouterr().out
    assert main([*words(in_tmp / "a.jsonl", "dataset.split='8,1,1'"), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == last
    content = json.loads(printed.out)
    card = read_card(prefix)
    assert card is not None
    assert content["documents"] == dict(
        zip(("train", "validation", "test"), card.num_documents, strict=True)
    )
    assert content["num_rejected"] == 1
    assert content["bytes"] == sum(path.stat().st_size for path in pair_paths(prefix))


def test_the_command_to_train_works_as_it_is_printed(in_tmp: Path, capsys: Captured) -> None:
    source = in_tmp / "a.jsonl"
    source.write_bytes(lines(rows(texts(60))))
    prefix = in_tmp / "it's, [mine]" / "x y"
    assert main(words(source, f"dataset.path={quoted(str(prefix))}")) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(printed)[-2] == f"dataset.path={quoted(str(prefix))}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "quantexp: dataset=wikipedia has no raw text: give dataset.source=, a file, a folder"),
        (["dataset.source=none"], "quantexp: dataset.source=none: no such file"),
        (
            ["dataset.source=[1]"],
            "quantexp: dataset.source must be the raw text to prepare: a file",
        ),
        (
            ["dataset.source=x", "dataset.blend={a: 1}"],
            "quantexp: dataset.blend is for training; prep",
        ),
    ],
)
def test_a_users_error_is_one_line_and_1(
    in_tmp: Path, capsys: Captured, arguments: list[str], message: str
) -> None:
    assert main(["prepare", "dataset.tokenizer=byte", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert list(in_tmp.iterdir()) == []


def test_an_interrupted_preparation_resumes(
    in_tmp: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    (in_tmp / "a.jsonl").write_bytes(lines(rows(texts(60))))
    with monkeypatch.context() as patched:
        patched.setattr(make, "make_output", interrupted)
        assert main(words(in_tmp / "a.jsonl")) == 130
    error = capsys.readouterr().err
    assert error.startswith("progress is saved: the same command resumes there\n")
    assert error.endswith("quantexp: interrupted\n")
    assert main(words(in_tmp / "a.jsonl")) == 0


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_killed_at_any_moment_it_resumes_and_no_worker_stays(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A real process with workers, killed without warning while it writes, or interrupted with them by Ctrl-C."""
    (tmp_path / "a.xml").write_bytes(dump(texts(1500, most=200)))
    whole = prepared(tmp_path / "a.xml", tmp_path / "whole" / "x").prefix
    program = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        # A shell ignores it in what it starts with &, and so do the children of that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from quantexp.data.prepare import make, shards\n"
        "from tests.data.prepare.made import prepared\n"
        "made = make.make_output\n"
        "def made_first(*arguments):  # in the workers, too: those after the first wait for the signal\n"
        "    while len(sys.argv) < 4 and list(Path(sys.argv[2] + '.partial').glob('*/*.npz')):\n"
        "        time.sleep(0.1)\n"
        "    return made(*arguments)\n"
        "make.make_output = made_first\n"
        "if __name__ == '__main__':\n"
        "    shards.SHARD_BYTES = 20_000\n"
        "    prepared(sys.argv[1], Path(sys.argv[2]), num_workers=2)\n"
    )
    (tmp_path / "run.py").write_text(program)
    prefix = tmp_path / "own" / "x"
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "a.xml"), str(prefix)]
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    partial = Path(f"{prefix}.partial")
    while not list(partial.glob("*/*.npz")) and process.poll() is None:
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    _, error = process.communicate()
    assert error.count("Traceback") == (number == signal.SIGINT)  # the program's, not its workers'
    assert ("\nKeyboardInterrupt\n" in error) == (number == signal.SIGINT)
    assert list(partial.glob("*/*.npz")), "it ended before it could be killed"
    assert not any(path.exists() for path in pair_paths(prefix))
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert alive == []
    subprocess.run([*command, "all"], env=environment, check=True)
    own, expected = content_of(prefix), content_of(whole)
    assert own == expected


def test_a_worker_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(3))))

    monkeypatch.setattr(make, "_initialise", _die)
    with pytest.raises(
        DataError, match=r"a process that tokenises died .*it resumes where it stopped"
    ):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", num_workers=2)


def _die(*arguments: object) -> None:
    os._exit(9)


def test_progress_without_a_terminal_is_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "INTERVAL_S", 0.0)
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(50))))
    out = StringIO()
    job = make_job(config(tmp_path / "a.jsonl", tmp_path / "own"))
    run.prepare(job, Console(file=out, width=200))
    assert out.getvalue().startswith("preparing: 100%, 50 documents, ")
    for word in (" tokens/s, ", "B/s", ", 0 min left\n"):
        assert word in out.getvalue()


def test_progress_on_a_terminal_shows_rate_and_time_left(tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, width=150, force_terminal=True)
    with make.progress(1000, console) as report:
        report(500, 500, 7, 4321)
        time.sleep(0.2)
    output = out.getvalue()
    for word in ("preparing", "50%", "7 documents", "tokens/s", "/s"):
        assert word in output


def test_rewritten_file_is_another_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(3))))
    first = inputs_hash(make_job(config(tmp_path, tmp_path / "x")).inputs)
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert inputs_hash(make_job(config(tmp_path, tmp_path / "x")).inputs) != first


@pytest.mark.slow
def test_a_hundred_megabytes_are_prepared_in_less_than_a_gigabyte(tmp_path: Path) -> None:
    """The memory of all processes together, including the sorted hashes of every document for deduplication."""
    block = lines(rows(texts(20_000, most=400)))
    with (tmp_path / "a.jsonl").open("wb") as stream:
        while stream.tell() < 100_000_000:
            stream.write(block)
    command = [
        *(sys.executable, "-m", "quantexp"),
        *words(tmp_path / "a.jsonl", f"dataset.path={tmp_path}/x", "dataset.prepare.num_workers=2"),
        "dataset.prepare.deduplicate=true",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        own = psutil.Process(process.pid)
        total = 0
        for one in (own, *own.children(recursive=True)):
            try:
                total += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        most = max(most, total)
        time.sleep(0.05)
    assert process.returncode == 0
    print(f"\n{most / 1e6:.0f} MB")  # noqa: T201
    assert 50e6 < most < 1e9
    card = read_card(tmp_path / "x")
    assert card is not None
    assert sum(card.num_documents) == 20_000
