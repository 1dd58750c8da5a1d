"""report.html of real (tiny) runs, as a person meets it."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import yaml

from quantexp.analysis.report.write import write_report
from quantexp.compose import compose
from quantexp.paths import RunDir

from .conftest import Look, Seen

SCHEMES = ("bf16", "FA_linear_mxfp8")
SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def runs(
    browser: object, tiny_words: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> list[RunDir]:
    """A run of each scheme with the tensors of two iterations; made only where there is a browser."""
    from quantexp.record import opened
    from quantexp.worker import Worker

    root = tmp_path_factory.mktemp("browser") / "runs"
    words = [*tiny_words, f"paths.root={root}", "capture.iterations=[1,2]", "capture.format=mxfp8"]
    made = []
    for scheme in SCHEMES:
        experiment = compose([*words, f"quant={scheme}"])
        with opened(experiment, "cpu", ["test"]) as (folder, _):
            assert Worker(folder.run, experiment).run() == 0
        made.append(folder.run)
    return made


@pytest.fixture(scope="module")
def sweep(runs: list[RunDir]) -> Path:
    """The page of both runs."""
    return write_report([run.root for run in runs], runs[0].root.parent)


def colours(seen: Seen) -> np.ndarray:
    """The picture's distinct colours, with how often each occurs."""
    picture = matplotlib.image.imread(io.BytesIO(seen.page.screenshot(full_page=True)))
    pixels = np.round(picture[..., :3] * 255).astype(np.uint32)
    codes = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    _, counts = np.unique(codes, return_counts=True)
    return np.sort(counts)[::-1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_whole_at_every_width(look: Look, sweep: Path, width: int, scheme: str) -> None:
    seen = look(sweep, width, scheme)
    page = seen.page
    assert page.title() == "2 runs of llama32-1b - quantexp"
    wide = page.evaluate(
        "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    )
    assert wide <= width, "nothing but a table's own box may be scrolled sideways"
    counts = colours(seen)
    assert len(counts) > 100
    assert counts[0] < 0.97 * counts.sum(), "the page is not blank"
    assert page.locator("#loss-chart polyline").count() == 2
    assert page.locator("#gap-chart polyline").count() == 1
    small = page.locator("main p, main td, main th").evaluate_all(
        "all => all.filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0


def test_dark_is_dark_and_light_is_light(look: Look, sweep: Path) -> None:
    papers = [
        look(sweep, scheme=scheme).page.evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    light, dark = (sum(map(int, re.findall(r"\d+", paper))) for paper in papers)
    assert light > 700
    assert dark < 100


@pytest.mark.parametrize("width", [1280, 390])
def test_a_cell_answers_a_click_with_its_distribution(
    look: Look, runs: list[RunDir], width: int, tmp_path: Path
) -> None:
    page = look(write_report([runs[1].root], tmp_path), width).page
    cell = page.get_by_role("button", name=re.compile("^L1 fc1 forward input, SQNR"))
    assert page.locator(".detail").is_hidden()
    cell.click()
    assert cell.get_attribute("aria-pressed") == "true"
    detail = page.locator(".detail")
    assert detail.locator("h3").inner_text() == "Layer 1, fc1 forward input, iteration 2"
    line = next(
        line
        for text in (runs[1].tensors / "manifest.jsonl").read_text().splitlines()
        if (line := json.loads(text))
        and (line["module"], line["layer"], line["tensor"]) == ("fc1", 1, "input")
        and line["iteration"] == 2
    )
    counts = line["statistics"]["log2_magnitude"]["counts"]
    assert detail.locator("rect.bar").count() == len(counts)
    tallest = counts.index(max(counts)) + line["statistics"]["log2_magnitude"]["first"]
    heights = detail.locator("rect.bar").evaluate_all(
        "all => all.map(b => +b.getAttribute('height'))"
    )
    assert heights.index(max(heights)) == counts.index(max(counts))
    assert (
        f"2^{tallest}: {max(counts):,} elements"
        in detail.locator("title").all_text_contents()[counts.index(max(counts))]
    )
    assert f"SQNR {line['statistics']['fidelity']['sqnr_db']:.2f} dB" in detail.inner_text()


def test_cells_are_reached_and_chosen_by_keys_alone(
    look: Look, runs: list[RunDir], tmp_path: Path
) -> None:
    page = look(write_report([runs[1].root], tmp_path)).page
    assert page.locator('.cell[tabindex="0"]').count() == 1
    page.locator('.cell[tabindex="0"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # there is nothing above the first row
    page.keyboard.press("Enter")
    chosen = page.locator('.cell[aria-pressed="true"]')
    assert chosen.count() == 1
    assert (chosen.get_attribute("aria-label") or "").startswith("L1 qkv forward input, SQNR")
    assert page.locator(".detail rect.bar").count() > 3
    outline = chosen.evaluate("e => getComputedStyle(e).outlineStyle")
    assert outline == "solid", "where the focus is can be seen"


def test_measure_and_iteration_can_be_chosen(
    look: Look, runs: list[RunDir], tmp_path: Path
) -> None:
    page = look(write_report([runs[1].root], tmp_path)).page
    cell = page.get_by_role("button", name=re.compile("^L0 qkv backward grad_output,"))
    cell.click()
    measure = page.get_by_role("combobox", name="Measure")
    assert measure.locator("option").all_inner_texts() == [
        "SQNR",
        "underflow",
        "saturation",
        "amax",
        "kurtosis",
        "zeros",
    ]
    texts = set()
    for name in ("SQNR", "amax", "kurtosis"):
        measure.select_option(label=name)
        texts.add(cell.inner_text())
        assert name in (cell.get_attribute("aria-label") or "")
        assert name in page.locator(".scale").inner_text()
    assert len(texts) == 3
    page.get_by_role("combobox", name="Iteration").select_option(label="1")
    assert "iteration 1" in page.locator(".detail h3").inner_text()


def test_a_run_of_a_sweep_can_be_chosen(look: Look, sweep: Path) -> None:
    page = look(sweep).page
    articles = page.locator("article.run")
    assert [articles.nth(i).is_visible() for i in (0, 1)] == [True, False]
    page.get_by_label("Run", exact=True).select_option(label="FA_linear_mxfp8")
    assert [articles.nth(i).is_visible() for i in (0, 1)] == [False, True]
    assert articles.nth(1).locator(".cell").count() > 20
    page.get_by_role("button", name="bf16").click()
    assert [articles.nth(i).is_visible() for i in (0, 1)] == [True, False]
    assert page.get_by_label("Run", exact=True).input_value() == "0"


def test_the_cursor_reads_off_all_lines(look: Look, sweep: Path, runs: list[RunDir]) -> None:
    page = look(sweep).page
    chart = page.locator("#loss-chart svg").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    first = [json.loads(run.metrics.read_text().splitlines()[0])["loss"] for run in runs]
    assert "at iteration 1" in page.locator("#loss-chart").inner_text()
    shown = page.locator("#loss-chart .value").all_inner_texts()
    assert shown == [f"{loss:.4f}" for loss in first]


def test_a_script_in_a_name_is_text(look: Look, runs: list[RunDir], tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    shutil.copytree(runs[1].root, folder)
    run = RunDir(folder)
    config = yaml.safe_load(run.config.read_text())
    config["quant"]["name"] = SCRIPT
    run.config.write_text(yaml.safe_dump(config))
    lines = (run.tensors / "manifest.jsonl").read_text().splitlines()
    changed = [json.dumps({**json.loads(line), "tensor": SCRIPT}) for line in lines]
    (run.tensors / "manifest.jsonl").write_text("\n".join(changed) + "\n")
    page = look(write_report([folder, runs[0].root], tmp_path)).page
    page.locator(".cell").first.click()
    assert page.locator(".detail h3").inner_text().count("<script>") == 1
    assert SCRIPT in page.locator("#loss-chart").inner_text()
    assert page.title().startswith("2 runs of")
    assert page.locator("script").count() == 2


def test_the_page_can_be_read_without_scripts(look: Look, sweep: Path) -> None:
    text = look(sweep, scripts=False).page.inner_text("body")
    assert text.count("Precision map and its proof") == 2
    assert "need JavaScript" in text


def test_no_other_script_runs_and_nothing_is_loaded(look_at_all: Look, sweep: Path) -> None:
    seen = look_at_all(sweep)
    seen.page.evaluate(
        """() => {
          const script = document.createElement('script');
          script.textContent = "document.title = 'taken'";
          const image = document.createElement('img');
          image.src = 'http://127.0.0.1:9/image.png';
          document.body.append(script, image);
        }"""
    )
    seen.page.wait_for_timeout(200)
    assert seen.page.title() != "taken"
    assert len([words for words in seen.complaints if "Content Security Policy" in words]) == 2


def test_these_tests_notice_a_request_and_an_error(look_at_all: Look, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/image.png'><script>nothing.there()</script>")
    seen = look_at_all(bad)
    assert seen.asked == ["http://127.0.0.1:9/image.png"]
    assert any("nothing is not defined" in words for words in seen.complaints)
