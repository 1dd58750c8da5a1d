// Numerics by layer: the map of a run, with its measure, its iteration, and the range that the colours cover.

function heatmap(holder, numerics, all) {
  const present = measuresOf([numerics]);
  if (!present.length) {
    holder.append(element("p", { class: "note" }, "There are no numbers to show of what was captured."));
    return;
  }
  const state = { numerics, measure: present[0], iteration: numerics.iterations.length - 1, maps: [numerics] };
  const controls = element("div", { class: "controls" });
  const add = (name, options, chosen, change) => controls.append(selector(name, options, chosen, (value) => {
    change(value);
    view.show(state);
  }));
  add("Measure", present.map((m) => [m, MEASURES[m].name]), state.measure, (value) => { state.measure = value; });
  if (numerics.iterations.length > 1)
    add("Iteration", numerics.iterations.map((n, i) => [i, n]), state.iteration, (value) => { state.iteration = Number(value); });
  if (all.length > 1)
    add("Colours", [["one", "range of this run"], ["all", "range of all runs"]], "one", (value) => { state.maps = value === "all" ? all : [numerics]; });
  holder.append(controls);
  const view = mapView(holder);
  view.show(state);
}
