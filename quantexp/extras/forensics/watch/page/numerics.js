// The numerics of one run over its captured iterations: the report's map with a slider. At its right end the slider follows
// the newest iteration. The colours cover the iterations that were looked at. Nothing is asked for until the map is near.

const MOST_MAPS = 48;

function numericsPanel(holder, chosen) {
  const controls = element("div", { class: "controls" });
  const runs = element("select", { autocomplete: "off" }), measures = element("select", { autocomplete: "off" });
  const range = element("input", { type: "range", min: "0", max: "0", value: "0", step: "1", "aria-label": "Captured iteration", autocomplete: "off" });
  const where = element("output"), newest = element("button", { type: "button", class: "plain-button" }, "newest");
  controls.append(element("label", {}, "Run ", runs), element("label", {}, "Measure ", measures),
    element("div", { class: "slider" }, range, where, newest));
  const words = element("p", { class: "note", id: "map-words", "aria-live": "polite" });
  const map = element("div", { class: "heatmap" });
  holder.append(controls, words, map);
  const view = mapView(map);
  let key = null, iterations = [], lines = 0, wanted = null, follows = true, isAsking = false, isNear = false, nearness = null, maps = new Map();

  function setRuns(rows) {
    runs.replaceChildren(...rows.map((row) => element("option", { value: row.key }, row.label)));
    if (!rows.some((row) => row.key === key)) choose(rows[0]?.key ?? null);
    else runs.value = key;
  }

  function choose(next) {
    key = next;
    if (key !== null) runs.value = key;
    iterations = [];
    lines = 0;
    wanted = null;
    follows = true;
    maps = new Map();
    map.hidden = true;
    say("");
    showRange();
    chosen(key);
    if (nearness !== null) refresh();
  }

  // Begins with the first refresh, when what is above the map is there.
  function observe() {
    const made = new IntersectionObserver((entries) => {
      isNear = entries.at(-1).isIntersecting;
      refresh();
    }, { rootMargin: "200px" });
    made.observe(holder);
    return made;
  }

  // Looks for newly captured iterations, and for the map that is wanted.
  async function refresh() {
    if (nearness === null) nearness = observe();
    if (isAsking || !isNear || key === null) return;
    isAsking = true;
    const asked = key;
    try {
      const answer = await answerTo(`captured?run=${asked}`);
      if (asked === key) take(answer);
      while (asked === key && wanted !== null && !isHere(wanted)) {
        const iteration = wanted;
        say(`reading iteration ${iteration}`);
        const content = await answerTo(`numerics?run=${asked}&iteration=${iteration}`);
        if (asked !== key) break;
        if (content.error) { say(content.error); break; }
        maps.delete(iteration);
        maps.set(iteration, content);
        for (const old of maps.keys()) if (maps.size > MOST_MAPS && old !== wanted) maps.delete(old);
        if (iteration === iterations.at(-1)) lines = content.lines;
      }
      if (asked === key && wanted !== null && isHere(wanted)) paint();
    } catch {
      // the page says that there is no answer
    } finally {
      isAsking = false;
    }
    if (asked !== key) refresh();
  }

  // The map of the newest iteration is read again when lines have been added, for it may not have been whole.
  function isHere(iteration) {
    const one = maps.get(iteration);
    return one !== undefined && (iteration !== iterations.at(-1) || one.lines >= lines);
  }

  function take(answer) {
    if (answer.error) { say(answer.error); return; }
    if (!answer.iterations.length) { say(answer.error ?? "Nothing has been captured: capture=stats and capture=tensors do."); return; }
    if (follows && wanted !== null && isHeld()) return;
    ({ iterations, lines } = answer);
    if (follows || !iterations.includes(wanted)) wanted = iterations.at(-1);
    showRange();
  }

  function showRange() {
    range.max = String(Math.max(0, iterations.length - 1));
    range.disabled = iterations.length < 2;
    range.value = String(Math.max(0, iterations.indexOf(wanted)));
    const last = iterations.at(-1);
    newest.disabled = follows || !iterations.length;
    const text = wanted === null ? "no iteration" : follows ? `iteration ${short(wanted)}, newest` : `iteration ${short(wanted)} of ${short(last)}`;
    where.textContent = text;
    range.setAttribute("aria-valuetext", text);
  }

  function paint() {
    const { numerics } = maps.get(wanted), all = [...maps.values()].map((one) => one.numerics), present = measuresOf(all);
    const options = present.map((m) => MEASURES[m].name).join();
    if (options !== [...measures.options].map((one) => one.text).join()) {
      const before = measures.value;
      measures.replaceChildren(...present.map((m) => element("option", { value: m }, MEASURES[m].name)));
      measures.value = present.includes(before) ? before : present[0] ?? "";
    }
    map.hidden = !present.length;
    say(present.length ? numerics.notes.map((note) => `${note[0].toUpperCase()}${note.slice(1)}.`).join(" ") : "There are no numbers to show of what was captured.");
    if (present.length) view.show({ numerics, iteration: 0, measure: measures.value, maps: all });
  }

  function say(text) {
    if (words.textContent !== text) words.textContent = text;
  }

  runs.addEventListener("change", () => choose(runs.value));
  measures.addEventListener("change", () => { if (maps.has(wanted)) paint(); });
  range.addEventListener("input", () => {
    wanted = iterations[Number(range.value)];
    follows = wanted === iterations.at(-1);
    showRange();
    if (isHere(wanted)) paint();
    else refresh();
  });
  newest.addEventListener("click", () => {
    follows = true;
    wanted = iterations.at(-1);
    showRange();
    range.focus();
    refresh();
  });
  return { setRuns, choose, refresh };
}
