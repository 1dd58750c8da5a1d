"""The page of `quantexp watch` in a browser, with runs that advance while it is open."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quantexp.extras.forensics.watch import folder
from quantexp.runs.dossiers import Dossier, Trigger, folder_of, write_dossier
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import State, read_status, write_json, write_status
from tests.analysis.report.captured import captured
from tests.extras.forensics.watch.watching import Watching

from .conftest import WIDE
from .watched import TOKEN, Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Milliseconds in which a machine shows what it has to show, however busy it is.
LIMIT_MS = 120_000
SCRIPT = "<img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture
def watched(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(folder, "REFRESH_S", 0.05)
    monkeypatch.setattr(folder, "LEDGER_S", 0.0)
    made = Watched(tmp_path)
    yield made
    made.stop()
    assert made.bugs == []


Visit = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser, watched: Watched) -> Iterator[Visit]:
    """Open the page; at the end it must have asked its own server alone, and complained of nothing unexpected."""
    contexts, complaints, addresses = [], list[str](), list[str]()

    def visit(width: int = 1280, scheme: Any = "light", address: str | None = None) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("request", lambda request: addresses.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "warning" else None)
        page.goto(address or watched.start())
        page.locator("#rows tr").nth(1).wait_for()
        page.locator('#connection[data-state="live"]').wait_for()
        return page

    yield visit
    for context in contexts:
        context.close()
    own = re.compile(r"http://127\.0\.0\.1:\d+/[\w-]{32}/|data:")
    assert [address for address in addresses if not own.match(address)] == []
    assert complaints == []


def cell(page: Page, run: RunDir, label: str) -> Any:
    """A cell of a run's row."""
    return page.locator(f'#rows tr:has(button[title="{run.root.name}"]) td[data-label="{label}"]')


def expect_text(place: Any, text: str | re.Pattern[str]) -> None:
    from playwright.sync_api import expect

    expect(place).to_have_text(text, timeout=LIMIT_MS)


def test_runs_that_advance_are_followed_without_a_reload(visit: Visit, watched: Watched) -> None:
    page = visit()
    expect_text(cell(page, watched.bf16, "iteration"), "3 / 400")
    expect_text(cell(page, watched.mxfp4, "gap"), "+0.4000")
    assert page.locator("#loss-chart polyline").count() == 2
    assert page.locator("#gap-chart polyline").count() == 1
    assert sorted(page.locator("#loss-chart .ends .name").all_text_contents()) == [
        "bf16",
        "linear_mxfp4",
    ]
    page.evaluate("document.body.dataset.kept = 'yes'")
    points = page.locator("#loss-chart polyline").first.get_attribute("points")
    watched.advance(watched.bf16, 10, 3.0)
    watched.advance(watched.mxfp4, 10, 3.25)
    expect_text(cell(page, watched.bf16, "iteration"), "10 / 400")
    expect_text(cell(page, watched.mxfp4, "gap"), "+0.2500")
    expect_text(cell(page, watched.mxfp4, "loss"), "3.2500")
    assert page.locator("#loss-chart polyline").first.get_attribute("points") != points
    assert page.locator("body").get_attribute("data-kept") == "yes", "the same document"
    assert page.title() == "2 runs: 2 running - quantexp watch"


def test_a_run_appears_ends_and_goes(visit: Visit, watched: Watched) -> None:
    page = visit()
    added = watched.runs.add("linear_mxfp8", [6.0, 5.0], state=State.FAILED)
    expect_text(cell(page, added, "state"), "failed")
    assert "bad" in (cell(page, added, "state").locator("span").get_attribute("class") or "")
    expect_text(page.locator("#summary"), "3 runs: 2 running, 1 failed")
    page.locator("#loss-chart polyline").nth(2).wait_for(state="attached")
    assert page.locator("#map option").all_text_contents()[:3] == [
        "bf16",
        "linear_mxfp4",
        "linear_mxfp8",
    ]
    added.root.rename(watched.runs.root.parent / "gone")
    expect_text(page.locator("#summary"), "2 runs: 2 running")
    assert page.locator("#rows tr").count() == 2


@pytest.mark.slow
def test_the_page_says_that_its_server_is_gone_and_goes_on_with_the_next_one(
    visit: Visit, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command itself: a restart on the same folder has the address of before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = str(watched.runs.root)
    with Watching(folder) as first:
        page = visit(address=first.address)
    page.locator('#connection[data-state="lost"]').wait_for()
    assert "no answer from the server, trying again" in page.locator("#connection").inner_text()
    assert page.locator("#rows tr").count() == 2, "what was shown stays"
    watched.advance(watched.bf16, 20)
    with Watching(folder) as again:
        assert again.address == first.address
        page.locator('#connection[data-state="live"]').wait_for()
        expect_text(cell(page, watched.bf16, "iteration"), "20 / 400")


def test_a_token_that_is_no_longer_valid_is_named(visit: Visit, watched: Watched) -> None:
    page = visit()
    assert watched.server is not None
    watched.server.token = "u" * 32
    page.locator('#connection[data-state="lost"]').wait_for()
    assert "this address is no longer valid" in page.locator("#connection").inner_text()


def test_the_slider_goes_through_the_captured_iterations(visit: Visit, watched: Watched) -> None:
    captured(watched.mxfp4, iterations=(1, 2, 4))
    page = visit()
    page.get_by_role("combobox", name="Run").select_option(label="linear_mxfp4")
    page.locator("#numerics").scroll_into_view_if_needed()
    slider, where = page.get_by_label("Captured iteration"), page.locator(".slider output")
    expect_text(where, "iteration 4, newest")
    page.get_by_role("combobox", name="Measure").select_option(label="amax")
    shown = page.get_by_role("button", name=re.compile("^L1 qkv forward input, amax"))
    newest = shown.get_attribute("aria-label")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect_text(where, "iteration 2 of 4")
    assert slider.get_attribute("aria-valuetext") == "iteration 2 of 4"
    page.locator(f'.cell[data-name="L1 qkv forward input"]:not([aria-label="{newest}"])').wait_for()
    shown.click()
    expect_text(page.locator(".detail h3"), re.compile("iteration 2$"))
    captured(watched.mxfp4, iterations=(1, 2, 4, 8))
    expect_text(where, "iteration 2 of 8")
    page.get_by_role("button", name="newest").click()
    expect_text(where, "iteration 8, newest")
    captured(watched.mxfp4, iterations=(1, 2, 4, 8, 16))
    page.mouse.move(5, 5)
    expect_text(where, "iteration 16, newest")
    expect_text(page.locator(".detail h3"), "Layer 1, qkv forward input, iteration 16")


def test_a_run_without_captures_says_how_to_have_them(visit: Visit) -> None:
    page = visit()
    page.locator("#numerics").scroll_into_view_if_needed()
    expect_text(
        page.locator("#map-words"),
        "Nothing has been captured: capture=stats and capture=tensors do.",
    )
    assert page.get_by_label("Captured iteration").is_disabled()


def test_numerics_are_not_asked_for_before_they_are_near(visit: Visit, watched: Watched) -> None:
    captured(watched.bf16)
    page = visit(1280)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2][:8]))
    watched.advance(watched.bf16, 10)
    expect_text(cell(page, watched.bf16, "iteration"), "10 / 400")
    while len(asked) < 2:
        page.wait_for_timeout(50)
    assert set(asked) == {"state?se"}
    page.locator("#numerics").scroll_into_view_if_needed()
    page.locator("#map .cell").first.wait_for()


def test_dossiers_appear_newest_first(visit: Visit, watched: Watched) -> None:
    page = visit()
    assert page.locator("#no-dossiers").is_visible()
    for iteration, words in ((12, "The loss rose by 3."), (30, "A gradient of fc1 is NaN.")):
        file = watched.mxfp4.dossiers / f"iteration_{iteration:08}" / "dossier.json"
        file.parent.mkdir(parents=True)
        file.write_text('{"iteration":')
        page.wait_for_timeout(200)
        time = f"2026-01-31T12:00:{iteration}+00:00"
        write_dossier(watched.mxfp4, Dossier(iteration, time, Trigger.LOSS, words))
        page.get_by_text(words).wait_for()
    rows = page.locator("#dossier-rows tr")
    assert [re.search(r"\b(12|30)\b", text)[0] for text in rows.all_inner_texts()] == ["30", "12"]  # type: ignore[index]
    assert watched.mxfp4.root.name in rows.first.inner_text()
    assert "dossiers/iteration_00000030" in rows.first.inner_text()
    assert page.locator("#no-dossiers").is_hidden()


def test_sweeps_have_the_states_of_their_runs(visit: Visit, watched: Watched) -> None:
    sweeps = RunsRoot(watched.runs.root).sweeps
    sweeps.mkdir()
    names = [run.root.name for run in (watched.bf16, watched.mxfp4)]
    write_json(sweeps / "a.json", {"runs": [{"run": name} for name in names]})
    page = visit()
    expect_text(page.locator("#sweep-rows td[data-label=states]"), "2 running")
    status = read_status(watched.bf16.status)
    assert status is not None
    write_status(watched.bf16.status, replace(status, state=State.COMPLETED))
    expect_text(page.locator("#sweep-rows td[data-label=states]"), "1 running, 1 completed")


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_moves_under_the_pointer(visit: Visit, watched: Watched, width: int) -> None:
    captured(watched.bf16, iterations=(1, 2))
    page = visit(width)
    page.locator("#numerics").scroll_into_view_if_needed()
    target = page.locator("#map .cell:not(:disabled)").first
    target.wait_for()
    target.scroll_into_view_if_needed()
    target.hover()
    before = target.bounding_box()
    text = target.inner_text()
    watched.runs.add("linear_mxfp8", [6.0, 5.0], seed=5)
    watched.advance(watched.bf16, 250, 3.0)
    expect_text(cell(page, watched.bf16, "iteration"), "250 / 400")
    page.wait_for_timeout(1500)
    assert target.bounding_box() == before
    assert (target.inner_text(), page.locator("#rows tr").count()) == (text, 2)
    page.mouse.move(3, 3)
    page.locator("#rows tr").nth(2).wait_for()


def test_numbers_change_in_their_places(visit: Visit, watched: Watched) -> None:
    page = visit()
    row = page.locator("#rows tr").first
    boxes = [one.bounding_box() for one in row.locator("td, th").all()]
    watched.advance(watched.bf16, 399, 123456.789)
    expect_text(cell(page, watched.bf16, "iteration"), "399 / 400")
    after = [one.bounding_box() for one in row.locator("td, th").all()]
    assert [(b["x"], b["width"], b["height"]) for b in after if b] == [
        (b["x"], b["width"], b["height"]) for b in boxes if b
    ]


def test_the_cursor_stays_at_its_iteration_while_lines_grow(visit: Visit, watched: Watched) -> None:
    page = visit()
    chart = page.locator("#loss-chart svg")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect_text(page.locator("#loss-chart .note").first, "Values at iteration 2")
    watched.advance(watched.bf16, 50)
    expect_text(cell(page, watched.bf16, "iteration"), "50 / 400")
    page.wait_for_timeout(300)
    expect_text(page.locator("#loss-chart .note").first, "Values at iteration 2")
    assert page.evaluate("document.activeElement.closest('#loss-chart') !== null"), "the focus too"
    page.keyboard.press("ArrowRight")
    expect_text(page.locator("#loss-chart .note").first, "Values at iteration 3")


def test_everything_is_reached_by_keys(visit: Visit, watched: Watched) -> None:
    captured(watched.mxfp4, iterations=(1, 2))
    page = visit()
    reached: list[str] = []
    page.locator("#rows button").nth(1).focus()
    page.keyboard.press("Enter")
    expect_text(page.locator(".slider output"), "iteration 2, newest")
    page.locator("#map .cell").first.wait_for()
    page.locator(".skip").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        name = "e.getAttribute('aria-label') || e.textContent || e.tagName"
        reached.append(page.evaluate(f"(e => {name})(document.activeElement)"))
    words = " | ".join(reached)
    for name in (
        "Losses",
        "loss, nats",
        "gap, nats",
        "All runs",
        "linear_mxfp4",
        "Captured iteration",
        "L0 ",
    ):
        assert name in words, name
    assert page.locator("#facts dd").first.inner_text() == watched.mxfp4.root.name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 400])
def test_the_page_is_whole_at_every_width(
    visit: Visit, watched: Watched, width: int, scheme: str
) -> None:
    captured(watched.bf16, layers=32)
    page = visit(width, scheme)
    page.locator("#numerics").scroll_into_view_if_needed()
    page.locator("#map .cell").first.wait_for()
    assert page.evaluate(WIDE) <= width
    scrolled = """[...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && ['auto', 'scroll']
      .includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1).map(e => e.className)"""
    assert page.evaluate(scrolled) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 380) is (scheme == "light")
    small = page.locator("main p, main td, main th").evaluate_all(
        "all => all.filter(e => e.textContent && parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0


def test_a_script_in_a_name_is_text(visit: Visit, watched: Watched) -> None:
    watched.runs.add(SCRIPT, [5.0, 4.0], name="m_d_x-00000009")
    folder_of(watched.mxfp4, 1).mkdir(parents=True)
    dossier = Dossier(1, "2026-01-31T12:00:00+00:00", Trigger.LOSS, SCRIPT)
    write_dossier(watched.mxfp4, dossier)
    page = visit()
    page.locator("#rows tr").nth(2).wait_for()
    assert SCRIPT in page.locator("#rows").inner_text()
    assert SCRIPT in page.locator("#dossier-rows").inner_text()
    assert page.locator("main img").count() == 0
    assert page.title().endswith("quantexp watch")


def test_a_page_of_another_origin_reads_nothing(
    watched: Watched, visit: Visit, browser: Browser
) -> None:
    visit()
    assert watched.server is not None
    port = watched.server.port
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{port}/nothing")
    for address in (f"http://localhost:{port}/{TOKEN}/state", f"http://127.0.0.1:{port}/x/state"):
        read = page.evaluate(
            "address => fetch(address).then((r) => r.status, (error) => String(error))", address
        )
        assert read in (403, "TypeError: Failed to fetch")
    context.close()


def test_the_first_picture_comes_before_a_long_file_is_read(
    watched: Watched, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.extras.forensics.watch.metrics.SKETCHED_BYTES", 50_000)
    watched.advance(watched.bf16, 20_000)
    page = visit()
    page.locator("#loss-chart polyline").nth(1).wait_for(state="attached")
    expect_text(cell(page, watched.bf16, "iteration"), "20,000 / 400")
