// A map of numerics: for each pass layers across and slots (or tensors) down, coloured by one measure. A cell is a
// button; it shows its tensor's distribution. A page of many layers has narrow cells, whose numbers are in the title.

const NARROW = 34;

// The measures that have a number in one of the maps.
function measuresOf(maps) {
  return Object.keys(MEASURES).filter((m) => maps.some((one) => one.cells.some((cell) => cell[3][m] !== null && cell[3][m] !== undefined)));
}

// Legend, map, the worst cells and the chosen one; `show` paints what it is given: { numerics, iteration, measure, maps },
// of which `iteration` is an index, and `maps` are the numerics whose range the colours cover.
function mapView(holder) {
  const legend = element("div", { class: "scale" });
  const panels = element("div", { class: "maps" });
  const worst = element("div", { class: "worst" });
  const detail = element("div", { class: "detail", "aria-live": "polite" });
  detail.hidden = true;
  holder.append(legend, panels, worst, detail);
  let shown = null, chosen = null, layout = "", buttons = new Map();
  const watched = new ResizeObserver(() => fit(panels, shown.numerics.layers));

  function show(next) {
    shown = next;
    const { rows, layers } = shown.numerics;
    const wanted = JSON.stringify([Boolean(MEASURES[shown.measure].slot), rows, layers]);
    if (wanted !== layout) {
      const name = chosen && buttons.get(chosen)?.dataset.name;
      layOut();
      chosen = [...buttons.keys()].find((key) => name && buttons.get(key).dataset.name === name) ?? null;
      layout = wanted;
    }
    paint();
  }

  function choose(row, layer) {
    chosen = `${row} ${layer}`;
    paint();
    detail.scrollIntoView({ block: "nearest" });
  }

  function layOut() {
    const { numerics, measure } = shown, isSlot = Boolean(MEASURES[measure].slot);
    const rows = numerics.rows.map((row, index) => ({ ...row, index })).filter((row) => row.is_slot === isSlot);
    panels.classList.toggle("long", numerics.layers.length > 12);
    buttons = new Map();
    panels.replaceChildren(...[...new Set(rows.map((row) => row.operation))].map((operation) =>
      panel(operation, rows.filter((row) => row.operation === operation), numerics.layers, buttons, choose)));
    for (const [index, row] of rows.entries())
      numerics.layers.forEach((_, layer) => buttons.get(`${row.index} ${layer}`).addEventListener("keydown", (event) =>
        move(event, buttons, rows, index, layer)));
    watched.disconnect();
    for (const one of panels.children) watched.observe(one);
  }

  function paint() {
    const { numerics, iteration, measure, maps } = shown;
    const domain = domainOf(measure, maps);
    const at = new Map(), states = new Set(), found = [];
    let hasZero = false;
    for (const [i, row, layer, content] of numerics.cells) if (i === iteration) at.set(`${row} ${layer}`, content);
    for (const [key, button] of buttons) {
      const content = at.get(key), value = content?.[measure] ?? null;
      fill(button, measure, value, content, domain);
      button.setAttribute("aria-pressed", String(key === chosen));
      if (value !== null) found.push([value, key, button]);
      else if (content?.state) states.add(content.state);
      hasZero = hasZero || (value === 0 && Boolean(MEASURES[measure].log));
    }
    const all = [...buttons.values()];
    if (!all.some((button) => button.getAttribute("tabindex") === "0" && !button.disabled))
      all.find((button) => !button.disabled)?.setAttribute("tabindex", "0");
    showLegend(legend, measure, domain, states, hasZero);
    showWorst(worst, measure, found, choose);
    detail.hidden = !chosen;
    if (chosen) {
      const [row, layer] = chosen.split(" ").map(Number);
      showDetail(detail, numerics, row, layer, iteration, at);
    }
  }
  return { show };
}

function selector(name, options, chosen, change) {
  const select = element("select", { autocomplete: "off" });
  for (const [value, text] of options) select.append(element("option", { value }, String(text)));
  select.value = String(chosen);
  select.addEventListener("change", () => change(select.value));
  return element("label", {}, `${name} `, select);
}

// The map of one pass without its colours.
function panel(operation, rows, layers, buttons, choose) {
  const head = element("tr", {}, element("th", { scope: "col", class: "corner" }, "layer"));
  layers.forEach((layer) => head.append(element("th", { scope: "col", class: "layer" }, String(layer))));
  const body = element("tbody");
  let module = null;
  for (const row of rows) {
    const line = element("tr", row.module === module ? {} : { class: "first" },
      element("th", { scope: "row" }, element("span", { class: "module" }, row.module), ` ${row.name}`));
    module = row.module;
    layers.forEach((layer, column) => {
      const button = element("button", { type: "button", class: "cell", tabindex: "-1", "data-name": `${typeof layer === "number" ? `L${layer} ` : ""}${row.module} ${operation} ${row.name}` });
      button.addEventListener("click", () => choose(row.index, column));
      buttons.set(`${row.index} ${column}`, button);
      line.append(element("td", {}, button));
    });
    body.append(line);
  }
  return element("section", { class: "map", "aria-label": operation }, element("h3", {}, operation),
    element("table", { class: "cells" }, element("thead", {}, head), body));
}

// Numbers where a cell has room for them, and as many layers' names as fit.
function fit(panels, layers) {
  for (const one of panels.children) {
    const cell = one.querySelector("td");
    if (!cell || !cell.clientWidth) continue;
    one.classList.toggle("narrow", cell.clientWidth < NARROW);
    const step = Math.ceil(26 / cell.clientWidth);
    one.querySelectorAll(".layer").forEach((head, i) => { head.textContent = i % step ? "" : String(layers[i]); });
  }
}

function move(event, buttons, rows, index, column) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  let next = null;
  for (let i = index + step[0], j = column + step[1]; rows[i]; i += step[0], j += step[1]) {
    next = buttons.get(`${rows[i].index} ${j}`);
    if (!next || !next.disabled) break;
  }
  if (!next || next.disabled) return;
  for (const button of buttons.values()) button.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

function fill(button, key, value, content, domain) {
  const measure = MEASURES[key], [sign, why] = STATES[content?.state] ?? ["", content ? `no ${measure.name}` : "not captured"];
  button.textContent = value === null ? sign : (measure.cell ?? measure.text)(value);
  let words = value === null ? why : `${measure.name} ${measure.text(value)} ${measure.unit}`.trim();
  if (content?.format && measure.slot) words += `, ${content.format}`;
  if (content?.experts) words += `, ${content.experts} experts`;
  if (content?.reason) words += `: ${content.reason}`;
  button.setAttribute("aria-label", `${button.dataset.name}, ${words}`);
  button.title = button.getAttribute("aria-label");
  button.disabled = !content;
  button.classList.toggle("signed", value === null);
  const place = value === null ? null : position(key, value);
  if (place === null || !domain) {
    button.style.backgroundColor = button.style.color = "";
    return;
  }
  const colour = rgb((place - domain[0]) / (domain[1] - domain[0]));
  button.style.backgroundColor = `rgb(${colour.join(",")})`;
  button.style.color = luminance(colour) > 0.179 ? "#000" : "#fff";
}

// The cells to look at first, as buttons that choose them: those that the measure's `least` and more parts from the
// median, as in the picture. Nearer ones are in no order of merit.
function showWorst(holder, key, found, choose) {
  const measure = MEASURES[key], sign = measure.worst === "low" ? 1 : -1;
  const place = (value) => position(key, value) ?? -Infinity;
  const ascending = found.map(([value]) => value).sort((a, b) => a - b);
  const median = ascending[Math.floor(ascending.length / 2)];
  const worst = found.filter(([value]) => sign * (place(median) - place(value)) > measure.least)
    .sort((a, b) => sign * (a[0] - b[0])).slice(0, 5);
  holder.replaceChildren();
  if (!found.length) return;
  holder.append(element("h3", {}, `${sign > 0 ? "Lowest" : "Highest"} ${measure.name}`));
  if (!worst.length) {
    const far = measure.log ? `more than ${2 ** measure.least} times` : `more than ${measure.least} ${measure.unit} ${sign > 0 ? "below" : "above"}`;
    holder.append(element("p", {}, `none is ${far} the median, ${measure.text(median)} ${measure.unit}`.trimEnd()));
    return;
  }
  const list = element("ol", {});
  for (const [value, at, button] of worst) {
    const [row, layer] = at.split(" ").map(Number);
    const link = element("button", { type: "button", class: "link" }, button.dataset.name);
    link.addEventListener("click", () => choose(row, layer));
    list.append(element("li", {}, link, ` ${measure.text(value)} ${measure.unit}`.trimEnd()));
  }
  holder.append(list);
}
