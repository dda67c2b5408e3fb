// Draws the maps from the numbers in the page, and highlights names that
// correspond. No framework; text is only ever set as text.

// Read a byte as the size of a number: 1 is 1e-20; 255 is 1e5 or NaN.
const size = (code) => (code ? 10 ** (-20 + ((code - 1) * 25) / 254) : 0);
const sizes = (base64) => Float32Array.from(bytes(base64), size);

const brief = (x) => (x === 0 ? "0" : x.toExponential(0));
const token = (tokens, i) => `${i} \u201c${tokens[i]}\u201d`;

// Call tell(row, column) for the cell that the pointer or arrow keys choose.
function explore(canvas, size, tell) {
  let at = [0, 0];
  const go = (row, column) => {
    at = [row, column].map((n) => Math.min(size() - 1, Math.max(0, n)));
    tell(...at);
  };
  for (const kind of ["pointermove", "click"])  // a touch does not move
    canvas.addEventListener(kind, (event) =>
      go(...cellAt(event, size(), size())));
  canvas.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    go(at[0] + step[0], at[1] + step[1]);
  });
}

// Draws both influence maps on the canvases with a prefix, and describes cells;
// returns a function that draws the maps of another text.
function showInfluence(prefix, readout, first) {
  const sides = ["left", "right"];
  let { time, largest, tokens } = first;
  let maps = sides.map((side) => sizes(first[side]));
  // Use a logarithmic scale down to 1e-4. Hide rounding, but show every later
  // token that influences an earlier position.
  const influence = (share, early) => share < 1e-12 ? 0
    : Math.min(1, Math.max(early ? 0.5 : 0.08, 1 + Math.log10(share) / 4));
  const draw = () => sides.forEach((side, n) => {
    const [full, leak] = [colour(`--map-${side}`), colour("--map-leak")];
    fillCells(byId(`${prefix}-${side}`), time, time, (i, j) =>
      [j > i ? leak : full,
        influence(maps[n][i * time + j] / (largest[n] || 1), j > i)]);
  });
  draw();
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", draw);
  sides.forEach((side, n) =>
    explore(byId(`${prefix}-${side}`), () => time, (row, column) => {
      byId(readout).textContent =
        `replacing ${token(tokens, column)} moves the log-probabilities after ` +
        `${token(tokens, row)} by up to ${brief(maps[n][row * time + column])} in ` +
        data.styles[n];
    }));
  return (other) => {
    ({ time, largest, tokens } = other);
    maps = sides.map((side) => sizes(other[side]));
    draw();
  };
}

showInfluence("influence", "influence-readout",
  { ...data.influence, tokens: data.tokens });

// Highlight corresponding names under the pointer, or by their button.
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
