// What the page does once it is there: charts, heatmaps when their run is first shown, and the choice of a run.

const DATA = JSON.parse(document.getElementById("data").textContent);

lineChart(document.getElementById("loss-chart"), DATA.series, "loss", "loss, nats a token");
const gaps = document.getElementById("gap-chart");
if (gaps) lineChart(gaps, DATA.series, "gap", "gap, nats a token");

const runs = [...document.querySelectorAll(".run")];
const chosen = document.getElementById("chosen");

function show(index) {
  runs.forEach((run, i) => { run.hidden = i !== index; });
  const holder = runs[index].querySelector(".heatmap");
  if (holder && !holder.childElementCount) heatmap(holder, DATA.numerics[index], DATA.numerics);
  if (chosen) chosen.value = String(index);
}

if (chosen) chosen.addEventListener("change", () => show(Number(chosen.value)));
for (const button of document.querySelectorAll(".choose"))
  button.addEventListener("click", () => {
    show(Number(button.dataset.run));
    document.getElementById("run").scrollIntoView();
    chosen.focus({ preventScroll: true });
  });
show(0);
