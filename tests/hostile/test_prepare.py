"""Attacks on `quantexp prepare`: damaged input of every form, hostile records, kills."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from quantexp.data.prepared import read_card
from quantexp.errors import DataError
from tests.data.prepare.made import content_of, lines, prepared, rows, texts, write_forms

ROOT = Path(__file__).parents[2]
#: Fields, and texts, that no honest record has.
VALUES = (
    *("null", "true", "-1", "1e999", "NaN", "[]", "{}", "[" * 900 + "]" * 900, "[" * 50_000, "9" * 5000, '"\\ud800"'),
    *('{"a":' * 900 + "1" + "}" * 900, '"\\u0000"', '"\x1b[2J"', '""', '" "', '"[bold]"', '"' + "x" * 100_000 + '"'),
)  # fmt: skip


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Flips, cuts, doubles or fills some bytes."""
    result = bytearray(content)
    begin, end = sorted(chance.choices(range(len(content)), k=2))
    match chance.randrange(5):
        case 0:
            result[begin] ^= 1 << chance.randrange(8)
        case 1:
            del result[begin:]
        case 2:
            result[begin:begin] = content[begin:end]
        case 3:
            result[begin : begin + 20] = bytes(len(result[begin : begin + 20]))
        case 4:
            result[begin : begin + 4] = chance.randbytes(4)
    return bytes(result)


def test_a_damaged_file_is_refused_by_name_or_prepared_and_leaves_nothing_behind(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    forms = list(write_forms(tmp_path / "raw", texts(60)).values())
    for number, chance in enumerate(cases):
        path = chance.choice(forms)
        content = path.read_bytes()
        prefix = tmp_path / f"own{number}" / "x"
        path.write_bytes(damaged(content, chance))
        message = ""
        try:
            card = prepared(path, prefix, max_rejected=1000).card
        except DataError as error:
            card, message = None, str(error)
        assert card == read_card(prefix)
        if card is None:
            assert path.name in message or "the input holds no document" in message
            assert "\n" not in message
        path.write_bytes(content)
        again = prepared(path, prefix, force=True).prefix
        whole = prepared(path, tmp_path / "whole" / path.name / "x", force=True).prefix
        assert content_of(again)[".bin"] == content_of(whole)[".bin"]


def test_hostile_records_are_rejected_by_line_and_the_others_are_read(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    for number, chance in enumerate(cases):
        good = lines(rows(texts(5, seed=number))).decode().splitlines()
        fields = {
            key: chance.choice(VALUES)
            for key in chance.sample(["id", "text", "source", "metadata", "title"], 3)
        }
        hostile = "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items()) + "}"
        place = chance.randrange(6)
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join([*good[:place], hostile, *good[place:]]), errors="surrogatepass")
        card = prepared(path, tmp_path / str(number) / "x", split="1").card
        report = card.report
        num_hostile = report["num_rejected"] + sum(report["left_out"].values())
        assert sum(card.num_documents) + num_hostile == 6
        assert num_hostile <= 1
        if report["num_rejected"]:
            (row,) = map(
                json.loads, (tmp_path / str(number) / "x.rejected.jsonl").read_text().splitlines()
            )
            assert row["line"] == place + 1


#: Prepares in shards of some records; a limit of the size of files stands for a full disk.
PREPARE = """
import resource, sys
from pathlib import Path
from quantexp.data.prepare import shards
from quantexp.errors import DataError
from tests.data.prepare.made import prepared
source, prefix, limit = sys.argv[1:]
shards.SHARD_BYTES, shards.SHARD_ROWS = 700, 7
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
print("ready", flush=True)
try:
    prepared(Path(source), Path(prefix), deduplicate=True, max_rejected=5)
except DataError as error:
    sys.exit(str(error))
"""


def prepare_apart(source: Path, prefix: Path, limit: int = 0) -> subprocess.Popen[str]:
    """Starts a preparation in a process of its own, and waits until it begins."""
    words = [sys.executable, "-c", PREPARE, str(source), str(prefix), str(limit)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def few(request: pytest.FixtureRequest, cases: Iterator[random.Random]) -> Iterator[random.Random]:
    """Cases of some seconds each: five by default."""
    return islice(cases, request.config.getoption("count") or 5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "a.jsonl"
    path.write_bytes(b"{\n" + lines(rows([*texts(300), *texts(50)])))
    return path


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """The files of a preparation that nothing disturbs."""
    process = prepare_apart(source, source.parent / "whole" / "x")
    assert process.communicate() == ("", "")
    return content_of(source.parent / "whole" / "x")


@pytest.mark.slow
def test_a_preparation_killed_at_any_moment_ends_with_the_bytes_of_one_that_was_not(
    tmp_path: Path, source: Path, whole: dict[str, bytes], few: Iterator[random.Random]
) -> None:
    for number, chance in enumerate(few):
        prefix = tmp_path / str(number) / "x"
        for _ in range(chance.randint(1, 3)):
            process = prepare_apart(source, prefix)
            time.sleep(chance.random() * chance.choice((0.1, 0.5, 1.5)))
            process.kill()
            process.communicate()
            if read_card(prefix) is not None:
                assert {name: content_of(prefix)[name] for name in whole} == whole
        process = prepare_apart(source, prefix)
        assert process.communicate() == ("", "")
        assert content_of(prefix) == whole


@pytest.mark.slow
def test_a_preparation_on_a_full_disk_names_the_file_and_ends_with_the_same_bytes_later(
    tmp_path: Path, source: Path, whole: dict[str, bytes], few: Iterator[random.Random]
) -> None:
    for number, chance in enumerate(few):
        prefix = tmp_path / str(number) / "x"
        limit = chance.randint(1, max(map(len, whole.values())))
        process = prepare_apart(source, prefix, limit)
        _, message = process.communicate()
        if process.returncode:
            assert message.startswith(f"cannot write {prefix}")
            assert "File too large; free space" in message
            assert len(message.splitlines()) == 1
            assert read_card(prefix) is None
        process = prepare_apart(source, prefix)
        assert process.communicate() == ("", "")
        assert content_of(prefix) == whole
