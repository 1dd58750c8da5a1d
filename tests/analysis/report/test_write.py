from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quantexp.analysis.report.parts import embedded
from quantexp.analysis.report.write import write_report
from quantexp.cli.main import main
from quantexp.errors import RunError
from quantexp.folders import conf_dir
from quantexp.runs.status import State
from tests.analysis.compare.runs import Runs, change_json

from .captured import captured, write

SCRIPT = "<script>alert(1)</script>"
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """The elements of a page, its visible text, and its scripts."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._inside = "", ""
        self.scripts: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def test_a_run_has_every_part(runs: Runs) -> None:
    run = runs.add("FA_linear_mxfp8")
    captured(run)
    run.figures.mkdir()
    (run.figures / "quick_analysis.png").write_bytes(PNG)
    row = {
        "format": "mxfp8",
        "kernel": "reference",
        "oracle": "gold",
        "cases": 4096,
        "mismatches": 0,
    }
    certificate = {"rows": [row], "torch": "2.13.0", "device": "cpu", "created": "2026-01-01"}
    verified = {"state": "verified", "words": "verified on 2026", "certificate": certificate}
    change_json(run.provenance, verified=verified)
    file = write_report([run.root], run.root)
    assert file == run.report
    text = " ".join(Page(file).text.split())
    for words in (
        "completed",
        "llama32-1b cut to 2 of 16 layers",
        "wikipedia (built-in sample)",
        "iteration 4 of 4, loss 3.5000, lowest 3.5000",
        "2 sequences of 128 tokens, micro-batches of 2",
        "8 of 8 quantised slots engaged",
        "mxfp8_e4m3 32 rceil even",
        "verified on 2026",
        "The certificate: 1 comparisons, torch 2.13.0, cpu, 2026-01-01",
        "4,096",
        "quick_analysis.png",
        "name: FA_linear_mxfp8",
        "quantexp quant=FA_linear_mxfp8",
        "identity.training.seed",
        "abc123",
        "on cpu of node2",
    ):
        assert words in text, words
    assert "no baseline" not in text, "one run alone is not compared"


def test_a_sweep_has_a_table_its_warnings_and_every_run(runs: Runs) -> None:
    runs.add()
    runs.add("FA_mxfp8", [6.0, 5.5, 4.5, 4.0])
    runs.add("linear_mxfp8", [6.0, 5.5], state=State.FAILED, proved=False)
    file = write_report([runs.root], runs.root / "sweep.html")
    text = " ".join(Page(file).text.split())
    assert "3 runs of llama32-1b" in text
    assert "One seed for each scheme: no gap can be told from noise" in text
    assert "+0.5000" in text
    assert "linear_mxfp8 is failed at iteration 2" in text
    assert "not a matched pair" in text
    assert "L0 qkv fprop.x: 3 elements are off the grid" in text
    assert text.count("Precision map and its proof") == 3


def test_several_seeds_have_a_table_of_verdicts_with_the_floors(runs: Runs) -> None:
    folders = [runs.add(losses=[6.0, 5.0, 4.0, 3.5 + seed / 1e6], seed=seed) for seed in (1, 2, 3)]
    folders += [
        runs.add("FA_mxfp8", [6.0, 5.0, 4.0, 3.6 + seed / 100], seed=seed) for seed in (1, 2, 3)
    ]
    folders.append(runs.add(losses=[6.0, 5.0, 4.0, 3.506], seed=1, chaos=1))
    file = write_report([run.root for run in folders], runs.root / "sweep.html")
    text = " ".join(Page(file).text.split())
    assert "Differences from noise The mean gap of iterations 4 to 4" in text
    assert "by more than 0.0762 because last bits of their initial weights do (runs: 1)" in text
    row = "FA_mxfp8 3 +0.1200 +0.0952 to +0.1448 +3.43% 0.0023 above bf16"
    assert row.replace(" ", "") in text.replace(" ", "")


def test_a_page_loads_nothing_from_outside(runs: Runs) -> None:
    run = runs.add("FA_mxfp8")
    captured(run)
    page = Page(write_report([run.root], run.root))
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        for name in ("src", "href", "srcset", "action"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("#", "data:image/png;base64,")), value
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    (policy,) = (a["content"] for _, a in page.tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "url(" not in run.report.read_text().split("</style>")[0]


def test_text_of_a_run_is_never_markup(runs: Runs) -> None:
    run = runs.add(SCRIPT, name="run-<script>alert(1)<!--", settings={"format": SCRIPT})
    lines = captured(run, layers=1)
    lines[0]["module"] = lines[0]["tensor"] = SCRIPT + "<!--<script>"
    write(run, lines)
    source = {"commit": SCRIPT, "diff": f"+{SCRIPT}", "snapshot": "1"}
    change_json(run.provenance, source=source, command=["quantexp", SCRIPT], host=SCRIPT)
    run.config.write_text(run.config.read_text() + f"note: '{SCRIPT}'\n")
    figures = run.figures / "<img src=x onerror=alert(1)>.png"
    run.figures.mkdir()
    figures.write_bytes(PNG)
    for sources in ([run.root], [run.root, runs.add().root]):
        page = Page(write_report(sources, runs.root / "page.html"))
        assert len(page.scripts) == 2
        assert "alert(1)" not in page.scripts[1]
        assert json.loads(page.scripts[0])["numerics"][0]["rows"]
        assert "<" not in page.scripts[0]
        assert SCRIPT in page.text
        (image,) = (a for tag, a in page.tags if tag == "img")
        assert str(image["src"]).startswith("data:")


def test_json_in_the_page_reads_back_and_holds_no_markup() -> None:
    content = {"a": "</script><!-- & \u2028 é", "b": [1, None]}
    text = str(embedded(content))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == content | {"a": r"</script><!-- & \u2028 é"}, (
        "hidden characters by their codes"
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"a": float("nan")})


def test_the_page_reads_the_same_in_any_encoding(runs: Runs) -> None:
    file = write_report([runs.add("größe Δ").root], runs.root)
    assert file.read_bytes().isascii()
    assert "größe Δ" in Page(file).text


def test_some_of_many_figures_are_folded_and_those_without_room_are_named(runs: Runs) -> None:
    run = runs.add()
    run.figures.mkdir()
    for i in range(3):
        (run.figures / f"{i}.png").write_bytes(PNG)
    for i in range(15):
        (run.figures / f"bad{i:02}.png").write_bytes(b"no picture")
    page = Page(write_report([run.root], run.root))
    text = " ".join(page.text.split())
    assert sum(tag == "img" for tag, _ in page.tags) == 3
    assert "2 more" in text
    assert "bad00.png, bad01.png" in text
    assert "bad11.png, and 3 more." in text


def test_nearly_empty_folders_have_a_page(runs: Runs) -> None:
    run = runs.add("FA_mxfp8")
    for file in (run.config, run.metrics, run.precision, run.provenance):
        file.unlink()
    text = Page(write_report([run.root], run.root)).text
    assert "no proof: the run has no precision.json" in text
    assert "There is no provenance.json." in text
    assert "Nothing was captured" in text


def test_ten_schemes_of_many_layers_stay_below_ten_megabytes(runs: Runs) -> None:
    names = [path.stem for path in (conf_dir() / "quant").glob("*.yaml")]
    tensors = tuple(
        (operation, f"{module}{i}", tensor)
        for operation in ("forward", "backward")
        for module in ("qkv", "proj", "fc1", "fc2")
        for i in range(2)
        for tensor in ("input", "weight")
    )
    lines = None
    for name in names:
        run = runs.add(name, [5.0 - i / 1e4 for i in range(2000)])
        if lines is None:
            lines = captured(run, 32, tensors=tensors)
            manifest = (run.tensors / "manifest.jsonl").read_bytes()
        run.tensors.mkdir(exist_ok=True)
        (run.tensors / "manifest.jsonl").write_bytes(manifest)
        run.figures.mkdir()
        for i in range(4):
            (run.figures / f"{i}.png").write_bytes(PNG + bytes(250_000))
    file = write_report([runs.root], runs.root)
    assert 4e6 < file.stat().st_size < 10e6
    data = json.loads(Page(file).scripts[0])
    assert len(data["numerics"]) == len(names)
    for one in data["numerics"]:
        tensor_cells = [cell for cell in one["cells"] if not one["rows"][cell[1]]["is_slot"]]
        assert 800 < len(tensor_cells) <= 1000


def test_a_state_is_not_repeated(runs: Runs) -> None:
    run = runs.add("FA_mxfp8")
    words = "not verified: run quantexp verify"
    change_json(
        run.provenance, verified={"state": "not verified", "words": words, "certificate": None}
    )
    text = " ".join(Page(write_report([run.root], run.root)).text.split())
    assert text.count(words) == 2, "in the overview and in its own part"
    assert "not verified not verified" not in text
    assert text.count("not verified") == 2


def test_settings_that_all_runs_of_a_sweep_share_appear_once(runs: Runs) -> None:
    runs.add()
    runs.add("FA_mxfp8")
    text = " ".join(Page(write_report([runs.root], runs.root)).text.split())
    assert text.count("2 sequences of 128 tokens") == 1
    assert "In all runs statecompleted" in text


def test_every_cell_of_a_wide_table_names_its_column_for_narrow_pages(runs: Runs) -> None:
    runs.add()
    runs.add("FA_mxfp8")
    page = write_report([runs.root], runs.root).read_text()
    tables = re.findall(r'<table class="stack">.*?</table>', page, re.DOTALL)
    assert len(tables) == 4, "all runs, their differences, and the precision map of each"
    for table in tables:
        headings = re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', table)
        labels = re.findall(r'<td data-label="([^"]+)"', table)
        assert labels
        assert len(labels) == table.count("<td")
        # "format, block, scale rule, rounding" is `format` on narrow pages
        assert set(labels) <= {heading.split(",")[0] for heading in headings}


def test_every_figure_can_be_seen_at_its_full_size_without_a_script(runs: Runs) -> None:
    run = runs.add()
    run.figures.mkdir()
    (run.figures / "quick_analysis.png").write_bytes(PNG)
    page = Page(write_report([run.root], run.root))
    (figure,) = (a["id"] for tag, a in page.tags if tag == "figure")
    links = {a.get("class"): a["href"] for tag, a in page.tags if tag == "a" and a.get("class")}
    assert links["full"] == f"#{figure}"
    assert links["fitted"] == "#figures-0"


@pytest.mark.parametrize("what", ["run", "folder", "sweep", "several", "out"])
def test_the_page_is_written_to_its_place(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    first, second = runs.add(), runs.add("FA_mxfp8")
    sweep = in_tmp / "runs" / "sweeps" / "1.json"
    sweep.parent.mkdir()
    sweep.write_text(json.dumps({"runs": [{"run": first.root.name}, {"run": second.root.name}]}))
    words, place = {
        "run": (["FA_mxfp8"], second.report),
        "folder": (["runs"], runs.root / "report.html"),
        "sweep": ([str(sweep)], sweep.with_suffix(".html")),
        "several": (["FA_mxfp8", "bf16"], in_tmp / "report.html"),
        "out": (["FA_mxfp8", "out=a/b.html"], in_tmp / "a" / "b.html"),
    }[what]
    assert main(["report", *words]) == 0
    assert place.is_file()
    assert place.name in capsys.readouterr().out


def test_report_without_runs_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "out=x"])
    assert ended.value.code == 2
    assert "report takes runs: DIR ..." in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused(runs: Runs) -> None:
    run = runs.add()
    with pytest.raises(RunError, match=r"the report cannot be written to .*; give out=PATH"):
        write_report([run.root], run.config / "report.html")


def test_an_empty_sweep_is_refused(runs: Runs, tmp_path: Path) -> None:
    sweep = tmp_path / "1.json"
    sweep.write_text('{"runs": []}')
    with pytest.raises(RunError, match="there is no run to compare"):
        write_report([sweep], tmp_path)


def test_ids_on_the_page_are_unique_and_every_link_has_its_target(runs: Runs) -> None:
    for run in (runs.add(), runs.add("FA_mxfp8")):
        run.figures.mkdir()
        (run.figures / "quick_analysis.png").write_bytes(PNG)
    tags = Page(write_report([runs.root], runs.root)).tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    links = {str(a["href"]).removeprefix("#") for _, a in tags if "href" in a}
    assert {"content", "overview", "losses", "figures-0", "figures-1"} <= links <= set(ids)


def test_a_run_without_a_finite_loss_shows_its_iterations(runs: Runs) -> None:
    runs.add("FA_mxfp8", [None, None, None])
    runs.add()
    path = write_report([runs.root], runs.root)
    text = " ".join(Page(path).text.split())
    assert "iteration 3 of 4, no finite loss" in text
    assert "no iteration" not in text
    assert '<td data-label="iterations" class="n">3</td>' in path.read_text()
