// Lines over iterations, named at their ends, with a cursor that reads off all of them: the pointer, or the arrow keys.
// A narrow page has no room beside the chart: there the names stand below it. With `from`, an iteration, the cursor stands
// there; with `follows` it goes back to the end of the lines when the pointer leaves. What is returned tells where it stands,
// null at the end.

const NAME_STEP = 16;

function lineChart(holder, series, key, yLabel, { from = null, follows = false } = {}) {
  const lines = series.filter((line) => line[key].points[0].length).map((line) => ({ ...line, ...line[key] }));
  for (const line of lines) line.read = line.window > 1 ? line.mean : line.points;
  if (!lines.length) {
    holder.append(element("p", { class: "note" }, `No run has a ${key} to draw.`));
    return { cursor: () => null };
  }
  const narrow = holder.clientWidth < 600;
  const named = !narrow && lines.length * NAME_STEP < 640;
  const longest = Math.max(...lines.map((line) => line.label.length));
  const width = narrow ? 400 : Math.max(720, Math.min(1440, holder.clientWidth));
  const height = narrow ? 280 : Math.max(340, named ? lines.length * NAME_STEP + 70 : 0);
  const left = 68, right = named ? Math.min(0.4 * width, longest * 7.8 + 122) : 16, top = 12, bottom = 42;
  const xs = lines.flatMap((line) => line.points[0]);
  const ys = lines.flatMap((line) => [...line.points[1], ...(line.band ? [...line.band[1], ...line.band[2]] : [])]);
  let [x0, x1] = extent(xs), [y0, y1] = extent(key === "gap" ? [0, ...ys] : ys);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const room = (y1 - y0 || Math.abs(y1) || 1) * 0.05;
  y0 -= room; y1 += room;
  const X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
    "aria-label": `${yLabel} of ${lines.map((line) => line.label).join(", ")} over iterations ${x0} to ${x1}; arrow keys read off values` });

  const yTicks = ticks(y0, y1, 6), xTicks = ticks(x0, x1, narrow ? 5 : 10, true);
  for (const y of yTicks.at) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }));
    svg.append(drawn("text", { x: left - 7, y: Y(y) + 4, "text-anchor": "end" }, y.toFixed(yTicks.digits)));
  }
  for (const x of xTicks.at)
    svg.append(drawn("text", { x: X(x), y: height - bottom + 17, "text-anchor": "middle" }, String(Math.round(x))));
  svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "iteration"));
  const middle = (top + height - bottom) / 2;
  svg.append(drawn("text", { x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, yLabel));
  if (key === "gap") svg.append(drawn("line", { class: "zero", x1: left, x2: width - right, y1: Y(0), y2: Y(0) }));

  const strong = [];
  const path = ([x, y]) => x.map((at, i) => `${X(at).toFixed(1)},${Y(y[i]).toFixed(1)}`).join(" ");
  for (const line of lines) {
    if (line.band) {
      const [x, low, high] = line.band;
      svg.append(drawn("polygon", { points: `${path([x, low])} ${path([[...x].reverse(), [...high].reverse()])}`, fill: line.colour, "fill-opacity": 0.16 }));
    }
    const faint = line.window > 1 ? { "stroke-width": 1, "stroke-opacity": 0.22, "stroke-dasharray": "none" } : {};
    svg.append(drawn("polyline", { points: path(line.points), ...strokeOf(line), ...faint }));
    if (line.window > 1) strong.push(drawn("polyline", { points: path(line.mean), ...strokeOf(line) }));
    if (line.points[0].length === 1)
      svg.append(drawn("circle", { cx: X(line.points[0][0]), cy: Y(line.points[1][0]), r: 4, fill: line.colour }));
  }
  svg.append(...strong);
  const cursor = drawn("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  const legend = element("ul", { class: "legend" });
  const values = named ? namesAtEnds(svg, lines, X, Y, width - right, [top + 6, height - bottom]) : namesBelow(legend, lines);

  const all = [...new Set(lines.flatMap((line) => line.read[0]))].sort((a, b) => a - b);
  let at = all.length - 1, isRead = false;
  const read = (index, quiet) => {
    at = Math.max(0, Math.min(all.length - 1, index));
    isRead = !quiet;
    cursor.setAttribute("x1", X(all[at]));
    cursor.setAttribute("x2", X(all[at]));
    cursor.setAttribute("visibility", quiet ? "hidden" : "visible");
    lines.forEach((line, i) => {
      const place = quiet && follows ? line.read[0].length - 1 : placeOf(line, all[at]);
      values[i].textContent = place < 0 ? "no value" : signed(line.read[1][place], key);
    });
    where.textContent = quiet && follows ? "Values at the end of each line" : `Values at iteration ${all[at]}`;
  };
  const where = element("p", { class: "note", "aria-live": "polite" });
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const x = x0 + ((event.clientX - frame.left) / frame.width * width - left) / (width - left - right) * (x1 - x0);
    read(nearest(all, x));
  });
  if (follows) svg.addEventListener("pointerleave", () => read(all.length - 1, true));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { read(at + step); event.preventDefault(); }
  });
  holder.append(svg, where);
  if (!named) holder.append(legend);
  const windows = lines.map((line) => line.window).filter((window) => window > 1);
  if (windows.length)
    holder.append(element("p", { class: "note" }, `Faint: every iteration. Strong, and the numbers: the mean over ${Math.max(...windows)} iterations around each.`));
  if (lines.some((line) => line.band))
    holder.append(element("p", { class: "note" }, "Of several seeds the line is the mean, and the band reaches from the least to the largest."));
  if (from === null) read(at, true);
  else read(nearest(all, from));
  return { cursor: () => (isRead ? all[at] : null) };
}

// The names beside the ends of their lines, moved apart where they would lie over each other; the elements for values.
function namesAtEnds(svg, lines, X, Y, edge, [top, bottom]) {
  const ends = lines.map((line, i) => ({ line, i, end: Y(line.read[1].at(-1)), x: X(line.read[0].at(-1)) })).sort((a, b) => a.end - b.end);
  const at = ends.map(({ end }) => Math.max(top, end));
  for (let i = 1; i < at.length; i++) at[i] = Math.max(at[i], at[i - 1] + NAME_STEP);
  if (at.length && at.at(-1) > bottom) {
    at[at.length - 1] = bottom;
    for (let i = at.length - 2; i >= 0; i--) at[i] = Math.min(at[i], at[i + 1] - NAME_STEP);
  }
  const group = drawn("g", { class: "ends" }), values = [];
  ends.forEach(({ line, i, end, x }, place) => {
    const y = at[place];
    group.append(drawn("path", { class: "leader", d: `M${x + 2},${end} L${edge + 10},${y} H${edge + 14}` }),
      drawn("line", { x1: edge + 14, x2: edge + 42, y1: y, y2: y, ...strokeOf(line) }));
    values[i] = drawn("tspan", { class: "value", dx: 7 });
    group.append(drawn("text", { x: edge + 48, y: y + 4 }, drawn("tspan", { class: "name" }, line.label), values[i]));
  });
  svg.append(group);
  return values;
}

function namesBelow(legend, lines) {
  return lines.map((line) => {
    const swatch = drawn("svg", { width: 34, height: 10, "aria-hidden": "true" },
      drawn("line", { x1: 1, x2: 33, y1: 5, y2: 5, ...strokeOf(line) }));
    const value = element("span", { class: "value" });
    legend.append(element("li", {}, swatch, element("span", {}, line.label), value));
    return value;
  });
}

function strokeOf(line) {
  const made = { stroke: line.colour, "stroke-width": line.baseline ? 3 : 2, fill: "none", "stroke-linejoin": "round" };
  if (line.dash.length) made["stroke-dasharray"] = line.dash.map((d) => d * 2).join(" ");
  return made;
}

function signed(value, key) {
  return (key === "gap" && value > 0 ? "+" : "") + value.toFixed(4);
}

function extent(numbers) {
  return numbers.reduce(([low, high], n) => [Math.min(low, n), Math.max(high, n)], [Infinity, -Infinity]);
}

// The place of an iteration on a line, of a mean that of the iteration nearest to it; -1 where the line has no value.
function placeOf(line, iteration) {
  const x = line.read[0];
  if (line.window > 1 && x[0] <= iteration && iteration <= x.at(-1)) return nearest(x, iteration);
  return x.indexOf(iteration);
}

function nearest(sorted, x) {
  let best = 0;
  sorted.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(sorted[best] - x)) best = i; });
  return best;
}
