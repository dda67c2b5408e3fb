"use strict";
// Draws the maps from the numbers in the page, and highlights names that
// correspond. No framework; text is only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const bytes = (base64) =>
  Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));

// One byte for the size of a number: 1e-20 is 1, 1e5 and NaN are 255.
const size = (code) => (code ? 10 ** (-20 + ((code - 1) * 25) / 254) : 0);
const sizes = (base64) => Float32Array.from(bytes(base64), size);

const brief = (x) => (x === 0 ? "0" : x.toExponential(0));
const token = (i) => `${i} \u201c${data.tokens[i]}\u201d`;

// Colours are three numbers in the style sheet, so that themes can change
// them.
function colour(name) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(name).trim().split(" ").map(Number);
}

function paint(canvas, time, level, early) {
  const low = colour("--map-none");
  const full = colour(
    canvas.id.endsWith("left") ? "--map-left" : "--map-right");
  const leak = colour("--map-leak");
  canvas.width = canvas.height = time;
  const context = canvas.getContext("2d");
  const image = context.createImageData(time, time);
  for (let i = 0; i < time; i++)
    for (let j = 0; j < time; j++) {
      const share = level(i * time + j);
      const to = early && j > i ? leak : full;
      const at = 4 * (i * time + j);
      for (let k = 0; k < 3; k++)
        image.data[at + k] = low[k] + (to[k] - low[k]) * share;
      image.data[at + 3] = 255;
    }
  context.putImageData(image, 0, 0);
}

// From ten to the minus decades (pale) to one; nothing only for exactly 0.
const logarithmic = (x, decades) =>
  x === 0 ? 0 : Math.min(1, Math.max(0.08, 1 + Math.log10(x) / decades));

// Point at a cell, or walk with the arrow keys: tell(row, column).
function explore(canvas, time, tell) {
  let at = [0, 0];
  const go = (row, column) => {
    at = [row, column].map((n) => Math.min(time - 1, Math.max(0, n)));
    tell(...at);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    go(Math.floor(((event.clientY - box.top) / box.height) * time),
      Math.floor(((event.clientX - box.left) / box.width) * time));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1],
      ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    go(at[0] + step[0], at[1] + step[1]);
  });
}

{
  const { time, largest } = data.influence;
  const sides = ["left", "right"];
  const maps = sides.map((side) => sizes(data.influence[side]));
  // Rounding is nothing; a position seen too early must not be overlooked.
  const influence = (share, i) =>
    share < 1e-12 ? 0
      : Math.max(logarithmic(share, 4), i % time > i / time ? 0.5 : 0);
  const draw = () => sides.forEach((side, n) =>
    paint(byId(`influence-${side}`), time,
      (i) => influence(maps[n][i] / (largest[n] || 1), i), true));
  draw();
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", draw);
  sides.forEach((side, n) =>
    explore(byId(`influence-${side}`), time, (row, column) => {
      byId("influence-readout").textContent =
        `replacing ${token(column)} changes the prediction after ` +
        `${token(row)} by ${brief(maps[n][row * time + column])} in ` +
        data.styles[n];
    }));
}

// Corresponding names: pointed at, or kept highlighted by their button.
for (const concept of document.querySelectorAll(".concept")) {
  const light = (term, on, kind) => {
    for (const element of concept.querySelectorAll("[data-term]"))
      if (element.dataset.term === term) element.classList.toggle(kind, on);
  };
  for (const [event, on] of [["pointerover", true], ["pointerout", false],
    ["focusin", true], ["focusout", false]])
    concept.addEventListener(event, (e) => {
      const marked = e.target.closest("[data-term]");
      if (marked) light(marked.dataset.term, on, "lit");
    });
  concept.addEventListener("click", (e) => {
    const button = e.target.closest(".term-button");
    if (!button) return;
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    light(button.dataset.term, on, "kept");
  });
}
