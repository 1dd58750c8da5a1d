"""Who may read the page: this machine, with the token, from the page itself; and nothing is written or looked up."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quantexp.errors import RunError
from quantexp.extras.forensics.watch.folder import FolderWatch
from quantexp.extras.forensics.watch.server import (
    Address,
    PageServer,
    keep_address,
    kept_address,
    page,
)
from tests.analysis.compare.runs import Runs
from tests.analysis.report.captured import captured

TOKEN = "t" * 32
NEEDS_TOKEN = (403, b"the address needs the token that quantexp watch printed\n")


@pytest.fixture
def bugs() -> list[Exception]:
    """What was reported as a bug."""
    return []


@pytest.fixture
def server(
    runs: Runs, watched: Callable[[], FolderWatch], bugs: list[Exception]
) -> Iterator[PageServer]:
    """A server of two runs, of which one has captures."""
    runs.add()
    captured(runs.add("linear_mxfp8"), iterations=(1, 2))
    watch = watched()
    watch.refresh()
    started = PageServer(0, TOKEN, watch, page("the <runs>"), bugs.append)
    thread = threading.Thread(target=started.serve)
    thread.start()
    yield started
    started.end()
    thread.join(120)
    started.close()


def ask(
    server: PageServer, path: str, method: str = "GET", content: bytes | None = None, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """The status, content and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, named)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def json_at(server: PageServer, path: str) -> Any:
    status, content, _ = ask(server, f"/{TOKEN}/{path}")
    assert status == 200
    return json.loads(content)


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server._socket.getsockname()[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.port}/{TOKEN}/"


def test_the_page_lets_no_other_script_and_no_other_origin_in(server: PageServer) -> None:
    status, content, headers = ask(server, f"/{TOKEN}/")
    assert status == 200
    assert b"<h1>the &lt;runs&gt;</h1>" in content
    assert b"{{" not in content
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'; frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert "Access-Control-Allow-Origin" not in headers
    outside = [word for word in content.decode().split('"') if word.startswith(("http:", "https:"))]
    assert outside == ["http://www.w3.org/2000/svg"], "the name of a namespace"


def test_its_parts_are_sent(server: PageServer) -> None:
    state = json_at(server, "state?since=0")
    labels = [row["label"] for row in state["content"]["runs"]]
    assert labels == ["bf16", "linear_mxfp8"]
    key = state["content"]["runs"][1]["key"]
    assert json_at(server, f"captured?run={key}")["iterations"] == [1, 2]
    assert json_at(server, f"numerics?run={key}&iteration=2")["numerics"]["iterations"] == [2]
    unchanged = json_at(server, f"state?server={state['server']}&since={state['version']}")
    assert unchanged == {"server": state["server"], "version": state["version"], "series": {}}


@pytest.mark.parametrize(
    "path",
    ["/", "", "/state", "/x/", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", f"/{TOKEN.upper()}/", f"/../{TOKEN}/",
     f"/?{TOKEN}", "/%74" + TOKEN[1:] + "/", f"http://127.0.0.1/x/{TOKEN}/"],
)  # fmt: skip
def test_without_the_token_nothing_is_told(server: PageServer, path: str) -> None:
    assert ask(server, path)[:2] == NEEDS_TOKEN


@pytest.mark.parametrize(
    "host",
    ["example.com", "127.0.0.1.example.com", "example.com:80", "localhost.example.com", "127.0.0.2", "0.0.0.0",
     "127.0.0.1:80@example.com", "", "localhost:x", "192.168.0.1:8000"],
)  # fmt: skip
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    status, content, _ = ask(server, f"/{TOKEN}/state", Host=host)
    assert (status, content) == (403, b"the host must be 127.0.0.1 or localhost\n")


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST:65535", "[::1]:8000"])
def test_a_tunnel_may_change_the_port(server: PageServer, host: str) -> None:
    assert ask(server, f"/{TOKEN}/state", Host=host)[0] == 200
    assert ask(server, f"/{TOKEN}/state", Host=host, Origin=f"http://{host.lower()}")[0] == 200


@pytest.mark.parametrize(
    "origin",
    ["http://example.com", "null", "https://127.0.0.1:8000", "http://127.0.0.1:8001", "http://localhost:8000", ""],
)  # fmt: skip
def test_another_origin_is_refused(server: PageServer, origin: str) -> None:
    status, content, _ = ask(server, f"/{TOKEN}/state", Host="127.0.0.1:8000", Origin=origin)
    assert (status, content) == (403, b"another origin may not read this page\n")


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT"]
)
def test_the_page_is_read_only(server: PageServer, method: str) -> None:
    status, content, headers = ask(
        server, f"/{TOKEN}/state", method, b"{}" if method == "POST" else None
    )
    assert (status, headers["Allow"]) == (405, "GET")
    assert content == (b"" if method == "HEAD" else b"the page is read only: GET alone\n")


def test_another_word_is_no_method(server: PageServer) -> None:
    status, content, headers = ask(server, f"/{TOKEN}/", "PROPFIND")
    assert (status, content) == (501, b"Not Implemented\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


def test_a_request_with_content_is_refused_and_what_it_holds_is_no_request(
    server: PageServer,
) -> None:
    smuggled = f"GET /{TOKEN}/state HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    status, content, headers = ask(server, f"/{TOKEN}/", content=smuggled)
    assert (status, content) == (400, b"a request has no content\n")
    assert headers["Connection"] == "close"


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..%2f..%2fetc/passwd", "status.json", "page.html", "state/", "./", "runs", "//", "%00"],
)  # fmt: skip
def test_no_path_reaches_the_disk(server: PageServer, name: str) -> None:
    status, content, _ = ask(server, f"/{TOKEN}/{name}")
    assert (status, content) == (404, b"there is no such part of the page\n")


@pytest.mark.parametrize("run", ["..", "../x", "/etc", "%2e%2e", "", "a" * 12, "runs/x"])
@pytest.mark.parametrize("part", ["captured", "numerics"])
def test_a_run_is_named_by_its_key_alone(server: PageServer, part: str, run: str) -> None:
    status, content, _ = ask(server, f"/{TOKEN}/{part}?run={run}&iteration=1")
    assert (status, content) == (404, b"there is no such run\n")


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "1" * 16, "%C2%B2", "1e3"])
def test_a_number_must_be_one(server: PageServer, number: str) -> None:
    status, content, _ = ask(server, f"/{TOKEN}/state?since={number}")
    assert (status, content) == (400, b"since must be a whole number\n")


@pytest.mark.parametrize(
    ("request_line", "words"),
    [
        (b"<script>", b"Bad Request"),
        (b"GET /\xc3\xbc/ HTTP/1.1\r\nHost: localhost", b"the address needs the token"),
        (b"GET /\xff\x00/ HTTP/1.1\r\nHost: localhost", b"the address needs the token"),
        (b"GET / HTTP/9.9", b"HTTP Version Not Supported"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1", b"Request Header Fields Too Large"),
    ],
)
def test_what_is_no_request_is_refused(
    server: PageServer, request_line: bytes, words: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request_line + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            answer = stream.read()
    assert words in answer
    assert b"<script>" not in answer


def test_long_answers_are_compressed(server: PageServer) -> None:
    status, content, headers = ask(server, f"/{TOKEN}/", Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert gzip.decompress(content) == server.page.html


def test_captures_that_cannot_be_read_are_named(server: PageServer) -> None:
    (one,) = [one for one in server.watch._shown.values() if "mxfp8" in one.run.root.name]
    (one.run.tensors / "manifest.jsonl").unlink()
    (one.run.tensors / "manifest.jsonl").mkdir()
    words = json_at(server, f"captured?run={one.key}")["error"]
    assert words.endswith("manifest.jsonl must be a file, and is a folder")


def test_a_bug_is_reported_and_the_server_goes_on(
    server: PageServer, bugs: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = TypeError("a bug")

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FolderWatch, "captured", fail)
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server, f"/{TOKEN}/captured?run=x")
    assert bugs == [error]
    assert ask(server, f"/{TOKEN}/")[0] == 200


def test_a_port_that_is_in_use_is_named(server: PageServer, tmp_path: Path) -> None:
    words = (
        f"port {server.port} of this machine cannot be used: Address already in use; give another with --port, "
        "or none for a free one"
    )
    with pytest.raises(RunError, match=f"^{words}$"):
        PageServer(server.port, TOKEN, server.watch, server.page, print)


def test_the_address_is_what_curl_would_ask_for(server: PageServer) -> None:
    assert ask(server, urlsplit(server.address).path)[0] == 200


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
