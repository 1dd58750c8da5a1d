// What the page does: takes the answers of the server, and shows them without moving what is under the pointer. Numbers
// change in their places; rows, names and notes that come or go wait until the pointer leaves what it may be about to press.

const series = new Map();
let content = null, structure = "", isPending = false;
const charts = {};
const rowOf = new Map();

const CELLS = ["state", "iteration", "loss", "gap", "late_gap", "tokens_per_s", "memory", "left", "proof", "about"];
const HEADINGS = ["state", "iteration", "loss", "gap", "late gap", "tokens/s", "memory", "time left", "proof", "what it does"];
const NUMBERS = new Set(["iteration", "loss", "gap", "late_gap", "tokens_per_s", "memory", "left"]);
const BAD = new Set(["failed", "unreadable", "missing", "not finite"]);

function isHeld() {
  return Boolean(document.querySelector("main :is(button, select, input, a, summary, .chart svg):hover")) || document.activeElement?.tagName === "SELECT";
}

function byId(id) { return document.getElementById(id); }

function announce(state, words) {
  const place = byId("connection");
  place.dataset.state = state;
  if (place.textContent !== words) place.textContent = words;
}

function receive(answer) {
  for (const [key, line] of Object.entries(answer.series)) series.set(key, line);
  if (answer.content?.runs) {
    content = answer.content;
    document.title = `${content.summary} - quantexp watch`;
    setText(byId("summary"), content.summary);
  }
  if (content === null) { announce("waiting", "the server looks for runs"); return true; }
  announce("live", content.reading ? `reading the runs: ${content.reading}` : "live");
  const isChanged = Boolean(answer.content?.runs) || Object.keys(answer.series).length > 0;
  if (isChanged || isPending) show(new Set(Object.keys(answer.series)));
  numericsOf.refresh();
  return false;
}

// Everything whose change moves something else.
function structureOf() {
  const lines = shownSeries();
  return JSON.stringify([content.runs.map((row) => [row.key, row.label, row.colour, row.dash]), content.notes, content.missing, content.dossiers,
    content.sweeps.length, content.runs.map((row) => row.notes), ["loss", "gap"].map((kind) => [lines.map((line) => Boolean(line[kind].points[0].length)), lines.some((line) => line[kind].window > 1)])]);
}

function shownSeries() {
  return content.runs.map((row) => series.get(row.key)).filter(Boolean);
}

function show(changed) {
  const wanted = structureOf(), isOther = wanted !== structure;
  isPending = isOther && structure !== "" && isHeld();
  if (!isPending && isOther) {
    structure = wanted;
    layOut();
  }
  for (const row of content.runs) if (rowOf.has(row.key)) fillRow(rowOf.get(row.key), row);
  fillSweeps();
  showFacts();
  if ((isOther || changed.size) && !isPending) drawCharts();
}

function layOut() {
  const keys = new Set(content.runs.map((row) => row.key));
  for (const [key, made] of rowOf) if (!keys.has(key)) { made.line.remove(); rowOf.delete(key); series.delete(key); }
  content.runs.forEach((row, i) => {
    if (!rowOf.has(row.key)) rowOf.set(row.key, newRow(row));
    const { line, name } = rowOf.get(row.key), place = byId("rows").children[i];
    if (place !== line) byId("rows").insertBefore(line, place ?? null);
    name.replaceChildren(swatch(row), nameButton(row));
  });
  numericsOf.setRuns(content.runs);
  const notes = [...content.notes, ...content.missing.map((one) => `${one.name}: ${one.reason}`),
    ...content.runs.flatMap((row) => row.notes.map((words) => `${row.label}: ${words}`))];
  byId("notes").hidden = !notes.length;
  byId("notes").replaceChildren(...notes.map((words) => element("li", {}, words)));
  listed("dossier", content.dossiers.map((one) => [one.run, one.iteration, when(one.seconds), one.trigger, one.words, `dossiers/${one.folder}`]),
    ["run", "iteration", "time", "trigger", "what happened", "in its folder"]);
  listed("sweep", content.sweeps.map(sweepCells), ["sweep", "started", "runs", "states", "finished"]);
}

function sweepCells(one) {
  return [one.name, when(one.started), String(one.runs), one.states, one.finished ? "yes" : "no"];
}

function fillSweeps() {
  content.sweeps.forEach((one, i) => {
    const line = byId("sweep-rows").children[i];
    if (line) sweepCells(one).forEach((text, j) => setText(line.children[j], text));
  });
}

function listed(name, rows, headings) {
  const body = byId(`${name}-rows`);
  byId(`no-${name}s`).hidden = rows.length > 0;
  body.closest(".box").hidden = !rows.length;
  body.replaceChildren(...rows.map((cells) => element("tr", {}, ...cells.map((text, i) =>
    i ? element("td", { "data-label": headings[i] }, text) : element("th", { scope: "row" }, text)))));
}

function when(time) {
  return time ? new Date(typeof time === "number" ? time * 1000 : time).toLocaleString() : "";
}

function newRow(row) {
  const name = element("th", { scope: "row" }), cells = {};
  const line = element("tr", { "data-run": row.key }, name);
  CELLS.forEach((key, i) => {
    cells[key] = key === "about" ? element("div", { class: "clamp" }) : element("span");
    line.append(element("td", { "data-label": HEADINGS[i], ...(NUMBERS.has(key) ? { class: "n" } : {}) }, cells[key]));
  });
  return { line, name, cells };
}

function nameButton(row) {
  const button = element("button", { type: "button", class: "link", title: row.name }, row.label);
  button.addEventListener("click", () => {
    numericsOf.choose(row.key);
    byId("numerics").scrollIntoView();
    byId("map").querySelector("select").focus({ preventScroll: true });
  });
  return button;
}

function swatch(row) {
  const svg = drawn("svg", { class: "swatch", width: 30, height: 10, "aria-hidden": "true" });
  svg.append(drawn("line", { x1: 1, x2: 29, y1: 5, y2: 5, ...strokeOf({ ...row, baseline: row.is_baseline }) }));
  return svg;
}

function fillRow({ cells }, row) {
  for (const key of CELLS) {
    const text = key === "state" && row.phase && row.state === "running" && row.phase !== "training" ? row.phase : key === "gap" && row.is_baseline ? "baseline" : row[key];
    setText(cells[key], text);
    if (cells[key].parentElement.title !== text) cells[key].parentElement.title = text;
    cells[key].classList.toggle("bad", BAD.has(text) || (key === "proof" && text === "declared"));
    cells[key].classList.toggle("good", (key === "proof" && text === "proved"));
  }
}

function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function drawCharts() {
  drawChart("loss-chart", "loss", "loss, nats a token");
  drawChart("gap-chart", "gap", "gap, nats a token");
}

// The cursor stays at its iteration, and the focus in its chart.
function drawChart(id, key, label) {
  const holder = byId(id), hasFocus = holder.contains(document.activeElement), from = charts[id]?.cursor() ?? null;
  const before = [...holder.childNodes];
  charts[id] = lineChart(holder, shownSeries(), key, label, { from, follows: true });
  for (const old of before) old.remove();
  if (hasFocus) holder.querySelector("svg")?.focus({ preventScroll: true });
}

let chosen = null;
function showFacts() {
  for (const [key, { line }] of rowOf) line.setAttribute("aria-current", String(key === chosen));
  const row = content?.runs.find((one) => one.key === chosen);
  if (!row) return;
  const facts = { run: row.name, state: row.state, "what it does": row.about, captured: row.captured, proof: row.proof };
  const pairs = Object.entries(facts).map(([key, text]) => [key, text || "-"]);
  const list = byId("facts");
  if (list.children.length !== pairs.length)
    list.replaceChildren(...pairs.map(([key]) => element("div", {}, element("dt", {}, key), element("dd"))));
  pairs.forEach(([, text], i) => setText(list.children[i].lastChild, text));
}

const numericsOf = numericsPanel(byId("map"), (key) => {
  chosen = key;
  showFacts();
});
let resized = null;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => content && drawCharts(), 150);
});
follow(receive, announce);
