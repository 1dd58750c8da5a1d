"""A courier's record."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.training.tracking.delivery import Delivery, read_delivery, trouble_of, write_delivery


def test_record_comes_back(tmp_path: Path) -> None:
    delivery = Delivery("https://here", "abc", 7, 1234, True, "")
    write_delivery(tmp_path / "wandb.json", delivery)
    assert read_delivery(tmp_path / "wandb.json") == delivery


def test_error_is_one_line_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    error = ConnectionError("https://me:password@there refuses hf_aSecretOfTheHub\nand more")
    assert trouble_of(error) == "ConnectionError: https://there refuses <HF_TOKEN>"
    assert trouble_of(TimeoutError()) == "TimeoutError: "


def test_long_error_is_cut() -> None:
    assert trouble_of(ValueError("x" * 999)) == f"ValueError: {'x' * 225}..."


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"another": "version"}'])
def test_what_is_no_record_is_a_new_one(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "wandb.json"
    if text is not None:
        file.write_text(text)
    assert read_delivery(file) == Delivery()
