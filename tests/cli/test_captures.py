"""What `captures --check` takes from the run of a folder."""

from __future__ import annotations

from pathlib import Path

from quantexp.cli.captures import check
from quantexp.runs.fencing import Claim
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, now, write_json, write_status
from quantexp.schema import StoreKind
from tests.hostile.captured import write_capture


def test_run_on_another_machine_whose_lock_is_invisible_still_writes(tmp_path: Path) -> None:
    folder = tmp_path / "tensors"
    write_capture(folder, StoreKind.pt)
    (folder / "mxfp8" / "half.pt.part").write_bytes(b"half")
    status = Status(State.RUNNING, host="far", pid=1, started=now())
    write_status(tmp_path / "status.json", status)
    write_json(
        RunDir(tmp_path).claim, vars(Claim("0123", "far", 7, "", "another boot", "another machine"))
    )
    checked = check(str(tmp_path), {})
    assert "still being written" in checked.notes
    assert not checked.problems
    status.state, status.finished = State.FAILED, now()
    write_status(tmp_path / "status.json", status)
    assert [each.file for each in check(str(tmp_path), {}).problems] == ["mxfp8/half.pt.part"]
