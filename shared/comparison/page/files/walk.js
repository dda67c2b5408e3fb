// Goes through a forward pass: one step at a time, its text, its line in both
// sources, a map of its values and, for one token, some of its numbers.
function startWalk(walk) {
  let { steps, maps, columns, following, tokens, pieces } = walk;
  const byId = (id) => document.getElementById(id);
  const sides = ["left", "right"].map((side) => byId(`walk-${side}`));
  const items = steps.map((step) => byId(`step-${step.name}`));
  const count = steps.filter((step) => /\d$/.test(step.name)).length;
  const square = (step) =>
    ["scores", "mask", "probabilities"].includes(step.kind);
  const ofTokens = (step) => ["logits", "log_probs"].includes(step.kind);
  // Equal tokens are told apart by their positions.
  const again = (token) =>
    tokens.indexOf(tokens[token]) !== tokens.lastIndexOf(tokens[token]);
  const quoted = (token) =>
    `\u201c${tokens[token]}\u201d` + (again(token) ? ` (${token})` : "");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = (name) => Number(byId(`walk-${name}`).value);
  const shown = [null, null];  // the map of each side
  const charts = [...document.querySelectorAll(".bars")];
  let [heat, keep] = [10, 21];  // tenths; one more than are drawn is all
  let at = 0;
  let timer = 0;
  let column = 4;  // of the square's cell whose score is worked out

  // A map, or of a square the part that one head has.
  function decode(number, head) {
    const [all, read, heads, total] = columns[number];
    const bytes = Uint8Array.from(atob(maps[number]), (c) => c.charCodeAt(0));
    const rows = bytes.length / (all + 4 * read);
    const width = head === null ? all : rows;
    const from = head === null ? 0 : head * rows;
    const numbers = new Float32Array(bytes.slice(rows * all).buffer);
    return { rows, width, heads, total, square: head !== null,
      level: (i, j) => bytes[i * all + from + j],
      row: (i) => Array.from(head === null
        ? numbers.subarray(i * read, (i + 1) * read)
        : numbers.subarray(i * read + from, i * read + from + rows)) };
  }

  // Negative numbers in one colour, positive ones in the other, 0 as paper;
  // a blank column stands between two heads. Masked cells are left blank: the
  // zeros of later positions, too, where the map holds probabilities.
  function paint(canvas, map, weights) {
    const each = map.width / map.heads;
    const apart = !map.square && map.heads > 1 && Number.isInteger(each);
    canvas.width = map.width + (apart ? map.heads - 1 : 0);
    canvas.height = map.rows;
    const style = getComputedStyle(document.documentElement);
    const [paper, below, above] = ["none", "left", "right"].map((name) =>
      style.getPropertyValue(`--map-${name}`).trim().split(" ").map(Number));
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    for (let i = 0; i < map.rows; i++)
      for (let j = 0; j < map.width; j++) {
        let level = map.level(i, j);
        if (weights && j > i && level === 128) level = 0;
        const share = level ? (level - 128) / 127 : 0;
        const to = share < 0 ? below : above;
        const column = j + (apart ? Math.floor(j / each) : 0);
        const pixel = 4 * (i * canvas.width + column);
        for (let k = 0; k < 3; k++)
          image.data[pixel + k] = paper[k] +
            (to[k] - paper[k]) * Math.sqrt(Math.abs(share));
        image.data[pixel + 3] = level ? 255 : 0;
      }
    context.putImageData(image, 0, 0);
  }

  const written = (x, digits = 4) => Number.isNaN(x) ? "NaN"
    : !Number.isFinite(x) ? (x < 0 ? "\u2212\u221e" : "\u221e")
    : String(+x.toPrecision(digits));

  // Beside the rows, and under the columns, of a map: every fourth position,
  // and the chosen one, whose neighbours leave it room.
  function label(axis, shown, token, words) {
    axis.replaceChildren(...tokens.slice(0, shown).map((text, i) => {
      const label = document.createElement("span");
      const told = i === token || (i % 4 === 0 && Math.abs(i - token) > 1);
      if (words && text.length > 7) text = `${text.slice(0, 6)}\u2026`;
      label.textContent = !told ? "" : words ? `${text} ${i}` : i;
      return label;
    }));
  }

  function numbersOf(step, map, row) {
    const numbers = map.row(row);
    if (!map.square)
      return `${row} \u201c${tokens[row]}\u201d` +
        (ofTokens(step) ? ", for the first tokens of the vocabulary: " : ": ") +
        numbers.map((x) => written(x)).join("  ") +
        (numbers.length < map.total ? " \u2026" : "");
    const seen = step.kind === "scores" ? tokens.length : row + 1;
    const most = numbers.slice(0, seen).map((x, token) => [x, token])
      .sort(([a], [b]) => b - a).slice(0, 4)
      .map(([x, token]) => `${quoted(token)} ${written(x, 2)}`);
    return `${row} \u201c${tokens[row]}\u201d` +
      { probabilities: " attends (looks) most to ", mask: ": highest scores: ",
        scores: ": highest scores, not yet masked: " }[step.kind] +
      most.join(", ");
  }

  function cellOf(step, map, row, column) {
    const x = map.row(row)[column];
    if (column > row && step.kind !== "scores")
      return `${quoted(row)} may not look at ${quoted(column)}, ` +
        `which comes later: ${written(x)}`;
    return step.kind === "probabilities"
      ? `${quoted(row)} attends to ${quoted(column)}: ${x.toFixed(2)}`
      : `score of ${quoted(row)} (query) with ${quoted(column)} (key): ` +
        written(x, 2);
  }

  // How the chosen cell's score is made, and what this step makes of it.
  function workOut(step, map, index, layer, row) {
    const made = steps.findLast((other, i) => i <= at && other.factors.length);
    const [query, key, factor] = made?.factors[layer]?.[index] ?? [];
    if (query === undefined) return "No two stored values give these scores.";
    const part = (number, position) => {
      const { heads, row } = decode(number, null);
      const [all, head] = [row(position), Math.min(chosen("head"), heads - 1)];
      return all.slice(all.length / heads * head, all.length / heads * (head + 1));
    };
    const [q, k] = [part(query, row), part(key, column)];
    const dot = q.reduce((sum, x, i) => sum + x * k[i], 0);
    const two = (x) => x.toFixed(2).padStart(5, "\u00a0");
    const scaled = Math.abs(factor - 1) < 1e-5 ? ""
      : Math.abs(factor ** 2 * q.length - 1) < 1e-5 ? ` / \u221a${q.length}`
      : ` \u00d7 ${written(factor)}`;
    const score = written(dot * factor);
    const told = map.row(row)[column];
    const masked = column > row && (step.kind === "probabilities"
      ? told === 0 : told < dot * factor - 100);
    return `q\u00b7k of ${quoted(row)} (query) and ${quoted(column)} (key):\n` +
      q.map((x, i) => `${two(x)}\u00d7${two(k[i])}`).join(" + ") +
      ` = ${written(dot)}\n` +
      (scaled && `q\u00b7k${scaled} = ${written(dot)}${scaled} = ${score}\n`) +
      (masked ? `The mask hides this score, as ${quoted(column)} comes later: ` +
        `${step.kind === "mask" ? "it becomes" : "its probability is"} ${written(told)}.`
        : step.kind !== "probabilities" ? ""
        : `exp(${score}), divided by the sum of exp over row ${row}, is ` +
          `the probability ${written(told, 3)}.`);
  }

  function showSide(index, step, layer, token, item) {
    const side = sides[index];
    const place = step.places[index];
    const remark = item.querySelector(
      `:scope > .lesson > .remark.${["left", "right"][index]} span`);
    side.querySelector(".walk-remark").replaceChildren(
      ...remark ? remark.cloneNode(true).childNodes : []);
    side.querySelector(".walk-place").replaceChildren(
      ...item.querySelectorAll(".walk-line")[index].cloneNode(true).childNodes);
    side.querySelectorAll(".walk-source").forEach((source, number) => {
      source.hidden = !place || number !== place[0];
      if (source.hidden) return;
      const box = source.querySelector(".cell");
      for (const line of source.querySelectorAll(".line")) {
        const number = Number(line.dataset.line);
        const lit = number >= place[1] && number <= place[2];
        line.classList.toggle("lit", lit);
        if (number !== place[2]) continue;
        const high = line.offsetHeight;  // from the top where the line fits
        box.scrollTop = line.offsetTop + high <= box.clientHeight ? 0
          : high * Math.round((line.offsetTop - box.clientHeight / 2) / high);
      }
    });
    const number = step.maps[layer][index];
    const map = shown[index] = number === null ? null : decode(number,
      square(step) ? Math.min(chosen("head"), columns[number][2] - 1) : null);
    // bars with names stand in place of the last map's columns
    side.querySelector("figure").hidden = map === null ||
      (index === 1 && number === step.maps[layer][0]) ||
      (following && step.kind === "log_probs");
    if (map === null) return;
    paint(side.querySelector("canvas"), map, step.kind === "probabilities");
    side.querySelector("canvas").tabIndex = map.square ? 0 : -1;
    const [rows, below] = side.querySelectorAll(".axis");
    label(rows, map.rows === tokens.length ? map.rows : 0, token, true);
    label(below, map.square ? map.rows : 0, token, false);
    side.querySelector(".walk-map").style.setProperty("--rows", map.rows);
    side.querySelector(".walk-map").classList.toggle("square", map.square);
    const colours =
      `blue: above 0; ${dark.matches ? "orange" : "brown"}: below 0. `;
    side.querySelector("figcaption").textContent = map.square
      ? "A row is the position that looks, a column the position looked at; " +
        (step.kind === "probabilities" ? "the stronger the blue, the larger. "
          : colours) + (step.kind === "scores" ? "" : "Hatched: masked.")
      : "A row is a position, a column " + (ofTokens(step)
        ? "one token of the vocabulary; " : "one of its numbers; ") +
        colours +
        (map.heads > 1
          ? `${map.heads} heads side by side.` : map.width < map.total
          ? `${map.width} of ${map.total} columns are shown, evenly spaced.` : "");
    const row = Math.min(token, map.rows - 1);
    const mark = side.querySelector(".field i").style;
    mark.top = `${100 * row / map.rows}%`;
    mark.height = `${100 / map.rows}%`;
    const cell = side.querySelector(".field b");
    cell.hidden = !map.square;
    Object.assign(cell.style, { top: mark.top, height: mark.height,
      width: mark.height, left: `${100 * column / map.rows}%` });
    side.querySelector(".walk-work").textContent =
      map.square ? workOut(step, map, index, layer, row) : "";
    side.querySelector(".walk-numbers").textContent =
      numbersOf(step, map, row);
    side.querySelector(".walk-cell").textContent =
      map.square ? "To read a cell, point at it; click it, or use the arrow keys in " +
        "the map, to work its score out." : "";
  }

  // The likeliest next tokens as bars. The weight of an id is the exponential
  // of its log-probability over the temperature; those kept sum to 1.
  function predict(token) {
    if (!following) return;
    const { drawn, others } = following;
    const all = keep > 20 || keep > drawn;
    const rows = following.rows[token].map(([id, score], rank) =>
      ({ id, weight: Math.exp(score / heat * 10), rank }));
    const top = rows.slice(0, drawn);
    const [next] = rows.slice(drawn);
    const rest = all ? Math.exp(following.rests[token][heat - 1]) : 0;
    for (const row of top) if (!all && row.rank >= keep) row.weight = 0;
    const known = next && top.find((row) => row.id === next.id);
    if (next && !known && !all) next.weight = 0;
    const total = top.reduce((sum, row) => sum + row.weight, rest);
    const most = top[0].weight / total;
    const bar = (name, share, marked) => {
      const [item, piece, field, fill, percent] =
        ["li", "span", "span", "i", "span"].map((tag) =>
          document.createElement(tag));
      piece.className = "piece";
      piece.textContent = name;
      fill.style.width = `${Math.min(100, 100 * share / most)}%`;
      field.append(fill);
      percent.textContent = `${(100 * share).toFixed(1)} %` +
        (marked ? " \u2190 in the text" : "");
      item.className = marked ? "actual" : "";
      item.append(piece, field, percent);
      return item;
    };
    const end = tokens.slice(Math.max(0, token - 4), token + 1).join("");
    for (const chart of charts) {
      const bars = top.map((row) =>
        bar(pieces[row.id], row.weight / total, row === known));
      if (next && !known)
        bars.push(bar(pieces[next.id], next.weight / total, true));
      if (others) bars.push(bar(`${others} others`, rest / total, false));
      chart.querySelector("ol").replaceChildren(...bars);
      chart.querySelector(".bars-said").textContent =
        `After token ${token}, where the text so far ends in ` +
        `\u201c${end}\u201d:`;
      const said = [(heat / 10).toFixed(1), all ? "all" : keep];
      [heat, keep].forEach((value, i) => {
        chart.querySelectorAll("input")[i].value = value;
        chart.querySelectorAll("output")[i].textContent = said[i];
      });
      const last = steps[at].name === String(count);
      chart.hidden = byId("walk").contains(chart) && !last;
    }
  }

  // On the curves of the activation: numbers before and after it.
  function drawDots(step, layer, token) {
    const curves = byId("walk-lesson").querySelector("svg");
    const before = steps.findLast((other, i) => i < at && other.kind === "widen");
    if (!curves || !before) return;
    const [wide, active] = [before, step].map((one) =>
      decode(one.maps[layer][0], null));
    for (let row = 0; row < wide.rows; row++)
      wide.row(row).forEach((x, i) => {
        const dot = document.createElementNS(curves.namespaceURI, "circle");
        for (const [name, value] of Object.entries({ cx: x,
          cy: -active.row(row)[i], r: row === token ? .14 : .05 }))
          dot.setAttribute(name, value);
        if (Math.abs(x) <= 4) curves.append(dot);
      });
  }

  function go(number, scroll) {
    at = number;
    const step = steps[at];
    const item = items[at];
    const fold = item.closest("details");
    if (fold) fold.open = true;
    byId("walk-layer").disabled = step.layers.length < 2;
    byId("walk-head").disabled = !square(step);
    const layer = Math.max(0, Math.min(chosen("layer"),
      step.layers.length - 1));
    const token = chosen("token");
    byId("walk-at").textContent = `step ${step.name} of ${count}`;
    byId("walk-title").textContent =
      item.querySelector(".walk-name").textContent ||
      "A value that both sides compute";
    byId("walk-lesson").replaceChildren(...Array.from(item.querySelectorAll(
      ":scope > .lesson > :not(.remark)"), (part) => part.cloneNode(true)));
    drawDots(step, layer, token);
    let what = item.querySelector(".walk-shape").textContent;
    if (step.layers.length) what = `layer ${step.layers[layer]}: ${what}`;
    const apart = step.apart[layer];
    if (apart !== null) what += apart === 0 ? "; both sides are equal"
      : `; largest difference ${apart.toExponential(1)}`;
    predict(token);
    byId("walk-what").textContent = what;
    byId("walk-stage").classList.toggle("steady", square(step) ||
      ["project", "mix", "join"].includes(step.kind));
    for (const tile of document.querySelectorAll(".tiles button"))
      tile.setAttribute("aria-pressed", String(Number(tile.value) === token));
    const [mine, other] = step.maps[layer];
    const one = mine !== null && mine === other;
    byId("walk-stage").classList.toggle("one-map", one);
    byId("walk-both").hidden = !one;
    sides.forEach((_, index) => showSide(index, step, layer, token, item));
    for (const link of document.querySelectorAll(".boxes a")) {
      const here = link.hash === `#step-${step.name.replace(/\D/g, "")}`;
      link.toggleAttribute("aria-current", here);
      if (here) link.closest("ol").querySelectorAll("li").forEach((box) =>
        box.toggleAttribute("aria-current", box.contains(link)));
    }
    for (const other of items)
      other.toggleAttribute("aria-current", other === item);
    const list = document.querySelector(".walk-list");
    if (list.scrollHeight > list.clientHeight)
      list.scrollTop = item.offsetTop - list.clientHeight / 3;
    // disabled ones would lose the focus
    byId("walk-back").setAttribute("aria-disabled", beside(-1) === at);
    byId("walk-on").setAttribute("aria-disabled", beside(1) === at);
    // after the browser has gone to the line itself
    if (scroll)
      requestAnimationFrame(() => setTimeout(() => {
        byId("walk-stage").scrollIntoView({ behavior: "instant" });
        byId("walk-title").focus({ preventScroll: true });
      }));
  }

  // The next step that is not folded away.
  function beside(direction) {
    for (let next = at + direction; steps[next]; next += direction)
      if (!items[next].closest("details:not([open])")) return next;
    return at;
  }

  function follow(number, scroll = false) {
    go(number, scroll);
    history.replaceState(null, "", `#step-${steps[at].name}`);
  }

  // A step a second, up to the last one; from there it begins again.
  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => {
      follow(beside(1));
      if (beside(1) === at) play(false);
    }, 1000) : 0;
    byId("walk-play").textContent = on ? "Pause" : "Play";
    byId("walk-play").setAttribute("aria-pressed", String(on));
    if (on && beside(1) === at) follow(0);
  }

  function choose(token) {
    byId("walk-token").value = token;
    go(at, false);
  }

  // Another text's run: the same steps, other tokens and numbers.
  function read(other) {
    ({ steps, maps, columns, following, tokens, pieces } = other);
    for (const tile of document.querySelectorAll(".tiles button"))
      tile.firstElementChild.textContent = tokens[tile.value];
    for (const option of byId("walk-token").options)
      option.text = `${option.value} ${tokens[option.value]}`;
    go(at, false);
  }

  const linked = () =>
    steps.findIndex((step) => `#step-${step.name}` === location.hash);

  const choices = { layer: Math.max(1, ...steps.map((s) => s.layers.length)),
    head: Math.max(1, ...steps.filter(square).map((s) =>
      columns[s.maps[0].find((map) => map !== null)][2])) };
  for (const [name, options] of Object.entries(choices))
    for (let i = 0; i < options; i++)
      byId(`walk-${name}`).append(new Option(i, i));
  for (const [id, way] of [["walk-back", -1], ["walk-on", 1]])
    byId(id).addEventListener("click", () => {
      play(false);
      follow(beside(way));
    });
  byId("walk-play").addEventListener("click", () => play(!timer));
  for (const id of ["walk-layer", "walk-head", "walk-token", "walk-all"])
    byId(id).addEventListener("change", () => go(at, false));
  for (const tiles of document.querySelectorAll(".tiles"))
    tiles.addEventListener("click", (event) => {
      const tile = event.target.closest("button");
      if (tile) choose(tile.value);
    });
  for (const chart of charts)
    chart.addEventListener("input", () => {
      [heat, keep] = Array.from(chart.querySelectorAll("input"),
        (slider) => Number(slider.value));
      predict(chosen("token"));
    });
  byId("walk-text")?.addEventListener("change", (event) =>
    read(walk.others[event.target.value] ?? walk));
  document.querySelector(".walk-list").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    follow(items.indexOf(link.parentElement), true);
  });
  for (const [index, side] of sides.entries()) {
    const canvas = side.querySelector("canvas");
    const cell = (event) => {
      const box = canvas.getBoundingClientRect();
      return [(event.clientY - box.top) / box.height * shown[index].rows,
        (event.clientX - box.left) / box.width * shown[index].width]
        .map(Math.floor);
    };
    const tell = (place, choice) => {
      const pointed = place.map((n) =>
        Math.max(0, Math.min(tokens.length - 1, n)));
      if (choice && shown[index].square) column = pointed[1];
      if (choice) choose(pointed[0]);
      if (shown[index].square)
        side.querySelector(".walk-cell").textContent =
          cellOf(steps[at], shown[index], ...pointed);
    };
    canvas.addEventListener("pointermove", (event) => tell(cell(event)));
    canvas.addEventListener("click", (event) => {
      if (shown[index].rows === tokens.length) tell(cell(event), true);
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1],
        ArrowRight: [0, 1] }[event.key];
      if (!move || !shown[index].square) return;
      event.preventDefault();
      event.stopPropagation();
      tell([chosen("token") + move[0], column + move[1]], true);
    });
    side.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (!line) return;
      const source = [...side.querySelectorAll(".walk-source")]
        .indexOf(line.closest(".walk-source"));
      const number = Number(line.dataset.line);
      const found = steps.map((_, i) => i).filter((i) => {
        const [where, first, last] = steps[i].places[index] || [];
        return where === source && first <= number && number <= last;
      });
      const open = found.filter((i) =>
        !items[i].closest("details:not([open])"));
      const [first] = open.length ? open : found;
      if (found.length) follow(open.find((i) => i > at) ?? first);
    });
  }
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[
      event.key];
    const inside = byId("walk").contains(event.target);
    const sideways = /Left|Right/.test(event.key) &&
      event.target === document.body;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key.toLowerCase() === "p" && !event.target.closest("select"))
      play(!timer);
    if (!step) return;
    play(false);
    if (!(inside || sideways) || event.target.closest("select, input, .cell")) return;
    event.preventDefault();
    // out of sight with what stands above, so that text and map are seen
    follow(beside(step),
      byId("walk-stage").getBoundingClientRect().top > 60);
  });
  addEventListener("hashchange", () => {
    if (linked() >= 0) go(linked(), true);
  });
  dark.addEventListener("change", () => go(at, false));
  byId("walk-stage").hidden = false;
  if (following) byId("next").hidden = false;
  byId("walk").classList.add("alive");
  byId("walk-token").value = Math.min(5, tokens.length - 1);
  go(linked() >= 0 ? linked() : walk.opens, false);
  addEventListener("load", () => {
    document.querySelector(":target")?.scrollIntoView({ behavior: "instant" });
    go(at, linked() >= 0 || walk.opens > 0);
  });
}

const walkData = JSON.parse(document.getElementById("data").textContent).walk;
if (walkData) startWalk(walkData);
