// Goes through a forward pass: one step at a time, its line in both sources,
// a map of its values and, for one token, some of its numbers.
function startWalk({ steps, maps, columns, likeliest, tokens, pieces }) {
  const byId = (id) => document.getElementById(id);
  const stage = byId("walk-stage");
  const sides = ["left", "right"].map((side) => byId(`walk-${side}`));
  const layers = Math.max(1, ...steps.map((step) => step.layers.length));
  let at = 0;

  const ofStyle = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(name)
      .trim().split(" ").map(Number);

  function decode(number) {
    const [width, read, heads, total] = columns[number];
    const bytes = Uint8Array.from(atob(maps[number]), (c) => c.charCodeAt(0));
    const rows = bytes.length / (width + 4 * read);
    const from = rows * width;
    return { width, read, heads, total, rows, levels: bytes.subarray(0, from),
      numbers: new Float32Array(bytes.slice(from).buffer) };
  }

  // Negative numbers in one colour, positive ones in the other, 0 as paper;
  // a blank column stands between two heads.
  function paint(canvas, map) {
    const each = map.heads > 1 ? map.width / map.heads : map.width;
    const gaps = map.heads > 1 && Number.isInteger(each) ? map.heads - 1 : 0;
    canvas.width = map.width + gaps;
    canvas.height = map.rows;
    const [paper, below, above] = ["--map-none", "--map-left", "--map-right"]
      .map(ofStyle);
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    for (let i = 0; i < map.rows; i++)
      for (let j = 0; j < map.width; j++) {
        const level = map.levels[i * map.width + j];
        const share = level ? (level - 128) / 127 : 0;
        const to = share < 0 ? below : above;
        const column = j + (gaps ? Math.floor(j / each) : 0);
        const pixel = 4 * (i * canvas.width + column);
        for (let k = 0; k < 3; k++)
          image.data[pixel + k] = paper[k] +
            (to[k] - paper[k]) * Math.sqrt(Math.abs(share));
        image.data[pixel + 3] = level ? 255 : 0;
      }
    context.putImageData(image, 0, 0);
  }

  const written = (x) => Number.isNaN(x) ? "NaN"
    : !Number.isFinite(x) ? (x < 0 ? "-inf" : "inf") : String(+x.toPrecision(4));

  function showSide(index, step, layer, token, item) {
    const side = sides[index];
    const place = step.places[index];
    side.querySelector(".walk-place").replaceChildren(
      ...item.querySelectorAll(".walk-line")[index].cloneNode(true).childNodes);
    side.querySelectorAll(".walk-source").forEach((source, number) => {
      source.hidden = !place || number !== place[0];
      if (source.hidden) return;
      const box = source.querySelector(".cell");
      for (const line of source.querySelectorAll(".line")) {
        const lit = Number(line.dataset.line) === place[1];
        line.classList.toggle("lit", lit);
        if (lit)
          box.scrollTop = line.offsetTop - box.clientHeight / 3;
      }
    });
    const number = step.maps[layer][index];
    const map = number === null ? null : decode(number);
    side.querySelector("figure").hidden = map === null;
    if (map === null) return;
    paint(side.querySelector("canvas"), map);
    side.querySelector("figcaption").textContent =
      `${map.rows} positions, ` + (map.heads > 1
        ? `${map.heads} heads side by side` : map.width < map.total
        ? `${map.width} of ${map.total} columns` : `${map.width} columns`);
    const row = Math.min(token, map.rows - 1);
    const mark = side.querySelector(".walk-map i").style;
    mark.top = `${100 * row / map.rows}%`;
    mark.height = `${100 / map.rows}%`;
    const numbers = map.numbers.subarray(row * map.read, (row + 1) * map.read);
    side.querySelector(".walk-numbers").textContent =
      `${token} \u201c${tokens[token]}\u201d: ` +
      Array.from(numbers, written).join("  ") +
      (map.read < map.total ? " \u2026" : "");
  }

  function go(number, scroll) {
    at = Math.min(steps.length - 1, Math.max(0, number));
    const step = steps[at];
    const choice = byId("walk-layer");
    choice.disabled = step.layers.length < 2;
    const layer = Math.min(Number(choice.value), step.layers.length - 1);
    const token = Number(byId("walk-token").value);
    byId("walk-at").textContent = `step ${at + 1} of ${steps.length}`;
    const shown = Math.max(0, layer);
    const apart = step.apart[shown];
    const item = byId(`step-${at + 1}`);
    let what = item.querySelector(".walk-fact").textContent.split(",")[0];
    if (step.layers.length) what = `layer ${step.layers[shown]}: ${what}`;
    if (apart !== null)
      what += apart === 0 ? ", equal" : `, ${apart.toExponential(1)} apart`;
    if (at === steps.length - 1) {
      const next = likeliest.map((side) => side[token].map(([id, p]) =>
        `\u201c${pieces[id]}\u201d ${(100 * p).toFixed(1)} %`).join(", "));
      what += ". Likeliest next: " + (next[0] === next[1] ? next[0]
        : next.map((text, i) =>
          `${text} in ${sides[i].querySelector("h3").textContent}`).join("; "));
    }
    byId("walk-what").textContent = what;
    sides.forEach((_, index) => showSide(index, step, shown, token, item));
    for (const other of document.querySelectorAll(".walk-list li"))
      other.toggleAttribute("aria-current", other === item);
    const list = document.querySelector(".walk-list");
    if (list.scrollHeight > list.clientHeight)
      list.scrollTop = item.offsetTop - list.clientHeight / 3;
    byId("walk-back").disabled = at === 0;
    byId("walk-on").disabled = at === steps.length - 1;
    // after the browser has gone to the line itself
    if (scroll)
      setTimeout(() => byId("walk").scrollIntoView({ behavior: "instant" }));
  }

  function follow(number) {
    go(number, false);
    history.replaceState(null, "", `#step-${at + 1}`);
  }

  const linked = () => /^#step-(\d+)$/.exec(location.hash);

  for (let layer = 0; layer < layers; layer++)
    byId("walk-layer").append(new Option(layer, layer));
  byId("walk-back").addEventListener("click", () => follow(at - 1));
  byId("walk-on").addEventListener("click", () => follow(at + 1));
  for (const id of ["walk-layer", "walk-token"])
    byId(id).addEventListener("change", () => go(at, false));
  document.querySelector(".walk-list").addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (!item) return;
    event.preventDefault();
    follow(Number(item.id.slice(5)) - 1);
  });
  for (const [index, side] of sides.entries()) {
    const canvas = side.querySelector("canvas");
    canvas.addEventListener("click", (event) => {
      if (canvas.height !== tokens.length) return;
      const share = event.offsetY / canvas.clientHeight;
      byId("walk-token").value = Math.floor(share * canvas.height);
      go(at, false);
    });
    side.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (!line) return;
      const source = [...side.querySelectorAll(".walk-source")]
        .indexOf(line.closest(".walk-source"));
      const found = steps.findIndex((step) => step.places[index] &&
        step.places[index][0] === source &&
        step.places[index][1] === Number(line.dataset.line));
      if (found >= 0) follow(found);
    });
  }
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[
      event.key];
    const inside = byId("walk").contains(event.target);
    const sideways = /Left|Right/.test(event.key) &&
      event.target === document.body;
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    if (!(inside || sideways) || event.target.closest("select, .cell")) return;
    event.preventDefault();
    follow(at + step);
  });
  addEventListener("hashchange", () => {
    if (linked()) go(Number(linked()[1]) - 1, true);
  });
  matchMedia("(prefers-color-scheme: dark)")
    .addEventListener("change", () => go(at, false));
  stage.hidden = false;
  byId("walk").classList.add("alive");
  const last = tokens.length - 1;
  byId("walk-token").value = last;
  go(linked() ? Number(linked()[1]) - 1 : 0, false);
  addEventListener("load", () => go(at, Boolean(linked())));
}

const walkData = JSON.parse(document.getElementById("data").textContent).walk;
if (walkData) startWalk(walkData);
