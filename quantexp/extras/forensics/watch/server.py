"""Serves the page to this machine alone.

    GET /TOKEN/                                      the page
    GET /TOKEN/state?server=ID&since=VERSION         what has changed
    GET /TOKEN/captured?run=KEY                      the captured iterations of a run
    GET /TOKEN/numerics?run=KEY&iteration=N          the numerics of one of them

It listens on 127.0.0.1. A request needs the token; a Host of this machine, at any port because a tunnel changes it,
so that no name that an attacker points here (DNS rebinding) is one; and no Origin but its own. Nothing of a request
is ever part of a path: runs are found by their keys. Any other request is refused without a word about the folder.

The token and the port of a watched folder are kept, so that a page goes on after a restart of its server. They are in a
file of the user's cache that only the user can read; a file that others can read, or that is another user's, is not
trusted and replaced. The page is one document with its style and script, which loads nothing but the server's answers.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import html
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import orjson

from quantexp.analysis.report.parts import page_text, policy
from quantexp.errors import QuantexpError, RunError, UnreadableError
from quantexp.extras.forensics.watch.connections import HOST, MOST_BYTES, Connections
from quantexp.extras.forensics.watch.folder import FolderWatch
from quantexp.reading.json_files import read_json
from quantexp.runs.status import write_json

#: Bytes from which an answer is compressed.
_LARGE = 2_000
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)


#: Takes an error that is a bug.
Report = Callable[[Exception], object]


class _RefusedError(Exception):
    """A request that is not answered."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class PageServer(Connections):
    """The server of one page."""

    def __init__(
        self, port: int, token: str, watch: FolderWatch, page: Page, report: Report
    ) -> None:
        """Listen on `port`, or on any free one for 0; `report` takes the errors that are bugs.

        Raises:
            RunError: the port is in use, or may not be used.
        """
        try:
            super().__init__(port)
        except OSError as error:
            raise RunError(
                f"port {port} of this machine cannot be used: {os.strerror(error.errno or 0)}; give another with "
                "--port, or none for a free one"
            ) from error
        self.token, self.watch, self.page, self.report = token, watch, page, report

    @property
    def address(self) -> str:
        """The page's address on this machine."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def answer(self, request: bytes) -> tuple[bytes, bool]:
        """The answer to a request, and whether its connection goes on; a bug is reported, and ends the connection."""
        try:
            handler = _Handler(request, (HOST, 0), self)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001  (the server goes on)
            self.report(error)
            return b"", False
        return handler.wfile.getvalue(), not handler.close_connection


class _Handler(BaseHTTPRequestHandler):
    """One request, read and answered in memory."""

    request: bytes
    server: PageServer  # type: ignore[assignment]
    wfile: BytesIO
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "quantexp", ""

    def setup(self) -> None:
        self.rfile, self.wfile = BytesIO(self.request), BytesIO()

    def handle(self) -> None:
        if len(self.request) <= MOST_BYTES:
            self.handle_one_request()
            return
        self.command = self.requestline = self.request_version = ""
        self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def finish(self) -> None:
        """Nothing to close."""

    def do_GET(self) -> None:
        try:
            content, kind = self._answer()
        except _RefusedError as error:
            self._refuse(error.status, error.words)
            return
        headers = {"Content-Type": kind, "Content-Security-Policy": self.server.page.policy}
        if len(content) > _LARGE and "gzip" in self.headers.get("Accept-Encoding", ""):
            content, headers["Content-Encoding"] = gzip.compress(content, 1), "gzip"
        self._send(HTTPStatus.OK, content, headers)

    def _other_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the page is read only: GET alone")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = (
        _other_method
    )

    def _answer(self) -> tuple[bytes, str]:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not _HOSTS.fullmatch(host):
            raise _RefusedError(HTTPStatus.FORBIDDEN, "the host must be 127.0.0.1 or localhost")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            raise _RefusedError(HTTPStatus.FORBIDDEN, "another origin may not read this page")
        address = urlsplit(self.path)
        _, _, rest = address.path.partition("/")
        token, _, name = rest.partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            raise _RefusedError(
                HTTPStatus.FORBIDDEN, "the address needs the token that quantexp watch printed"
            )
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "a request has no content")
        if name == "":
            return self.server.page.html, "text/html; charset=utf-8"
        if (answer := _ANSWERS.get(name)) is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such part of the page")
        return orjson.dumps(
            self._content(answer, dict(parse_qsl(address.query)))
        ), "application/json"

    def _content(self, answer: _Answer, query: dict[str, str]) -> dict[str, Any]:
        try:
            return answer(self.server.watch, query)
        except KeyError as error:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such run") from error
        except (QuantexpError, OSError) as error:
            return {"error": str(error)}

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self.close_connection = True  # what follows may be the content of what was refused
        headers = {"Content-Type": "text/plain; charset=utf-8", "Connection": "close"}
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET"
        content = b"" if self.command == "HEAD" else f"{words}\n".encode()
        self._send(status, content, headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what `http.server` cannot read, without repeating it."""
        self._refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def _send(self, status: HTTPStatus, content: bytes, headers: dict[str, str]) -> None:
        always = {
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        self.send_response(status)
        for name, value in (always | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name of the base class)
        """Print nothing about requests: their addresses hold the token."""


_Answer = Callable[[FolderWatch, dict[str, str]], dict[str, Any]]


def _state(watch: FolderWatch, query: dict[str, str]) -> dict[str, Any]:
    return watch.state(query.get("server", ""), _number(query, "since"))


def _captured(watch: FolderWatch, query: dict[str, str]) -> dict[str, Any]:
    return watch.captured(query.get("run", ""))


def _numerics(watch: FolderWatch, query: dict[str, str]) -> dict[str, Any]:
    return watch.numerics(query.get("run", ""), _number(query, "iteration"))


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not _NUMBER.fullmatch(text):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number")
    return int(text)


_ANSWERS: dict[str, _Answer] = {"state": _state, "captured": _captured, "numerics": _numerics}


_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,64}")


@dataclass
class Address:
    """Where a page is served."""

    token: str
    port: int


def kept_address(cache: Path, watched: str) -> Address:
    """The address of what is watched: that of the last time, else a new token and port 0, which is any free port."""
    file = _file(cache, watched)
    with contextlib.suppress(OSError, UnreadableError):
        found = file.lstat()
        is_private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
        if is_private and found.st_uid == os.geteuid():
            address = read_json(file, Address, 1 << 12)
            if _TOKEN.fullmatch(address.token) and 0 < address.port < 1 << 16:
                return address
    return Address(secrets.token_urlsafe(24), 0)


def keep_address(cache: Path, watched: str, address: Address) -> None:
    """Keep an address, readable by the user alone.

    Raises:
        RunError: the cache cannot be written.
    """
    file = _file(cache, watched)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        umask = os.umask(0o077)
        try:
            write_json(file, asdict(address))
        finally:
            os.umask(umask)
    except OSError as error:
        raise RunError(
            f"the page's address cannot be kept in {file.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error


def _file(cache: Path, watched: str) -> Path:
    name = hashlib.sha256(watched.encode(errors="surrogateescape")).hexdigest()[:16]
    return cache / "watch" / f"{name}.json"


_ROOM = "quantexp.extras.forensics.watch"
#: The parts that the report has too.
_SHARED = ("svg.js", "losses.js", "colours.js", "detail.js", "map.js")
_OWN = ("following.js", "numerics.js", "watch.js")


@dataclass(frozen=True)
class Page:
    """The document, and the policy that goes with it as a header."""

    html: bytes
    policy: str


def page(about: str) -> Page:
    """The page about a folder."""
    style = page_text("page.css") + page_text("watch.css", room=_ROOM)
    script = page_text(*_SHARED) + "\n" + page_text(*_OWN, room=_ROOM)
    document = page_text("page.html", room=_ROOM)
    for name, text in (("about", html.escape(about)), ("style", style), ("script", script)):
        document = document.replace(f"{{{{ {name} }}}}", text, 1)
    allowed = policy(style, script, "connect-src 'self'", "frame-ancestors 'none'")
    return Page(document.encode(), allowed)
