"""Writing past the system's cache: which bytes go there, and that all arrive wherever they go."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from quantexp.capture.store import direct
from quantexp.capture.store.direct import PAGE, DirectFile

#: Which way each write went, and with how many bytes.
Written = list[tuple[str, int]]
LEAST = 1 << 16


def pages(num_bytes: int) -> memoryview:
    """Bytes of some pattern that begin with a page."""
    memory = mmap.mmap(-1, num_bytes)
    memory.write(bytes(i % 251 for i in range(num_bytes)))
    return memoryview(memory)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """Every disk takes writes past the cache, or seems to: the second descriptor leads to the same file."""
    seen: Written = []
    past: set[int] = set()
    real_open, real_write = os.open, os.pwritev

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        is_past = bool(flags & os.O_DIRECT)
        descriptor = real_open(path, flags & ~os.O_DIRECT, mode)
        (past.add if is_past else past.discard)(descriptor)
        return descriptor

    def write(descriptor: int, parts: list[memoryview], offset: int) -> int:
        num_bytes = real_write(descriptor, parts, offset)
        seen.append(("past" if descriptor in past else "through", num_bytes))
        return num_bytes

    monkeypatch.setattr(direct, "_file_system", lambda folder: "ext4")
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwritev", write)
    return seen


def put(path: Path, content: memoryview, offset: int = 0, is_behind: bool = False) -> bytes:
    file = DirectFile(path)
    file.write_at([content], offset, is_behind)
    file.close()
    return path.read_bytes()[offset:]


@pytest.mark.parametrize(
    ("num_bytes", "skipped", "offset", "ways"),
    [
        (1 << 17, 0, PAGE, [("past", 1 << 17)]),
        ((1 << 17) + 10, 0, 0, [("past", 1 << 17), ("through", 10)]),
        (1 << 17, 0, 8, [("through", 1 << 17)]),
        (1 << 17, 8, 0, [("through", (1 << 17) - 8)]),
        (LEAST - PAGE, 0, 0, [("through", LEAST - PAGE)]),
        (PAGE, PAGE, 0, []),
    ],
    ids=["pages", "rest", "place", "memory", "small", "empty"],
)
def test_whole_pages_go_past_the_cache_and_the_rest_through_it(
    tmp_path: Path,
    written: Written,
    num_bytes: int,
    skipped: int,
    offset: int,
    ways: Written,
) -> None:
    content = pages(num_bytes)[skipped:]
    assert put(tmp_path / "x", content, offset) == bytes(content)
    assert written == ways


def test_parts_go_in_one_write_as_far_as_they_are_pages(tmp_path: Path, written: Written) -> None:
    parts = [pages(1 << 17)[:PAGE], pages(1 << 17), pages(10), pages(1 << 17)]
    file = DirectFile(tmp_path / "x")
    file.write_at(parts, PAGE)
    file.close()
    assert (tmp_path / "x").read_bytes()[PAGE:] == b"".join(parts)
    through = [("through", 10), ("through", 1 << 17)]
    assert written == [("past", PAGE + (1 << 17)), *through], "behind ten bytes no page begins"


def test_what_is_to_stay_in_the_cache_never_goes_past_it(tmp_path: Path, written: Written) -> None:
    file = DirectFile(tmp_path / "x", past_cache=False)
    file.write_at([pages(1 << 17)], 0)
    file.close()
    assert written == [("through", 1 << 17)]


def test_a_writer_that_is_behind_goes_through_the_cache(tmp_path: Path, written: Written) -> None:
    assert put(tmp_path / "x", pages(1 << 17), is_behind=True) == bytes(pages(1 << 17))
    assert written == [("through", 1 << 17)]


def test_this_systems_own_way_writes_every_byte(tmp_path: Path) -> None:
    content = pages((1 << 20) + 100)
    file = DirectFile(tmp_path / "x")
    file.write_at([b"head"], 0)
    file.write_at([content], PAGE)
    file.write_at([b"tail"], PAGE + len(content))
    expected = b"head" + bytes(PAGE - 4) + bytes(content) + b"tail"
    assert (tmp_path / "x").read_bytes() == expected, "as others see it while it is open"
    file.truncate(PAGE + 50)
    file.close()
    assert (tmp_path / "x").read_bytes() == expected[: PAGE + 50]


def test_a_write_that_is_cut_short_goes_on_where_it_ended(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda d, parts, o: real(d, [parts[0][:100_000]], o))
    assert put(tmp_path / "x", pages(1 << 18)) == bytes(pages(1 << 18))
    assert written[0] == ("past", 100_000)
    assert sum(num_bytes for _, num_bytes in written) == 1 << 18


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_disk_that_refuses_is_not_asked_again(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real, asked = os.pwritev, list[int]()

    def refusing(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if not asked:
            asked.append(descriptor)
            raise OSError(code, os.strerror(code))
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    file = DirectFile(tmp_path / "x")
    for offset in (0, 1 << 17):
        file.write_at([pages(1 << 17)], offset)
    file.close()
    assert (tmp_path / "x").read_bytes() == bytes(pages(1 << 17)) * 2
    assert written == [("through", 1 << 17)] * 2


def test_a_disk_that_cannot_be_opened_so_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, mode))  # Linux creates it first
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(direct, "_file_system", lambda folder: "xfs")
    monkeypatch.setattr(os, "open", opened)
    assert put(tmp_path / "x", pages(1 << 17)) == bytes(pages(1 << 17))
    file = DirectFile(tmp_path / "new", os.O_EXCL)
    file.close()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "new", os.O_EXCL)


def test_a_full_disk_is_told(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left on device"):
        put(tmp_path / "x", pages(1 << 17))


class Mount(NamedTuple):
    mountpoint: str
    fstype: str


def test_only_disks_of_this_machine_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "share" / "disk").mkdir(parents=True)
    mounts = [
        Mount("/", "ext4"),
        Mount(str(tmp_path / "share"), "ext4"),
        Mount(str(tmp_path / "share"), "nfs4"),  # mounted over it
        Mount(str(tmp_path / "share" / "disk"), "xfs"),
        Mount(str(tmp_path / "sha"), "tmpfs"),
    ]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    direct._file_system.cache_clear()
    found = [direct._file_system(tmp_path / name) for name in ("", "share", "share/disk")]
    direct._file_system.cache_clear()
    assert found == ["ext4", "nfs4", "xfs"]
    asked = list[Path]()
    real = os.open

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            asked.append(path)
        return real(path, flags & ~os.O_DIRECT, mode)

    monkeypatch.setattr(os, "open", opened)
    for name in ("share/x", "share/disk/x"):
        put(tmp_path / name, pages(PAGE))
    direct._file_system.cache_clear()
    assert asked == [tmp_path / "share/disk/x"]
