"""The token and the port of a page are kept for its user alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.extras.forensics.watch.address import Address, keep_address, kept_address


def kept_file(cache: Path) -> Path:
    (file,) = (cache / "watch").iterdir()
    return file


def test_an_address_is_kept_and_readable_by_its_user_alone(tmp_path: Path) -> None:
    first = kept_address(tmp_path, "/runs")
    assert first.port == 0
    assert len(first.token) == 32
    keep_address(tmp_path, "/runs", Address(first.token, 8123))
    assert kept_address(tmp_path, "/runs") == Address(first.token, 8123)
    assert stat.S_IMODE(kept_file(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "watch").stat().st_mode) == 0o700


def test_every_folder_has_a_token_of_its_own(tmp_path: Path) -> None:
    tokens = {kept_address(tmp_path, name).token for name in ("/a", "/b", "/a", "/b")}
    assert len(tokens) == 4, "nothing was kept"
    keep_address(tmp_path, "/a", Address("a" * 32, 1))
    keep_address(tmp_path, "/b", Address("b" * 32, 2))
    assert kept_address(tmp_path, "/a").token == "a" * 32
    assert kept_address(tmp_path, "/b").token == "b" * 32


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"token": "short", "port": 80}', json.dumps({"token": "a/" * 16, "port": 80}),
     json.dumps({"token": "a" * 32, "port": 0}), json.dumps({"token": "a" * 32, "port": 99999})],
)  # fmt: skip
def test_what_is_no_address_is_replaced(tmp_path: Path, content: str) -> None:
    keep_address(tmp_path, "/runs", Address("a" * 32, 8123))
    kept_file(tmp_path).write_text(content)
    address = kept_address(tmp_path, "/runs")
    assert address.port == 0
    assert address.token != "a" * 32


def test_an_address_that_others_can_read_is_replaced(tmp_path: Path) -> None:
    keep_address(tmp_path, "/runs", Address("a" * 32, 8123))
    kept_file(tmp_path).chmod(0o640)
    assert kept_address(tmp_path, "/runs").token != "a" * 32


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    keep_address(tmp_path, "/runs", Address("a" * 32, 8123))
    file = kept_file(tmp_path)
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    assert kept_address(tmp_path, "/runs").token != "a" * 32


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "watch").write_text("")
    words = f"^the page's address cannot be kept in {tmp_path}/watch: .*; set XDG_CACHE_HOME to a folder that can be "
    with pytest.raises(RunError, match=words):
        keep_address(tmp_path, "/runs", Address("a" * 32, 8123))
    assert os.umask(0o022) == 0o022, "the umask is as it was"
