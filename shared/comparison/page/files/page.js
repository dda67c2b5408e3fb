// Draws the maps from the numbers in the page, and highlights names that
// correspond. No framework; text is only ever set as text.

// One byte for the size of a number: 1e-20 is 1, 1e5 and NaN are 255.
const size = (code) => (code ? 10 ** (-20 + ((code - 1) * 25) / 254) : 0);
const sizes = (base64) => Float32Array.from(bytes(base64), size);

const brief = (x) => (x === 0 ? "0" : x.toExponential(0));
const token = (i) => `${i} \u201c${data.tokens[i]}\u201d`;

// Point at a cell, or walk with the arrow keys: tell(row, column).
function explore(canvas, time, tell) {
  let at = [0, 0];
  const go = (row, column) => {
    at = [row, column].map((n) => Math.min(time - 1, Math.max(0, n)));
    tell(...at);
  };
  for (const kind of ["pointermove", "click"])  // a touch does not move
    canvas.addEventListener(kind, (event) => go(...cellAt(event, time, time)));
  canvas.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    go(at[0] + step[0], at[1] + step[1]);
  });
}

{
  const { time, largest } = data.influence;
  const sides = ["left", "right"];
  const maps = sides.map((side) => sizes(data.influence[side]));
  // On a logarithmic scale down to 1e-4. Rounding is nothing; a position seen
  // too early must not be overlooked.
  const influence = (share, early) => share < 1e-12 ? 0
    : Math.min(1, Math.max(early ? 0.5 : 0.08, 1 + Math.log10(share) / 4));
  const draw = () => sides.forEach((side, n) => {
    const [full, leak] = [colour(`--map-${side}`), colour("--map-leak")];
    fillCells(byId(`influence-${side}`), time, time, (i, j) =>
      [j > i ? leak : full,
        influence(maps[n][i * time + j] / (largest[n] || 1), j > i)]);
  });
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
