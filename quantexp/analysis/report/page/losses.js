// Lines over iterations, with a cursor that reads off all of them: the pointer, or the arrow keys.

function lineChart(holder, series, key, yLabel) {
  const lines = series.filter((line) => line[key].points[0].length).map((line) => ({ ...line, ...line[key] }));
  for (const line of lines) line.read = line.window > 1 ? line.mean : line.points;
  if (!lines.length) {
    holder.append(element("p", { class: "note" }, "No run has a loss to draw."));
    return;
  }
  const narrow = holder.clientWidth < 600;
  const width = narrow ? 400 : 1000, height = narrow ? 260 : 340;
  const left = 58, right = 30, top = 12, bottom = 42;
  const xs = lines.flatMap((line) => line.points[0]), ys = lines.flatMap((line) => line.points[1]);
  let [x0, x1] = extent(xs), [y0, y1] = extent(key === "gap" ? [0, ...ys] : ys);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const room = (y1 - y0 || Math.abs(y1) || 1) * 0.05;
  y0 -= room; y1 += room;
  const X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
    "aria-label": `${yLabel} of ${lines.length} runs over iterations ${x0} to ${x1}; arrow keys read off values` });

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
  for (const line of lines) {
    const path = ([x, y]) => x.map((at, i) => `${X(at).toFixed(1)},${Y(y[i]).toFixed(1)}`).join(" ");
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
  const values = lines.map((line) => {
    const swatch = drawn("svg", { width: 34, height: 10, "aria-hidden": "true" },
      drawn("line", { x1: 1, x2: 33, y1: 5, y2: 5, ...strokeOf(line) }));
    const value = element("span", { class: "value" });
    legend.append(element("li", {}, swatch, element("span", {}, line.label), value));
    return value;
  });

  const all = [...new Set(lines.flatMap((line) => line.read[0]))].sort((a, b) => a - b);
  let at = all.length - 1;
  const read = (index, quiet) => {
    at = Math.max(0, Math.min(all.length - 1, index));
    if (!quiet) {
      cursor.setAttribute("x1", X(all[at]));
      cursor.setAttribute("x2", X(all[at]));
      cursor.setAttribute("visibility", "visible");
    }
    lines.forEach((line, i) => {
      const place = line.read[0].indexOf(all[at]);
      values[i].textContent = place < 0 ? "-" : signed(line.read[1][place], key);
    });
    where.textContent = `at iteration ${all[at]}`;
  };
  const where = element("p", { class: "note", "aria-live": "polite" });
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const x = x0 + ((event.clientX - frame.left) / frame.width * width - left) / (width - left - right) * (x1 - x0);
    read(nearest(all, x));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { read(at + step); event.preventDefault(); }
  });
  holder.append(svg, where, legend);
  const windows = lines.map((line) => line.window).filter((window) => window > 1);
  if (windows.length)
    holder.append(element("p", { class: "note" }, `Faint: every iteration. Strong, and the numbers: the mean over ${Math.max(...windows)} iterations around each.`));
  read(at, true);
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

function nearest(sorted, x) {
  let best = 0;
  sorted.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(sorted[best] - x)) best = i; });
  return best;
}
