"use strict";
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1],
  ArrowRight: [0, 1] };

function bytes(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

// Three numbers in the style sheet, so that themes can change them.
function colour(name) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(name).trim().split(" ").map(Number);
}

// Return the row and the column of a map at an event.
function cellAt(event, rows, columns) {
  const box = event.currentTarget.getBoundingClientRect();
  return [(event.clientY - box.top) / box.height * rows,
    (event.clientX - box.left) / box.width * columns].map(Math.floor);
}

// Draw each cell in the colour and strength that cell(row, column) returns; if
// it returns neither, the cell stays blank.
function fillCells(canvas, rows, columns, cell) {
  const paper = colour("--map-none");
  [canvas.width, canvas.height] = [columns, rows];
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let pixel = 0; pixel < rows * columns; pixel++) {
    const [to, share] = cell(Math.floor(pixel / columns), pixel % columns) ?? [];
    if (to) image.data.set([...paper.map((x, k) => x + (to[k] - x) * share), 255],
      4 * pixel);
  }
  context.putImageData(image, 0, 0);
}

// Return the tiles of a text, those of the template or new ones.
function makeTile(text, position) {
  const [item, button, piece, id] = ["li", "button", "span", "span"].map((name) =>
    document.createElement(name));
  Object.assign(button, { type: "button", tabIndex: -1, value: position });
  [piece.className, piece.textContent] = ["piece", text];
  [id.className, id.textContent] = ["id", position];
  button.append(piece, id);
  item.append(button);
  return item;
}

// Fill lists of tiles with the tokens of a text; some are raw bytes.
function fillTiles(lists, tokens, raw) {
  for (const tiles of lists) {
    tiles.replaceChildren(...tokens.map(makeTile));
    for (const position of raw) markRaw(tiles.children[position]);
  }
}

function markRaw(element) {
  element.classList.add("raw");
  element.title = "raw bytes of a character that takes several tokens";
}

// The last tokens of a text up to a position, with raw bytes marked.
function endAt(tiles, position) {
  return [...tiles.children].slice(Math.max(0, position - 4), position + 1)
    .map((tile) => {
      const { textContent } = tile.querySelector(".piece");
      if (!tile.matches(".raw")) return textContent;
      const piece = document.createElement("span");
      [piece.className, piece.textContent] = ["piece", textContent];
      markRaw(piece);
      return piece;
    });
}

// Text whose words in backticks become code.
function setMarked(element, text) {
  element.replaceChildren(...text.split("`").map((words, i) => {
    if (i % 2 === 0) return words;
    const code = document.createElement("code");
    code.textContent = words;
    return code;
  }));
}

// Goes through a forward pass: one step at a time, its text, its line in both
// sources, a map of its values and, for one token, some of its numbers.
function startWalk(walk) {
  let { steps, maps, columns, following, tokens, pieces } = walk;
  let without = {};  // for each kind of step, what both sides do without a line
  const sides = ["left", "right"].map((side) => byId(`walk-${side}`));
  const items = steps.map((step) => byId(`step-${step.name}`));
  const count = steps.filter((step) => /\d$/.test(step.name)).length;
  const square = ({ kind }) => ["scores", "mask", "probabilities"].includes(kind);
  const ofTokens = (step) => ["logits", "log_probs"].includes(step.kind);
  // Distinguish equal tokens by their positions.
  const again = (token) =>
    tokens.indexOf(tokens[token]) !== tokens.lastIndexOf(tokens[token]);
  const quoted = (token) =>
    `\u201c${tokens[token]}\u201d` + (again(token) ? ` (${token})` : "");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const chosen = (name) => Number(byId(`walk-${name}`).value);
  const shown = [null, null];  // the map of each side
  const charts = [...document.querySelectorAll(".bars")];
  let [heat, keep] = [10, 21];  // in tenths; 21: keep all, not only 20
  let [at, timer] = [0, 0];
  let column = 4;  // the column of the cell whose score is explained

  // Return a map, or the part of a square that belongs to one head.
  function decode(number, head) {
    const [all, read, heads, total] = columns[number];
    const data = bytes(maps[number]);
    const rows = data.length / (all + 4 * read);
    const width = head === null ? all : rows;
    const from = head === null ? 0 : head * rows;
    const numbers = new Float32Array(data.slice(rows * all).buffer);
    return { rows, width, heads, total, square: head !== null,
      level: (i, j) => data[i * all + from + j],
      row: (i) => [...numbers.subarray(i * read + from).subarray(0,
        head === null ? read : rows)] };
  }

  const gapped = ({ square, heads, width }) =>
    !square && heads > 1 && Number.isInteger(width / heads);

  // Negative numbers have one colour, positive numbers another, 0 none. A blank
  // column separates two heads. Masked cells are blank; in a map of
  // probabilities these include the zeros of later positions, where any other
  // number is a leak.
  function paint(canvas, map, weights) {
    const each = map.width / map.heads;
    const apart = gapped(map);
    const [below, above, leak] =
      ["--map-left", "--map-right", "--map-leak"].map(colour);
    const width = map.width + (apart ? map.heads - 1 : 0);
    fillCells(canvas, map.rows, width, (i, column) => {
      if (apart && column % (each + 1) === each) return null;
      const j = column - (apart ? Math.floor(column / (each + 1)) : 0);
      const level = map.level(i, j);
      if (!level || (weights && j > i && level === 128)) return null;
      return [weights && j > i ? leak : level < 128 ? below : above, Math.sqrt(Math.abs(level - 128) / 127)];
    });
  }

  const written = (x, digits = 4) => Number.isNaN(x) ? "NaN"
    : !Number.isFinite(x) ? (x < 0 ? "\u2212\u221e" : "\u221e")
    : String(+x.toPrecision(digits));

  // Label every fourth row and column of a map, and the chosen one; labels too
  // close to the chosen one are left out.
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
        numbers.slice(0, 6).map((x) => written(x)).join("  ") +
        (Math.min(6, numbers.length) < map.total ? " \u2026" : "");
    const leaks = step.kind === "probabilities" &&
      numbers.slice(row + 1).some((x) => x > 0);
    const seen = step.kind === "scores" || leaks ? tokens.length : row + 1;
    const most = numbers.slice(0, seen).map((x, token) => [x, token])
      .sort(([a], [b]) => b - a).slice(0, 4)
      .map(([x, token]) => `${quoted(token)} ${written(x, 2)}`);
    return `${row} \u201c${tokens[row]}\u201d` +
      { probabilities: " attends (looks) most to ", mask: ": highest scores: ",
        scores: without.mask ? ": highest scores: "
          : ": highest scores, not yet masked: " }[step.kind] +
      most.join(", ");
  }

  function cellOf(step, map, row, column) {
    const x = map.row(row)[column];
    if (column > row && step.kind === "probabilities" && x > 0)
      return `${quoted(row)} looks at ${quoted(column)}, although it comes ` +
        `later: ${x.toFixed(2)}`;
    if (column > row && step.kind !== "scores")
      return `${quoted(row)} may not look at ${quoted(column)}, ` +
        `which comes later: ${written(x)}`;
    return step.kind === "probabilities"
      ? `${quoted(row)} attends to ${quoted(column)}: ${x.toFixed(2)}`
      : `score of ${quoted(row)} (query) with ${quoted(column)} (key): ` +
        written(x, 2);
  }

  // Return a number of a map that is not square, if the page has all of them.
  function numberAt(map, row, place) {
    const [each, gap] = [map.width / map.heads, gapped(map)];
    if (gap && place % (each + 1) === each) return "";
    const drawn = place - (gap ? Math.floor(place / (each + 1)) : 0);
    const column = map.width < 2 ? 0
      : Math.round(drawn * (map.total - 1) / (map.width - 1));
    const x = map.row(row)[column];
    return x === undefined || map.rows !== tokens.length ? ""
      : `number ${column} of ${quoted(row)}: ${written(x)}`;
  }

  // Explain how the chosen score is computed, and how this step changes it.
  function workOut(step, map, index, layer, row) {
    const made = steps.findLast((other, i) => i <= at && other.factors.length);
    const [query, key, factor] = made?.factors[layer]?.[index] ?? [];
    if (query === undefined) return "No two stored values give these scores.";
    const head = Math.min(chosen("head"), columns[query][2] - 1);
    const part = (number, position) => {
      const all = decode(number, null).row(position);
      const width = all.length / columns[number][2];
      return all.slice(width * head, width * (head + 1));
    };
    const [q, k] = [part(query, row), part(key, column)];
    const dot = q.reduce((sum, x, i) => sum + x * k[i], 0);
    const two = (x) => x.toFixed(2).padStart(5, "\u00a0");
    const scaled = Math.abs(factor - 1) < 1e-5 ? ""
      : Math.abs(factor ** 2 * q.length - 1) < 1e-5 ? ` / \u221a${q.length}`
      : ` \u00d7 ${written(factor)}`;
    const score = written(dot * factor);
    const told = map.row(row)[column];
    const sum = decode(made.maps[layer][index], head).row(row).reduce((sum, x, j) =>
      sum + (map.row(row)[j] && Math.exp(x)), 0);
    const masked = column > row && (step.kind === "probabilities"
      ? told === 0 : told < dot * factor - 100);
    return `q\u00b7k of ${quoted(row)} (query) and ${quoted(column)} (key), ` +
      "its factors rounded to 2 decimals:\n" +
      q.map((x, i) => `${two(x)}\u00d7${two(k[i])}`).join(" +\u00a0") +
      ` = ${written(dot)}\n` +
      (scaled && `q\u00b7k${scaled} = ${written(dot)}${scaled} = ${score}\n`) +
      (masked ? `The mask hides this score, as ${quoted(column)} comes later: ` +
        `${step.kind === "mask" ? "it becomes" : "its probability is"} ${written(told)}.`
        : step.kind !== "probabilities" ? ""
        : `exp(${score}) = ${written(Math.exp(dot * factor))}, divided by ` +
          `${written(sum)}, the sum of exp over row ${row}, is the ` +
          `probability ${written(told, 3)}.`);
  }

  // Scroll to the lit lines: a whole line comes first, below the signature
  // that stays in place.
  function showLines(box, lines) {
    const isLit = (line) => line.matches(".lit, .named");
    const pre = box.firstElementChild.style;
    pre.paddingBottom = box.scrollTop = 0;
    const [first, last] = [lines.find(isLit), lines.findLast(isLit)];
    if (!first) return;  // no line is lit in print
    const pinned = lines[0].matches(".brief") ? lines[0].offsetHeight : 0;
    const room = box.scrollHeight - box.clientHeight;
    const least = last.offsetTop + last.offsetHeight - box.clientHeight;
    const top = least <= 0 ? 0 : Math.max(least, Math.min(
      first.offsetTop - pinned, last.offsetTop - box.clientHeight / 2, room));
    const start = lines.map((line) => line.offsetTop - pinned).find((n) => n >= top);
    pre.paddingBottom = `${Math.max(0, start - room)}px`;
    box.scrollTop = start;
  }

  function showSide(index, step, layer, token, item) {
    const side = sides[index];
    const place = step.places[index];
    const remark = item.querySelector(
      `:scope > .lesson > .remark.${["left", "right"][index]} span`);
    const now = without[step.kind];
    if (now) setMarked(side.querySelector(".walk-remark"), now[index]);
    else side.querySelector(".walk-remark").replaceChildren(
      ...remark ? remark.cloneNode(true).childNodes : []);
    side.querySelector(".walk-place").className = "walk-place";
    side.querySelector(".walk-place").replaceChildren(
      ...item.querySelectorAll(".walk-line")[index].cloneNode(true).childNodes);
    side.querySelectorAll(".walk-source").forEach((source, number) => {
      source.hidden = !place || number !== place[0];
      if (source.hidden) return;
      const lines = [...source.querySelectorAll(".line")];
      const numbered = (line) => Number(line.dataset.line);
      // the last earlier lines that assign the names in the remark
      const named = Array.from(side.querySelectorAll(".walk-remark code"),
        ({ textContent: name }) => /^\w+$/.test(name) && lines.findLast((line) =>
          numbered(line) < place[1] && !line.matches(".fold") &&
          RegExp(`^[\\s\\w,]*\\b${name}\\b[\\w, ]* = `).test(line.textContent)));
      for (const line of lines) {
        line.classList.toggle("named", named.includes(line));
        line.classList.toggle("lit",
          numbered(line) >= place[1] && numbered(line) <= place[2]);
      }
      showLines(source.querySelector(".cell"),
        lines.filter((line) => line.checkVisibility()));
      // mark a step whose code its changed line no longer has
      const code = side.querySelector(".walk-place code")?.textContent;
      if (lines.some((line) => line.matches(".taken.lit") &&
          line.textContent.includes(code) && !line.dataset.now.includes(code)))
        side.querySelector(".walk-place").classList.add("gone");
    });
    const number = step.maps[layer][index];
    const map = shown[index] = number === null ? null : decode(number,
      square(step) ? Math.min(chosen("head"), columns[number][2] - 1) : null);
    // bars with names replace the columns of the last map
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
    const leaks = map.square && step.kind === "probabilities" &&
      map.row(0).slice(1).some((x) => x > 0);
    const colours = `blue: above 0; ${dark.matches ? "orange" : "brown"}: below 0; ` +
      "the stronger, the further from 0. ";
    side.querySelector("figcaption").textContent = map.square
      ? "A row is the position that attends, a column the position attended to; " +
        (step.kind === "probabilities" ? "the stronger the blue, the larger. "
          : colours) + (leaks ? "Red: a later token, seen too early."
          : step.kind === "scores" ? "" : "Hatched: masked.")
      : "A row is a position, a column " + (ofTokens(step)
        ? "one token of the vocabulary; " : "one of its numbers; ") +
        colours +
        (map.heads > 1
          ? `${map.heads} heads side by side.` : map.width < map.total
          ? `${map.width} of ${map.total} columns are shown, evenly spaced.` : "");
    const row = Math.min(token, map.rows - 1);
    const [mark, cell] = side.querySelectorAll(".field i, .field b");
    const [height, top, left] = [1, row, column].map((n) => `${100 * n / map.rows}%`);
    cell.hidden = !map.square;
    Object.assign(mark.style, { top, height });
    Object.assign(cell.style, { top, height, width: height, left });
    side.querySelector(".walk-work").textContent =
      map.square ? workOut(step, map, index, layer, row) : "";
    side.querySelector(".walk-numbers").textContent = numbersOf(step, map, row);
    side.querySelector(".walk-cell").textContent = !map.square ? ""
      : `${coarse.matches ? "Tap a cell" : "Choose a cell, or use the arrow keys"}` +
        ": its score is worked out.";
  }

  // The likeliest next tokens as bars. The weight of an id is the exponential
  // of its log-probability over the temperature; those kept sum to 1.
  function predict(token) {
    if (!following) return;
    const { drawn, others } = following;
    const all = keep > 20 || keep > drawn;
    const rows = following.rows[token].map(([id, score], rank) =>
      ({ id, weight: Math.exp(score / heat * 10), rank }));
    const [top, [next]] = [rows.slice(0, drawn), rows.slice(drawn)];
    const rest = all ? Math.exp(following.rests[token][heat - 1]) : 0;
    for (const row of top) if (!all && row.rank >= keep) row.weight = 0;
    const known = next && top.find((row) => row.id === next.id);
    if (next && !known && !all) next.weight = 0;
    const total = top.reduce((sum, row) => sum + row.weight, rest);
    const most = top[0].weight / total;
    const bar = (name, share, marked) => {
      const item = charts[0].querySelector("template").content.cloneNode(true)
        .firstElementChild;
      const [piece, field, percent] = item.children;
      piece.textContent = name;
      field.firstChild.style.width = `${Math.min(100, 100 * share / most)}%`;
      percent.textContent = `${(100 * share).toFixed(1)} %` +
        (marked ? " \u2190 in the text" : "");
      item.className = marked ? "actual" : "";
      return item;
    };
    for (const chart of charts) {
      const bars = top.map((row) =>
        bar(pieces[row.id], row.weight / total, row === known));
      if (next && !known)
        bars.push(bar(pieces[next.id], next.weight / total, true));
      if (others) bars.push(bar(`${others} others`, rest / total, false));
      chart.querySelector("ol").replaceChildren(...bars);
      chart.querySelector(".bars-said").replaceChildren(
        `After token ${token}, where the text so far ends in \u201c`,
        ...endAt(byId("walk-tokens"), token), "\u201d:");
      const said = [(heat / 10).toFixed(1), all ? "all" : keep];
      [heat, keep].forEach((value, i) => {
        chart.querySelectorAll("input")[i].value = value;
        chart.querySelectorAll("output")[i].textContent = said[i];
      });
      chart.hidden = byId("walk").contains(chart) && steps[at].name !== `${count}`;
    }
  }

  // Draw numbers before and after the activation on its curve.
  function drawDots(step, layer, token) {
    const curves = byId("walk-lesson").querySelector("svg");
    const before = steps.findLast((other, i) => i < at && other.kind === "widen");
    if (!curves || !before) return;
    const [wide, active] = [before, step].map((one) =>
      decode(one.maps[layer][0], null));
    for (let row = 0; row < wide.rows; row++)
      wide.row(row).slice(0, 6).forEach((x, i) => {
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
    item.closest("details")?.setAttribute("open", "");
    byId("walk-layer").disabled = step.layers.length < 2;
    byId("walk-head").disabled = !square(step);
    const layer = Math.max(0, Math.min(chosen("layer"), step.layers.length - 1));
    const token = chosen("token");
    byId("walk-at").textContent = `step ${step.name} of ${count}`;
    byId("walk-title").textContent = item.querySelector(".walk-name").textContent ||
      "A value that both sides compute";
    byId("walk-lesson").replaceChildren(...Array.from(item.querySelectorAll(
      ":scope > .lesson > :not(.remark)"), (part) => part.cloneNode(true)));
    if (without[step.kind]) {
      const gone = document.createElement("p");
      [gone.className, gone.textContent] = ["gone", "A line of this step is taken out " +
        "of both models. The whole models do this:"];
      byId("walk-lesson").prepend(gone);
    }
    drawDots(step, layer, token);
    let what = item.querySelector(".walk-shape").textContent;
    if (step.layers.length) what = `layer ${step.layers[layer]}: ${what}`;
    const apart = step.apart[layer];
    if (apart !== null) what += apart === 0 ? "; both sides are equal"
      : `; largest difference ${apart.toExponential(1)}, in ${walk.dtype}`;
    predict(token);
    document.dispatchEvent(new CustomEvent("walk-token", { detail: token }));
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
    list.scrollTop = item.offsetTop - list.clientHeight / 3;
    // a disabled button would lose the focus
    byId("walk-back").setAttribute("aria-disabled", beside(-1) === at);
    byId("walk-on").setAttribute("aria-disabled", beside(1) === at);
    // wait until the browser has scrolled to the line by itself
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

  // Scroll to the beginning of the step if it is out of sight.
  function reveal() {
    const { top } = byId("walk-title").getBoundingClientRect();
    if (top < 60 || top > innerHeight / 2)
      byId("walk-stage").scrollIntoView({ behavior: "instant" });
  }

  // Play one step a second up to the last one; after it, start again.
  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => {
      follow(beside(1));
      if (beside(1) === at) play(false);
    }, 1000) : 0;
    byId("walk-play").textContent = on ? "Pause" : "Play";
    byId("walk-play").setAttribute("aria-pressed", String(on));
    if (on) reveal();
    if (on && beside(1) === at) follow(0);
  }

  function choose(token) {
    byId("walk-token").value = token;
    go(at, false);
  }

  // Show the run of another text: the same steps, other tokens and numbers.
  function read(other, token = chosen("token"), raw = []) {
    ({ steps, maps, columns, following, tokens, pieces } = other);
    without = other.without ?? {};
    fillTiles(document.querySelectorAll(".tiles"), tokens, raw);
    byId("walk-token").replaceChildren(...tokens.map((text, i) =>
      new Option(`${i} ${text}`, i)));
    byId("walk-token").value = Math.min(token, tokens.length - 1);
    column = Math.min(column, tokens.length - 1);
    if (other.shapes) relabel(other.shapes, other.marks);
    go(at, false);
  }

  // The shapes of another length, and the lines that were taken out.
  function relabel(shapes, marks) {
    const shape = /\d+(\u00d7\d+)*\s*$/;
    const none = marks.flat().length ? "not computed, as a line is taken out"
      : "no new numbers: those of an earlier step";
    items.forEach((item, i) => {
      const [fact] = item.querySelectorAll(".walk-fact");
      const [words, axes] = fact.querySelector(".walk-shape").childNodes;
      const known = fact.dataset;  // as the page was served
      known.words ??= words.data.replace(shape, "");
      known.axes ??= axes?.textContent ?? "";
      words.data = known.words + (shapes[i] || none);
      if (axes) axes.textContent = shapes[i] ? known.axes : "";
      while (fact.lastChild !== fact.querySelector(".walk-shape"))
        fact.lastChild.remove();
      const [apart] = steps[i].apart;
      if (shapes[i] && apart !== null)
        fact.append(apart === 0 ? ", equal" : `, ${apart.toExponential(1)} apart`);
    });
    for (const box of document.querySelectorAll(".boxes li")) {
      const links = [...box.querySelectorAll("a")];
      const last = steps.findIndex((step) =>
        `#step-${step.name}` === links.at(-1).hash);
      box.querySelector(".where").textContent = `gives ${shapes[last] || "nothing"}`;
      for (const link of links) link.title = link.title.replace(/ \d\S*$/, "");
    }
    sides.forEach((side, index) => {
      for (const line of side.querySelectorAll(".line.taken")) {
        line.classList.remove("taken");
        delete line.dataset.now;
      }
      const sources = side.querySelectorAll(".walk-source");
      for (const [source, number, now] of marks[index])
        for (const line of sources[source].querySelectorAll(".line"))
          if (Number(line.dataset.line) === number) {
            line.classList.add("taken");
            line.dataset.now = now;
          }
    });
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
      reveal();
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
    const cell = (event) => cellAt(event, shown[index].rows, shown[index].width +
      (gapped(shown[index]) ? shown[index].heads - 1 : 0));
    const tell = (place, choice) => {
      const pointed = place.map((n) =>
        Math.max(0, Math.min(tokens.length - 1, n)));
      if (choice && shown[index].square) column = pointed[1];
      if (choice) choose(pointed[0]);
      side.querySelector(".walk-cell").textContent = shown[index].square
        ? cellOf(steps[at], shown[index], ...pointed)
        : numberAt(shown[index], pointed[0], place[1]);
    };
    canvas.addEventListener("pointermove", (event) => tell(cell(event)));
    canvas.addEventListener("click", (event) => {
      if (shown[index].rows === tokens.length) tell(cell(event), true);
    });
    canvas.addEventListener("keydown", (event) => {
      const move = ARROWS[event.key];
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
    const step = ARROWS[event.key]?.reduce((a, b) => a + b);
    const inside = byId("walk").contains(event.target);
    const sideways = /Left|Right/.test(event.key) &&
      event.target === document.body;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key.toLowerCase() === "p") {
      event.preventDefault();  // a list would choose by first letter
      play(!timer);
    }
    if (!step) return;
    play(false);
    if (!(inside || sideways) || event.target.closest("select, input, .cell")) return;
    event.preventDefault();
    // scroll the content above out of sight, so that text and map are seen
    follow(beside(step),
      byId("walk-stage").getBoundingClientRect().top > 60);
  });
  addEventListener("hashchange", () => linked() < 0 || go(linked(), true));
  dark.addEventListener("change", () => go(at, false));
  byId("walk-stage").hidden = false;
  if (following && byId("next")) byId("next").hidden = false;
  byId("walk").classList.add("alive");
  byId("walk-token").value = Math.min(5, tokens.length - 1);
  go(linked() >= 0 ? linked() : walk.opens, false);
  addEventListener("load", () => {
    document.querySelector(":target")?.scrollIntoView({ behavior: "instant" });
    go(at, linked() >= 0 || walk.opens > 0);
  });
  return { read, choose };
}

const walker = data.walk ? startWalk(data.walk) : null;
