// Under the pointer, or with the arrow keys, a chart says its numbers. What they are stands beside it as JSON.
"use strict";

const shown = new WeakMap(); // plot -> index under the cursor

function dataOf(plot) {
  return JSON.parse(plot.querySelector("script").textContent);
}

function said(value, share) {
  if (value === null) return "not measured";
  if (share) return (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + "%";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

function read(plot, index) {
  const data = dataOf(plot);
  if (!data.xs.length) return;
  const at = Math.max(0, Math.min(data.xs.length - 1, index));
  shown.set(plot, at);
  plot.classList.add("read");
  const cursor = plot.querySelector(".cursor");
  cursor.setAttribute("x1", data.places[at]);
  cursor.setAttribute("x2", data.places[at]);
  const values = data.series
    .filter((series) => !data.heat || series.ys[at] > 0)
    .map((series) => (series.name ? series.name + " " : "") + said(series.ys[at], data.share));
  plot.parentElement.querySelector(".reading").textContent =
    [data.x, data.xs[at]].filter(Boolean).join(" ") + ": " + (values.join(" · ") || "nothing");
}

function leave(plot) {
  shown.delete(plot);
  plot.classList.remove("read");
  plot.parentElement.querySelector(".reading").textContent = "";
}

function nearest(plot, event) {
  const svg = plot.querySelector("svg");
  const box = svg.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
  const places = dataOf(plot).places;
  let best = 0;
  for (let i = 1; i < places.length; i++) if (Math.abs(places[i] - x) < Math.abs(places[best] - x)) best = i;
  return best;
}

const STEPS = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };

document.addEventListener("pointermove", (event) => {
  const plot = event.target.closest && event.target.closest(".plot");
  document.querySelectorAll(".plot.under").forEach((other) => {
    if (other === plot) return;
    other.classList.remove("under");
    if (other !== document.activeElement) leave(other);
  });
  if (!plot) return;
  plot.classList.add("under");
  read(plot, nearest(plot, event));
});

document.addEventListener("keydown", (event) => {
  const plot = event.target.closest && event.target.closest(".plot");
  if (!plot || !(event.key in STEPS)) return;
  event.preventDefault();
  const last = dataOf(plot).xs.length - 1;
  const now = shown.has(plot) ? shown.get(plot) : STEPS[event.key] > 0 ? -1 : last + 1;
  read(plot, Math.max(0, Math.min(last, now + STEPS[event.key])));
});

document.addEventListener("focusout", (event) => {
  if (event.target.classList && event.target.classList.contains("plot")) leave(event.target);
});
