"""The certificate: what it applies to, and the message if none matches."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.errors import VerifyError
from quantexp.formats import certificate
from quantexp.formats.certificate import (
    Certificate,
    State,
    certify,
    device_kind,
    folder_in,
    formats_source,
    save,
    standing,
)


def make_certificate(mismatches: int = 0, **changed: Any) -> Certificate:
    row = {"format": "hifp8", "kernel": "reference (cpu)", "oracle": "exact gold"}
    rows = [{**row, "cases": 1000, "mismatches": mismatches, "examples": []}]
    base = certify("cpu", rows, ["reference (cpu)"], ["hifp8"], {"gfloat": "1"}, {}, 1.26)
    return dataclasses.replace(base, **changed)


def test_without_a_certificate_the_words_state_the_remedy(tmp_path: Path) -> None:
    status = standing(tmp_path, "cpu")
    assert status.state is State.NOT_VERIFIED
    assert status.words == "not verified: run quantexp verify"
    assert status.record() == {"state": "not verified", "words": status.words, "certificate": None}


def test_a_matching_certificate_states_what_it_covers(tmp_path: Path) -> None:
    save(make_certificate(absent={"torchao": "not installed"}), tmp_path)
    status = standing(tmp_path, "cpu")
    assert status.state is State.VERIFIED
    assert status.words.startswith("verified on 20")
    assert status.words.endswith(": 1,000 values, against exact gold, gfloat 1; absent: torchao")
    record = status.record()
    assert record["certificate"]["rows"][0]["cases"] == 1000
    assert json.loads(json.dumps(record)) == record


def test_a_failed_certificate_is_not_hidden(tmp_path: Path) -> None:
    save(make_certificate(), tmp_path)
    save(make_certificate(mismatches=3), tmp_path)
    status = standing(tmp_path, "cpu")
    assert status.state is State.FAILED
    assert status.words.startswith("verification failed on 20")
    assert status.words.endswith(": 3 of 1,000 values differ, in hifp8")
    assert status.certificate is not None
    assert status.certificate.passed is False


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"formats_source": "0" * 16}, "other formats"), ({"torch": "2.9.1"}, "torch 2.9.1")],
)
def test_a_certificate_for_another_version_states_which(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(make_certificate(**changed), tmp_path)
    status = standing(tmp_path, "cpu")
    assert (status.state, status.certificate) == (State.ANOTHER_VERSION, None)
    assert status.words.startswith("not verified as it runs: the certificate of 20")
    assert status.words.endswith(f" is for {words}; run quantexp verify")


def test_a_certificate_for_another_device_does_not_count(tmp_path: Path) -> None:
    save(make_certificate(device="NVIDIA H200"), tmp_path)
    status = standing(tmp_path, "cpu")
    assert status.state is State.NOT_VERIFIED
    assert "there is a certificate for NVIDIA H200; run quantexp verify" in status.words


def test_certificates_of_versions_and_devices_lie_side_by_side(tmp_path: Path) -> None:
    files = [
        save(make_certificate(torch=v, device=d), tmp_path)
        for v in "12"
        for d in ("cpu (x)", "A 100")
    ]
    assert len(set(files)) == 4
    assert files[0].name == f"{formats_source()}-torch-1-cpu-x.json"
    assert save(make_certificate(), tmp_path) == save(make_certificate(mismatches=1), tmp_path)


def test_a_file_that_is_no_certificate_is_ignored(tmp_path: Path) -> None:
    folder_in(tmp_path).mkdir()
    for name, text in {"a.json": "{", "b.json": "[]", "c.json": '{"passed": true}'}.items():
        (folder_in(tmp_path) / name).write_text(text)
    assert standing(tmp_path, "cpu").state is State.NOT_VERIFIED


def test_a_folder_that_cannot_be_written_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "verify").write_text("")
    with pytest.raises(VerifyError, match=r"cannot be written to .*; set paths\.cache=FOLDER"):
        save(make_certificate(), tmp_path)


def test_the_digest_is_of_the_formats_source_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quantexp.formats

    before = formats_source()
    source = Path(str(quantexp.formats.__file__)).parent
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(quantexp.formats, "__file__", str(tmp_path / "__init__.py"))
    certificate.formats_source.cache_clear()
    try:
        assert formats_source() == before
        for changed in ("families.py", "kernels/cpu.py", "kernels/cpu.c", "kernels/lanes.h"):
            file = tmp_path / changed
            text = file.read_text()
            file.write_text(f"{text}\n")
            certificate.formats_source.cache_clear()
            assert formats_source() != before
            file.write_text(text)
        (tmp_path / "kernels" / "__pycache__").mkdir(exist_ok=True)
        (tmp_path / "kernels" / "__pycache__" / "cpu.pyc").write_text("not source")
        certificate.formats_source.cache_clear()
        assert formats_source() == before
    finally:
        certificate.formats_source.cache_clear()


def test_a_cpu_is_named_by_its_vector_instructions() -> None:
    assert torch.backends.cpu.get_cpu_capability() in device_kind("cpu")
    assert device_kind("cpu").startswith("cpu (")
