"""report.html of real (tiny) runs in a browser."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import yaml

from quantexp.analysis.report.write import write_report
from quantexp.runs.paths import RunDir

from .conftest import SCHEMES, WIDE, Look, Visit

SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def colours(visit: Visit) -> np.ndarray:
    """The picture's distinct colours, with how often each occurs."""
    picture = matplotlib.image.imread(io.BytesIO(visit.page.screenshot(full_page=True)))
    pixels = np.round(picture[..., :3] * 255).astype(np.uint32)
    codes = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    _, counts = np.unique(codes, return_counts=True)
    return np.sort(counts)[::-1]


@pytest.fixture(scope="module")
def described(runs: list[RunDir]) -> RunDir:
    """The quantised run with 32 layers, as after capture=stats: only statistics, without quality by format."""
    run = RunDir(runs[1].root.with_name("described-1"))
    shutil.copytree(runs[1].root, run.root, ignore=shutil.ignore_patterns("*.pt"))
    lines = [json.loads(line) for line in (run.tensors / "manifest.jsonl").read_text().splitlines()]
    for line in lines:
        line["statistics"].pop("fidelity", None)
    deep = [{**line, "layer": line["layer"] + 2 * i} for i in range(16) for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in deep)
    (run.tensors / "statistics.jsonl").write_text(text)
    (run.tensors / "manifest.jsonl").unlink()
    return run


#: Elements whose content is wider than they are; a `pre` and a figure at its full size may be scrolled.
SCROLLED = """[...document.querySelectorAll('main *')].filter(e => e.tagName !== 'PRE' && !e.closest('svg')
  && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1)
  .map(e => e.className + " " + e.getAttribute("aria-label"))"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 800, 1280, 1600])
def test_nothing_is_wider_than_the_page(
    look: Look, sweep: Path, described: RunDir, tmp_path: Path, width: int
) -> None:
    for file in (sweep, write_report([described.root], tmp_path)):
        page = look(file, width).page
        for index in range(page.locator("article.run").count()):
            page.evaluate("index => show(index)", index)
            assert page.evaluate(WIDE) <= width
            assert page.evaluate(SCROLLED) == [], (
                "the map and the tables need no box to be scrolled"
            )


def test_the_maps_of_both_passes_fill_the_page_and_are_fully_visible(
    look: Look, runs: list[RunDir], described: RunDir, tmp_path: Path
) -> None:
    for run, beside in ((runs[1], True), (described, False)):
        page = look(write_report([run.root], tmp_path), 1280).page
        room = page.locator("main section").first.bounding_box()
        boxes = [one.bounding_box() for one in page.locator(".map").all()]
        assert page.locator(".map h3").all_inner_texts() == ["Forward", "Backward"]
        assert room is not None
        assert all(box is not None for box in boxes)
        (fx, fw), (bx, bw) = [(b["x"], b["width"]) for b in boxes if b]
        assert (bx > fx + fw) is beside, "few layers beside each other, many below each other"
        assert (bx + bw) - fx == pytest.approx(room["width"], abs=2)
        tables = [one.bounding_box() for one in page.locator(".map table").all()]
        assert [t["width"] for t in tables if t] == pytest.approx([fw, bw], abs=1)


def test_many_layers_have_narrow_cells_whose_numbers_are_in_their_titles(
    look: Look, described: RunDir, tmp_path: Path
) -> None:
    page = look(write_report([described.root], tmp_path), 400).page
    cell = page.get_by_role("button", name=re.compile("^L31 fc1 forward input, amax"))
    assert cell.get_attribute("title") == cell.get_attribute("aria-label")
    assert cell.evaluate("e => getComputedStyle(e).fontSize") == "0px"
    wide = look(write_report([described.root], tmp_path), 1600).page
    cell = wide.get_by_role("button", name=re.compile("^L31 fc1 forward input, amax"))
    assert cell.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 12
    assert cell.evaluate("e => e.scrollWidth <= e.clientWidth"), "the number has room"


def test_statistics_alone_come_with_the_reason_for_the_missing_sqnr(
    look: Look, described: RunDir, tmp_path: Path
) -> None:
    page = look(write_report([described.root], tmp_path)).page
    assert "SQNR" not in page.get_by_role("combobox", name="Measure").inner_text()
    assert "Statistics alone were captured: SQNR," in page.locator("main").inner_text()
    assert "Nothing was captured" not in page.locator("main").inner_text()
    page.get_by_role("button", name=re.compile("^L1 fc1 forward input,")).click()
    detail = page.locator(".detail").inner_text()
    assert "x fprop\tmxfp8_e4m3, statistics alone were captured" in detail
    assert page.locator(".detail rect.bar").count() > 3


def test_signs_in_place_of_numbers_have_a_key(
    look: Look, runs: list[RunDir], tmp_path: Path
) -> None:
    page = look(write_report([runs[1].root], tmp_path)).page
    signs = dict(one.split(" ", 1) for one in page.locator(".signs li").all_inner_texts())
    assert signs == {"\u00b7": "not quantised", "=": "the forward's quantised copy"}
    cell = page.get_by_role("button", name="L0 attention forward v fprop, not quantised")
    assert cell.inner_text() == "\u00b7"


def test_cells_that_stand_out_are_named_and_lead_to_their_cell(
    look: Look, runs: list[RunDir], tmp_path: Path
) -> None:
    """Cells of random weights are within 1 dB: none is ranked; the amax of a gradient is far from an activation's."""
    page = look(write_report([runs[1].root], tmp_path)).page

    def numbers() -> list[float]:
        texts = page.locator(".cell").all_inner_texts()
        return sorted(float(text) for text in texts if re.match(r"[.\d]", text))

    median = numbers()[len(numbers()) // 2]
    assert page.locator(".worst p").inner_text() == (
        f"none is more than 3 dB below the median, {median:.1f} dB"
    )
    assert page.locator(".worst li").count() == 0
    page.get_by_role("combobox", name="Measure").select_option("abs_max")
    values = numbers()
    listed = page.locator(".worst li").all_inner_texts()
    expected = [value for value in values if value > 4 * values[len(values) // 2]][:-6:-1]
    assert 0 < len(listed) == len(expected)
    assert [float(one.split()[-1]) for one in listed] == pytest.approx(expected, rel=0.05)
    link = page.locator(".worst button").first
    link.click()
    chosen = page.locator('.cell[aria-pressed="true"]').get_attribute("aria-label") or ""
    assert chosen.startswith(link.inner_text())


def test_colours_of_the_map_grow_lighter_with_the_value(look: Look, sweep: Path) -> None:
    shades = look(sweep).page.evaluate(
        "Array.from({ length: 21 }, (_, i) => rgb(i / 20)).map(([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b)"
    )
    steps = np.diff(shades)
    assert (steps > 3).all(), "no two neighbours look alike, and the order is seen without colours"


def test_lines_are_named_at_their_ends(look: Look, sweep: Path) -> None:
    page = look(sweep).page
    names = page.locator("#loss-chart .ends .name")
    assert sorted(names.all_text_contents()) == sorted(SCHEMES)
    boxes = [one.bounding_box() for one in page.locator("#loss-chart .ends text").all()]
    frame = page.locator("#loss-chart svg").bounding_box()
    assert frame is not None
    tops = sorted(box["y"] for box in boxes if box)
    assert min(np.diff(tops)) >= 12, "no name lies on another"
    assert all(b["x"] + b["width"] <= frame["x"] + frame["width"] for b in boxes if b)
    narrow = look(sweep, 400).page
    assert narrow.locator("#loss-chart .legend li").count() == 2


def test_a_figure_is_enlarged_to_its_full_size_and_fitted_again(
    look: Look, runs: list[RunDir], tmp_path: Path
) -> None:
    from PIL import Image

    run = RunDir(tmp_path / "run-1")
    shutil.copytree(runs[1].root, run.root)
    run.figures.mkdir(exist_ok=True)
    Image.new("RGB", (1500, 300), "navy").save(run.figures / "quick_analysis.png")
    page = look(write_report([run.root], tmp_path), 400).page
    image = page.locator("figure img")
    width = "e => e.getBoundingClientRect().width"
    assert image.evaluate(width) == 400, "from edge to edge"
    page.get_by_role("link", name="full size").click()
    assert image.evaluate(width) == 1500
    assert page.evaluate(WIDE) == 400, "it is scrolled in its own box"
    page.get_by_role("link", name="fit to the page").click()
    assert image.evaluate(width) == 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_whole_at_every_width(look: Look, sweep: Path, width: int, scheme: str) -> None:
    visit = look(sweep, width, scheme)
    page = visit.page
    assert page.title() == "2 runs of llama32-1b - quantexp"
    assert page.evaluate(WIDE) <= width, "nothing but a table's own box may be scrolled sideways"
    counts = colours(visit)
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
    page.get_by_role("combobox", name="Measure").select_option(label="amax")
    cell = page.get_by_role("button", name=re.compile("^L1 fc1 forward input, amax"))
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
    sqnr = line["statistics"]["fidelity"]["sqnr_db"]
    assert re.search(rf"x fprop\s+mxfp8_e4m3 rceil, SQNR {sqnr:.2f} dB", detail.inner_text())


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
    assert (chosen.get_attribute("aria-label") or "").startswith("L1 qkv forward x fprop, SQNR")
    assert page.locator(".detail rect.bar").count() > 3
    outline = chosen.evaluate("e => getComputedStyle(e).outlineStyle")
    assert outline == "solid", "where the focus is can be seen"


def test_measure_and_iteration_can_be_chosen(
    look: Look, runs: list[RunDir], tmp_path: Path
) -> None:
    page = look(write_report([runs[1].root], tmp_path)).page
    cell = page.get_by_role("button", name=re.compile("^L0 qkv backward g dgrad,"))
    cell.click()
    measure = page.get_by_role("combobox", name="Measure")
    assert measure.locator("option").all_inner_texts() == [
        "SQNR",
        "underflow",
        "saturation",
        "amax",
        "crest factor",
        "kurtosis",
        "zeros",
    ]
    texts = set()
    slot, tensor = (
        cell,
        page.get_by_role("button", name=re.compile("^L0 qkv backward grad_output,")),
    )
    for name in ("SQNR", "amax", "kurtosis"):
        measure.select_option(label=name)
        cell = slot if name == "SQNR" else tensor
        texts.add(cell.inner_text())
        assert name in (cell.get_attribute("aria-label") or "")
        assert name in page.locator(".scale").inner_text()
    assert len(texts) == 3
    cell.click()
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


def test_colours_cover_the_range_of_the_run_or_of_all_runs(look: Look, sweep: Path) -> None:
    page = look(sweep).page
    page.evaluate("show(1)")
    article = page.locator("article.run").nth(1)
    article.get_by_role("combobox", name="Measure").select_option(label="amax")
    labels = set()
    for choice in ("range of this run", "range of all runs"):
        article.get_by_role("combobox", name="Colours").select_option(label=choice)
        labels.add(article.locator(".scale svg").get_attribute("aria-label"))
    maps = "[DATA.numerics[1]], DATA.numerics"
    one, all_of_them = page.evaluate(f"[{maps}].map(maps => domainOf('abs_max', maps))")
    assert all_of_them[0] <= one[0] < one[1] <= all_of_them[1]
    assert len(labels) == (1 if one == all_of_them else 2)


def test_the_cursor_reads_off_all_lines(look: Look, sweep: Path, runs: list[RunDir]) -> None:
    page = look(sweep).page
    chart = page.locator("#loss-chart svg").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    first = [json.loads(run.metrics.read_text().splitlines()[0])["loss"] for run in runs]
    assert "Values at iteration 1" in page.locator("#loss-chart").inner_text()
    labels = page.locator("#loss-chart .ends text").all_text_contents()
    assert sorted(labels) == sorted(
        f"{scheme}{loss:.4f}" for scheme, loss in zip(SCHEMES, first, strict=True)
    )


def test_a_script_in_a_name_is_text(look: Look, runs: list[RunDir], tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    shutil.copytree(runs[1].root, folder)
    run = RunDir(folder)
    config = yaml.safe_load(run.config.read_text())
    config["quant"]["name"] = SCRIPT
    run.config.write_text(yaml.safe_dump(config))
    for file in (run.tensors / "manifest.jsonl", run.tensors / "statistics.jsonl"):
        lines = file.read_text().splitlines()
        changed = [json.dumps({**json.loads(line), "tensor": SCRIPT}) for line in lines]
        file.write_text("\n".join(changed) + "\n")
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
    visit = look_at_all(sweep)
    visit.page.evaluate(
        """() => {
          const script = document.createElement('script');
          script.textContent = "document.title = 'taken'";
          const image = document.createElement('img');
          image.src = 'http://127.0.0.1:9/image.png';
          document.body.append(script, image);
        }"""
    )
    for _ in range(1200):
        refused = [words for words in visit.complaints if "Content Security Policy" in words]
        if len(refused) == 2:
            break
        visit.page.wait_for_timeout(100)
    assert len(refused) == 2
    assert visit.page.title() != "taken"


def test_the_fixture_records_a_request_and_an_error(look_at_all: Look, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/image.png'><script>nothing.there()</script>")
    visit = look_at_all(bad)
    assert visit.requests == ["http://127.0.0.1:9/image.png"]
    assert any("nothing is not defined" in words for words in visit.complaints)
