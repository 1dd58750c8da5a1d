// Numerics by layer: a table of buttons, coloured by one measure; a button shows its tensor's distribution.

// Stops of cividis, which is read alike with any colour vision.
const STOPS = [[0, 34, 78], [33, 59, 110], [76, 85, 108], [108, 110, 114], [142, 138, 121], [178, 167, 112], [217, 199, 89], [254, 232, 56]];
const MEASURES = {
  sqnr_db: { name: "SQNR", unit: "dB", about: "signal to quantisation noise, the worst slot", text: (v) => v.toFixed(1), span: 6 },
  underflow_share: { name: "underflow", unit: "%", about: "non-zero elements that become zero", text: percent, span: 0.01 },
  saturated_share: { name: "saturation", unit: "%", about: "elements beyond the largest value at their scale", text: percent, span: 0.01 },
  abs_max: { name: "amax", unit: "", about: "largest magnitude; colours are logarithmic", text: (v) => short(v, 2), log: true, span: 2 },
  kurtosis: { name: "kurtosis", unit: "", about: "3 for a normal distribution; colours are logarithmic", text: (v) => short(v, 2), log: true, span: 2 },
  zero_share: { name: "zeros", unit: "%", about: "share of elements that are zero", text: percent, span: 0.01 },
};

function percent(share) {
  const value = share * 100;
  return value === 0 ? "0" : value < 0.01 ? "<.01" : String(Number(value.toPrecision(2)));
}

// Where a value lies on its measure's scale, before it is stretched over the colours.
function position(measure, value) {
  if (!MEASURES[measure].log) return value;
  return value > 0 ? Math.log2(value) : null;
}

function rgb(t) {
  const place = Math.max(0, Math.min(1, t)) * (STOPS.length - 1), i = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[i].map((low, c) => Math.round(low + (STOPS[i + 1][c] - low) * (place - i)));
}

// The scale of a measure is that of all runs, so that schemes can be held against each other. It is never narrower than
// the measure's span: a tenth of a decibel is not the difference between dark and bright.
function domainOf(measure) {
  const all = DATA.numerics.flatMap((one) => one.cells.map((cell) => cell[3][measure]));
  const found = all.filter((v) => v !== null && v !== undefined).map((v) => position(measure, v)).filter((v) => v !== null);
  if (!found.length) return null;
  const [low, high] = extent(found), room = Math.max(0, MEASURES[measure].span - (high - low)) / 2;
  const start = MEASURES[measure].unit === "%" ? Math.max(0, low - room) : low - room;
  return [start, Math.max(high, start + MEASURES[measure].span)];
}

function heatmap(holder, numerics) {
  const state = { measure: null, iteration: numerics.iterations.length - 1, chosen: null };
  const present = Object.keys(MEASURES).filter((m) => numerics.cells.some((cell) => cell[3][m] !== null && cell[3][m] !== undefined));
  if (!present.length) return;
  state.measure = present[0];
  const controls = element("div", { class: "controls" });
  controls.append(selector("Measure", present.map((m) => [m, MEASURES[m].name]), state.measure, (value) => {
    state.measure = value;
    paint();
  }));
  if (numerics.iterations.length > 1)
    controls.append(selector("Iteration", numerics.iterations.map((n, i) => [i, n]), state.iteration, (value) => {
      state.iteration = Number(value);
      paint();
    }));
  const table = element("table", { class: "cells" });
  const box = element("div", { class: "box grid", role: "region", "aria-label": "Numerics by layer" }, table);
  const scale = element("div", { class: "scale" });
  const detail = element("div", { class: "detail", "aria-live": "polite" });
  detail.hidden = true;
  const side = element("div", { class: "side" }, scale, detail);
  holder.append(controls, element("div", { class: "beside" }, box, side));
  const buttons = new Map();
  frame(table, numerics, buttons, (row, layer) => {
    state.chosen = [row, layer];
    paint();
    detail.scrollIntoView({ block: "nearest" });
  });

  function paint() {
    const measure = MEASURES[state.measure], domain = domainOf(state.measure);
    const at = new Map();
    for (const [iteration, row, layer, content] of numerics.cells) if (iteration === state.iteration) at.set(`${row} ${layer}`, content);
    for (const [key, button] of buttons) {
      const content = at.get(key), value = content ? content[state.measure] : null;
      fill(button, measure, state.measure, value ?? null, domain, Boolean(content));
      button.setAttribute("aria-pressed", String(state.chosen !== null && key === state.chosen.join(" ")));
    }
    showScale(scale, state.measure, domain);
    if (state.chosen) {
      const [row, layer] = state.chosen;
      showDetail(detail, numerics, row, layer, state.iteration, at.get(`${row} ${layer}`));
    }
  }
  paint();
}

function selector(name, options, chosen, change) {
  const select = element("select", { autocomplete: "off" });
  for (const [value, text] of options) select.append(element("option", { value }, String(text)));
  select.value = String(chosen);
  select.addEventListener("change", () => change(select.value));
  return element("label", {}, `${name} `, select);
}

// The table without its colours; arrow keys move the one cell that Tab leads to.
function frame(table, numerics, buttons, choose) {
  const head = element("tr", {}, element("th", { scope: "col" }, "layer"));
  numerics.layers.forEach((layer) => head.append(element("th", { scope: "col" }, String(layer))));
  table.append(element("thead", {}, head));
  const body = element("tbody");
  let group = null;
  numerics.rows.forEach(([operation, module, tensor], row) => {
    if (operation !== group) {
      group = operation;
      body.append(element("tr", { class: "group" }, element("th", { scope: "rowgroup" }, operation)));
    }
    const line = element("tr", {}, element("th", { scope: "row" }, `${module} ${tensor}`));
    numerics.layers.forEach((layer, column) => {
      const button = element("button", { type: "button", class: "cell", tabindex: row + column === 0 ? "0" : "-1",
        "data-name": `L${layer} ${module} ${operation} ${tensor}` });
      button.addEventListener("click", () => choose(row, column));
      button.addEventListener("keydown", (event) => move(event, buttons, row, column));
      buttons.set(`${row} ${column}`, button);
      line.append(element("td", {}, button));
    });
    body.append(line);
  });
  table.append(body);
}

function move(event, buttons, row, column) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  const next = buttons.get(`${row + step[0]} ${column + step[1]}`);
  event.preventDefault();
  if (!next) return;
  for (const button of buttons.values()) button.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

function fill(button, measure, key, value, domain, there) {
  const place = value === null ? null : position(key, value);
  button.textContent = value === null ? (there ? "-" : "") : measure.text(value);
  const words = value === null ? (there ? `no ${measure.name}` : "not captured") : `${measure.name} ${measure.text(value)} ${measure.unit}`;
  button.setAttribute("aria-label", `${button.dataset.name}, ${words.trim()}`);
  button.title = button.getAttribute("aria-label");
  button.disabled = !there;
  if (place === null || !domain) {
    button.style.backgroundColor = button.style.color = "";
    return;
  }
  const colour = rgb((place - domain[0]) / (domain[1] - domain[0]));
  button.style.backgroundColor = `rgb(${colour.join(",")})`;
  button.style.color = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 120 ? "#000" : "#fff";
}

function showScale(holder, key, domain) {
  const measure = MEASURES[key];
  holder.replaceChildren();
  if (!domain) return;
  const canvas = element("canvas", { width: 160, height: 1, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  for (let x = 0; x < 160; x++) {
    pen.fillStyle = `rgb(${rgb(x / 159).join(",")})`;
    pen.fillRect(x, 0, 1, 1);
  }
  const ends = domain.map((v) => measure.text(measure.log ? 2 ** v : v));
  holder.append(ends[0], canvas, `${ends[1]} ${measure.unit}`, element("span", {}, `${measure.name}: ${measure.about}`));
}

function showDetail(holder, numerics, row, layer, iteration, content) {
  const [operation, module, tensor] = numerics.rows[row];
  holder.hidden = false;
  holder.replaceChildren(element("h3", {}, `Layer ${numerics.layers[layer]}, ${module} ${operation} ${tensor}, iteration ${numerics.iterations[iteration]}`));
  if (!content) {
    holder.append(element("p", { class: "note" }, "Not captured in this iteration."));
    return;
  }
  const numbers = element("tbody");
  const add = (name, value) => numbers.append(element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)));
  add("shape", `${content.shape} ${content.dtype}`.trim());
  for (const [key, name] of [["count", "elements"], ["abs_max", "amax"], ["mean", "mean"], ["std", "standard deviation"], ["min", "min"], ["max", "max"], ["skew", "skew"], ["kurtosis", "kurtosis"], ["nonfinite", "NaN and Inf"]])
    if (content[key] !== undefined) add(name, short(content[key]));
  if (content.zero_share !== undefined) add("zeros", `${percent(content.zero_share)} %`);
  for (const [slot, sqnr, underflow, saturated] of content.operands) {
    const parts = [sqnr === null ? "SQNR undefined" : `SQNR ${sqnr.toFixed(2)} dB`];
    if (underflow !== null) parts.push(`underflow ${percent(underflow)} %`);
    if (saturated !== null) parts.push(`saturation ${percent(saturated)} %`);
    add(slot, parts.join(", "));
  }
  if (content.sampled) add("looked at", `a sample of ${short(content.sampled)} elements`);
  const left = element("div", { class: "numbers" }, element("table", {}, numbers));
  holder.append(element("div", { class: "columns" }, histogram(content), left));
}

// Shares of elements by floor(log2 |x|).
function histogram(content) {
  const [first, counts, below, above] = content.bins, holder = element("div", { class: "histogram" });
  if (first === null || first === undefined || !counts.length) {
    holder.append(element("p", { class: "note" }, "No element is finite and different from zero."));
    return holder;
  }
  const width = 360, height = 220, left = 52, right = 8, top = 10, bottom = 42;
  const total = counts.reduce((a, b) => a + b, 0) + below + above + (content.zero_share || 0) * (content.count || 0);
  const shares = counts.map((n) => n / total), highest = Math.max(...shares);
  const step = (width - left - right) / counts.length;
  const Y = (share) => height - bottom - share / highest * (height - top - bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Distribution of magnitudes, 2^${first} to 2^${first + counts.length}` });
  for (const share of ticks(0, highest * 100, 4).at) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: Y(share / 100), y2: Y(share / 100) }));
    svg.append(drawn("text", { x: left - 6, y: Y(share / 100) + 4, "text-anchor": "end" }, `${short(share, 2)} %`));
  }
  shares.forEach((share, i) => {
    const y = Y(share), x = left + i * step;
    const bar = drawn("rect", { class: "bar", x: x + step * 0.06, y, width: step * 0.88, height: Math.max(share ? 0.7 : 0, height - bottom - y) });
    bar.append(drawn("title", {}, `2^${first + i}: ${short(counts[i])} elements, ${short(share * 100, 3)} %`));
    svg.append(bar);
  });
  for (const exponent of ticks(first, first + counts.length - 1, 6, true).at)
    svg.append(drawn("text", { x: left + (exponent - first + 0.5) * step, y: height - bottom + 16, "text-anchor": "middle" }, String(Math.round(exponent))));
  svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, "floor(log2 |x|)"));
  holder.append(svg);
  const outside = [below ? `${short(below)} non-zero elements below 2^-64` : "", above ? `${short(above)} above 2^31` : ""].filter(Boolean);
  if (outside.length) holder.append(element("p", { class: "note" }, `Not in the bars: ${outside.join(", ")}.`));
  return holder;
}
