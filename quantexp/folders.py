"""Folders and file names outside of run folders: shipped configuration, cache, unfinished files; paths in commands."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: After the name of a file that is not whole yet.
PART = ".part"
#: What has a meaning in the grammar of Hydra's overrides, or would be stripped.
_SIGNS = re.compile(r"[\\,'\"()\[\]{}]|^\s|\s$|^$")


def user_path(path: str | Path) -> Path:
    """A path with the user's home for `~`; an unknown `~name` stays as it is, and is not a file then."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_text(text: str) -> bool:
    r"""Whether the text can be encoded as UTF-8; a lone `\ud800` of JSON or a foreign byte of a path cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_text(key: str, path: Path, error: type[Exception]) -> None:
    """Check that a path can be recorded in files and be given to other processes.

    Raises:
        Exception: of the class `error`; the absolute path is not UTF-8.
    """
    if not is_text(absolute := str(path.absolute())):
        raise error(
            f"{key} must be a path in UTF-8, got {absolute!r}; rename it, or choose another"
        )


def conf_dir() -> Path:
    """The shipped configuration: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def cache_dir(configured: str | None) -> Path:
    """Prepared samples and index caches: as configured, else `$XDG_CACHE_HOME/quantexp`."""
    if configured is not None:
        return user_path(configured).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "quantexp"


def short_path(path: Path) -> Path:
    """The path below the working directory where it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def shell_word(text: str) -> str:
    r"""The text as one word of a command to paste into bash or zsh.

    Characters that a terminal obeys or a reader cannot see are written as their bytes, `$'new\x0aline'`.
    """
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_in_dollar_quotes, text))}'"


def _in_dollar_quotes(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    is_byte = "\udc80" <= character <= "\udcff"  # of a name that is no UTF-8
    encoded = character.encode(errors="surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in encoded)


def shell_line(words: Iterable[str]) -> str:
    """The words as a command to paste, each as `shell_word`."""
    return " ".join(map(shell_word, words))


def for_shell(path: Path) -> str:
    """`short_path` as a word of a command to paste, which is no flag."""
    short = str(short_path(path))
    return shell_word(f"./{short}" if short.startswith("-") else short)


def quoted(value: str) -> str:
    """The value quoted for Hydra's grammar."""
    inside = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value)
    return f"'{inside}'"


def override_word(key: str, value: object) -> str:
    """`key=value` as a word for a shell, with quotes of the grammar only where the text needs them."""
    text = str(value)
    return shell_word(f"{key}={quoted(text) if _SIGNS.search(text) else text}")


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def beside(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(path.name + PART)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, so that a power failure cannot lose them.

    Raises:
        OSError: the disk fails, or has no room.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """The temporary name of a file, which is renamed at the end; after an error it is removed."""
    part = beside(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def writing_into(folder: Path, error: type[Exception], elsewhere: str) -> Iterator[None]:
    """A context whose failed writes raise `error`; `elsewhere` is what gives another folder.

    Raises:
        Exception: of the class `error`; a file cannot be written.
    """
    try:
        yield
    except OSError as failure:
        raise error(
            f"{folder} cannot be written: {failure.strerror or failure}; give another with {elsewhere}"
        ) from failure
