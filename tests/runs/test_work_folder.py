from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quantexp.errors import CaptureError
from quantexp.runs.work_folder import WorkFolder, whole


def folder_at(root: Path, job: str = "0123") -> WorkFolder:
    return WorkFolder(root, job, "paints", "canvas=", CaptureError)


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    return folder_at(tmp_path / "result.partial")


def test_begin_removes_all_but_the_partial_results_of_this_work(folder: WorkFolder) -> None:
    with folder.alone():
        for other in (folder_at(folder.root, "4567"), folder):
            other.outputs.mkdir()
            (other.outputs / "a").touch()
        (folder.root / "stray").touch()
        folder.submission.touch()
        folder.begin()
    assert sorted(path.name for path in folder.root.iterdir()) == [
        ".lock",
        "0123",
        "submission.json",
    ]
    assert (folder.outputs / "a").exists()


def test_a_second_process_waits_or_is_refused(folder: WorkFolder) -> None:
    message = f"{folder.root}: another process paints there; wait for it, or give another canvas="
    with folder.alone(), pytest.raises(CaptureError) as error, folder.alone():
        pass
    assert str(error.value) == message
    first = folder.alone()
    first.__enter__()
    left = threading.Event()

    def leave() -> None:
        left.set()
        first.__exit__(None, None, None)

    threading.Timer(0.3, leave).start()
    with folder.alone(patience_s=120):
        assert left.is_set()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = folder_at(tmp_path / "file" / "result.partial")
    with pytest.raises(CaptureError) as error, folder.alone():
        pass
    assert str(error.value) == (
        f"cannot write {folder.root}: Not a directory; free space or fix permissions, then run the same command "
        "again: it resumes where it stopped"
    )


def test_a_partial_result_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"

    def write_until_full() -> None:
        with whole(path) as stream:
            stream.write(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_until_full()
    assert list(tmp_path.iterdir()) == []
    with whole(path) as stream:
        stream.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_partial_result_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"

    def write() -> None:
        with whole(path) as stream:
            stream.write(b"other")

    other = threading.Thread(target=write)
    with whole(path) as stream:
        stream.write(b"first")
        other.start()
        other.join()
        assert path.read_bytes() == b"other"
    assert path.read_bytes() == b"first"
