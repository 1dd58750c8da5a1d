// The measures of the map, their colours and what stands in place of a number.

// Stops of viridis: even steps of lightness, the same order for any colour vision, and many hues between its ends.
const STOPS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37]];
// `cell` is the text of a cell, where that of a sentence is too long; `least` the narrowest range that the colours cover,
// in the measure's unit or, where they are logarithmic, in powers of two; `worst` the end that the list of the worst
// begins with.
const MEASURES = {
  sqnr_db: { name: "SQNR", unit: "dB", slot: true, about: "signal to quantisation noise, higher is better", text: (v) => v.toFixed(1), least: 3, worst: "low" },
  underflow_share: { name: "underflow", unit: "%", slot: true, about: "non-zero elements that become zero", text: percent, log: true, least: 3, worst: "high" },
  saturated_share: { name: "saturation", unit: "%", slot: true, about: "elements beyond the largest value at their scale", text: percent, log: true, least: 3, worst: "high" },
  abs_max: { name: "amax", unit: "", about: "largest magnitude", text: (v) => short(v, 3), cell: brief, log: true, least: 2, worst: "high" },
  crest: { name: "crest factor", unit: "", about: "amax over root mean square: how far the largest element stands out", text: (v) => short(v, 3), cell: brief, log: true, least: 1, worst: "high" },
  kurtosis: { name: "kurtosis", unit: "", about: "3 for a normal distribution", text: (v) => short(v, 3), cell: brief, log: true, least: 2, worst: "high" },
  zero_share: { name: "zeros", unit: "%", about: "elements that are zero", text: percent, log: true, least: 3, worst: "high" },
};
// Sign, and words for the key and for whoever points at a cell.
const STATES = {
  unquantised: ["\u00b7", "not quantised"],
  reused: ["=", "the forward's quantised copy"],
  exact: ["\u221e", "nothing was rounded"],
  empty: ["0", "no finite element differs from zero"],
  infinite: ["!", "a finite value became infinite"],
  statistics: ["s", "statistics alone were captured"],
  late: ["?", "not judged for want of time"],
  failed: ["x", "could not be judged"],
};

function percent(share) {
  const value = share * 100;
  return value === 0 ? "0" : value < 0.01 ? value.toExponential(0) : String(Number(value.toPrecision(2)));
}

// A number in at most five characters, for a cell: 3.6, .083, 4e-3.
function brief(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.01 || size >= 1000)) return value.toExponential(0).replace("+", "");
  return String(Number(value.toPrecision(2))).replace(/^(-?)0\./, "$1.");
}

// Where a value lies on its measure's scale; null for zero on a logarithmic one.
function position(measure, value) {
  if (!MEASURES[measure].log) return value;
  return value > 0 ? Math.log2(value) : null;
}

function rgb(t) {
  const place = Math.max(0, Math.min(1, t)) * (STOPS.length - 1), i = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[i].map((low, c) => Math.round(low + (STOPS[i + 1][c] - low) * (place - i)));
}

// Relative luminance; text in black has the higher contrast above 0.179, in white below.
function luminance(colour) {
  const [r, g, b] = colour.map((part) => (part / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The range of a measure over some maps, never narrower than `least`; null where no value has a place on it.
function domainOf(measure, maps) {
  const found = maps.flatMap((one) => one.cells.map((cell) => cell[3][measure]))
    .filter((v) => v !== null && v !== undefined).map((v) => position(measure, v)).filter((v) => v !== null);
  if (!found.length) return null;
  const [low, high] = extent(found), room = Math.max(0, MEASURES[measure].least - (high - low)) / 2;
  return [low - room, high + room];
}

// The scale with its numbers, and a key of the signs that occur.
function showLegend(holder, key, domain, states, hasZero) {
  const measure = MEASURES[key];
  holder.replaceChildren(element("p", { class: "scale-name" }, element("strong", {}, measure.name + (measure.unit ? `, ${measure.unit}` : "")),
    `: ${measure.about}${measure.log ? "; colours are logarithmic" : ""}`));
  if (domain) {
    const width = 340, height = 34, left = 18, span = width - 2 * left, bars = 68;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Colours from ${measure.text(value(domain[0]))} to ${measure.text(value(domain[1]))} ${measure.unit}` });
    for (let i = 0; i < bars; i++)
      svg.append(drawn("rect", { x: left + i / bars * span, y: 0, width: span / bars + 0.4, height: 14, fill: `rgb(${rgb((i + 0.5) / bars).join(",")})` }));
    for (let i = 0; i <= 4; i++)
      svg.append(drawn("text", { x: left + i / 4 * span, y: 29, "text-anchor": "middle" }, measure.text(value(domain[0] + i / 4 * (domain[1] - domain[0])))));
    holder.append(svg);
  }
  const signs = Object.keys(STATES).filter((state) => states.has(state)).map((state) => [STATES[state][0], STATES[state][1]]);
  if (hasZero) signs.unshift(["0", "zero"]);
  if (signs.length)
    holder.append(element("ul", { class: "signs" }, ...signs.map(([sign, words]) => element("li", {}, element("b", {}, sign), ` ${words}`))));
  function value(place) { return measure.log ? 2 ** place : place; }
}
