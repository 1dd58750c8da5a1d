// What is known of one cell: its numbers, the slots of its tensor, and its distribution over powers of two.

// "Layer 3", or "Output layer".
function layerTitle(layer) {
  return typeof layer === "number" ? `Layer ${layer}` : "Output layer";
}

function showDetail(holder, numerics, row, layer, iteration, at) {
  const { operation, module, name } = numerics.rows[row];
  const content = at.get(`${row} ${layer}`);
  holder.replaceChildren(element("h3", {}, `${layerTitle(numerics.layers[layer])}, ${module} ${operation} ${name}, iteration ${numerics.iterations[iteration]}`));
  if (!content) {
    holder.append(element("p", { class: "note" }, "Not captured in this iteration."));
    return;
  }
  const tensorRow = content.of ?? row, tensor = at.get(`${tensorRow} ${layer}`);
  const numbers = element("tbody");
  const add = (key, value) => numbers.append(element("tr", {}, element("th", { scope: "row" }, key), element("td", {}, value)));
  if (content.of !== undefined) add("tensor", `${numerics.rows[tensorRow].operation} ${numerics.rows[tensorRow].name}`);
  numerics.rows.forEach((other, index) => {
    const slot = at.get(`${index} ${layer}`);
    if (other.is_slot && slot && slot.of === tensorRow) add(other.name, slotWords(slot));
  });
  if (tensor) tensorNumbers(tensor, add);
  const left = element("div", { class: "numbers" }, element("table", {}, numbers));
  holder.append(element("div", { class: "columns" }, tensor ? histogram(tensor) : "", left));
}

function slotWords(slot) {
  const parts = slot.format ? [slot.format] : [];
  if (slot.sqnr_db === undefined) parts.push((STATES[slot.state] ?? ["", "no SQNR"])[1]);
  else parts.push(`SQNR ${slot.sqnr_db.toFixed(2)} dB`);
  if (slot.underflow_share !== undefined) parts.push(`underflow ${percent(slot.underflow_share)} %`);
  if (slot.saturated_share !== undefined) parts.push(`saturation ${percent(slot.saturated_share)} %`);
  if (slot.worst) parts.push(`the worst of ${slot.experts} experts is ${slot.worst}${slot.best_db === undefined ? "" : `, the best has ${slot.best_db.toFixed(2)} dB`}`);
  if (slot.sampled) parts.push(`of ${short(slot.sampled)} elements`);
  if (slot.reason) parts.push(slot.reason);
  return parts.join(", ");
}

function tensorNumbers(tensor, add) {
  add("shape", `${tensor.shape} ${tensor.dtype}`.trim());
  if (tensor.experts) add("experts", `${tensor.experts} together${tensor.largest ? `, the largest element is in ${tensor.largest}` : ""}`);
  for (const [key, name] of [["count", "elements"], ["abs_max", "amax"], ["crest", "crest factor"], ["mean", "mean"], ["std", "standard deviation"], ["min", "min"], ["max", "max"], ["skew", "skew"], ["kurtosis", "kurtosis"], ["nonfinite", "NaN and Inf"]])
    if (tensor[key] !== undefined) add(name, short(tensor[key]));
  if (tensor.zero_share !== undefined) add("zeros", `${percent(tensor.zero_share)} %`);
  if (tensor.tokens) add("largest at", tensor.tokens);
  if (tensor.state) add("numbers", (STATES[tensor.state] ?? ["", ""])[1]);
}

// Shares of elements by floor(log2 |x|).
function histogram(content) {
  const [first, counts, below, above] = content.bins, holder = element("div", { class: "histogram" });
  if (!counts.length) {
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
