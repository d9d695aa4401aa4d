// Reads the memory chart under the pointer. Without it the page loses nothing but this.
"use strict";
const points = JSON.parse(document.getElementById("points").textContent);
const readout = document.getElementById("readout");
const idle = readout.textContent;

function at(rows, seconds) {
  let found = rows[0];
  for (const row of rows) {
    if (row[0] > seconds) break;
    found = row;
  }
  return found;
}

function megabytes(bytes) {
  return (bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0) + " MB";
}

for (const chart of document.querySelectorAll("svg.memory")) {
  const cursor = chart.querySelector(".cursor");
  const left = Number(cursor.getAttribute("x1"));
  const right = chart.viewBox.baseVal.width - points.right;
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const seconds = ((x - left) / (right - left)) * points.duration_s;
    if (seconds < 0 || seconds > points.duration_s) return;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    const owned = at(points.classes, seconds)[1];
    const parts = Object.entries(owned).filter((item) => item[1] >= 1e5);
    const held = parts.map(([name, bytes]) => name + " " + megabytes(bytes)).join(", ");
    readout.textContent =
      seconds.toFixed(2) + " s: process " + megabytes(at(points.rss, seconds)[1]) +
      ", owned " + (held || "nothing");
  });
  chart.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    readout.textContent = idle;
  });
}
