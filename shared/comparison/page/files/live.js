
// The live page: sends the text of the field to the gpt-duet that served it, and
// shows the answers. No model runs here, and text is only ever set as text.
function startLive({ most }) {
  const field = byId("live-text");
  const parts = [...document.querySelectorAll("[name=part]")];
  const names = ["left", "right"];
  // The ids of a text. Written ids may be bytes that no typed text has.
  let known = { text: null, ids: [], whole: true };
  // The ids of the last run, its chosen token, and the token that the page chose
  // for the reader, because that token shows that the mask is taken out.
  let last = { ids: "", token: 0, telling: null };
  let bars = [];  // the bars of each position
  let drawn = "";  // the part whose bars are drawn
  let telling = false;  // whether the next run may choose an early token
  let asked = null;  // the text of the last request
  let judged = false;  // whether check_causality runs: after the first switch
  const verdicts = {};  // the verdicts on both sides, by part
  let drawMaps = null;
  let sameSteps = null;  // the walk's sentence about the whole models
  let [newest, queue] = [0, Promise.resolve()];
  let [writing, timer] = [false, 0];
  let tables = null;  // the tables of the cache
  let piece = 2;  // which of the three pieces the cache shows

  const RUNS = { "/read": "your text", "/write": "the next token",
    "/influence": "the maps", "/cache": "the cache",
    "/causality": "check_causality, a few seconds" };
  const part = () => parts.find((choice) => choice.checked)?.value ?? "";
  const label = (value) => parts.find((choice) => choice.value === value)
    .parentElement.textContent.trim();
  const say = (words, wrong = false) => {
    byId("live-said").textContent = words;
    byId("live-said").classList.toggle("bad", wrong);
  };
  const stale = (on, ...ids) => {
    for (const id of ids) byId(id)?.setAttribute("aria-busy", String(on));
  };

  // Ask one question at a time, and none whose answer would come too late.
  function ask(path, question, late) {
    const answer = queue.then(() => late() ? null : send(path, question));
    queue = answer.catch(() => {});
    return answer;
  }

  async function send(path, question) {
    byId("live-busy").textContent = `running\u2026 ${RUNS[path]}`;
    byId("live-busy").hidden = false;
    try {
      const response = await fetch(path, { method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(question) }).catch(() => {
        throw new Error("gpt-duet does not answer: is it still running?");
      });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      return answer;
    } finally {
      byId("live-busy").hidden = true;
    }
  }

  // Begin a request; return a function that says whether a newer one has begun.
  function begin() {
    const mine = ++newest;
    clearTimeout(timer);
    setWriting(false);
    return () => mine !== newest;
  }

  // Return the question about the text that the field has now.
  const question = () => ({ part: part(), temperature: heat(), top_k: keep(),
    ...field.value === known.text && known.whole ? { ids: known.ids }
      : { text: field.value } });

  async function run() {
    const late = begin();
    asked = field.value;
    showPart();
    if (!field.value) return showNothing();
    stale(true, "live-bars", "live-maps", "cache");
    const text = field.value;
    try {
      const answer = await ask("/read", question(), late);
      if (late()) return;
      show(answer, text);
    } catch (error) {
      if (!late()) showNothing(error.message);
      return;
    }
    await follow(late).catch((error) => late() || say(error.message, true));
  }

  function show(answer, text) {
    const { ids, count, raw } = answer;
    const cut = count > ids.length;
    known = { text, ids, whole: !cut };
    [bars, drawn] = [answer.bars, answer.part];
    say(`${ids.length} of at most ${most} tokens` +
      (cut ? `; the first ${ids.length} of ${count} are run` : "") +
      `; both styles ran them in ${answer.seconds.toFixed(2)} s.`);
    setEmpty(false);
    // another switch keeps the token that is chosen
    const same = String(ids) === last.ids;
    let token = same ? last.token : ids.length - 1;
    // the token that the page chose is dropped with the switch
    if (same && token === last.telling && drawn !== "mask") token = ids.length - 1;
    if (!same || drawn !== "mask") last.telling = null;
    if (telling && drawn === "mask" && token === ids.length - 1)
      token = last.telling = tellingToken(answer);
    telling = false;
    last.ids = String(ids);
    if (walker) walker.read(answer.walk, token, raw);
    else {
      fillTiles([byId("live-tokens")], answer.tokens, raw);
      choose(token);
    }
    byId("live-raw").hidden = !raw.length;
    stale(false, "live-bars");
    showChanges(answer);
  }

  // Without the mask, return the token after which the text's next token gains
  // the most probability; if no bar shows such a gain, return the token whose
  // bars move most.
  function tellingToken({ bars, tokens }) {
    const early = bars.slice(0, -1);
    const gains = early.map((rows, i) => rows.find(([piece]) =>
      piece === tokens[i + 1])).map((row) => row ? row[1] - row[3] : 0);
    const moves = early.map((rows) => rows.reduce((sum, [, now, , was]) =>
      sum + Math.abs(now - was), 0));
    const by = gains.some((gain) => gain > 0) ? gains : moves;
    return early.length ? by.indexOf(Math.max(...by)) : 0;
  }

  // A text that does not run: no tokens, no bars, nothing to write after.
  function showNothing(error = "") {
    say(error || "Type a text." + (walker ? " The steps below still show the last one."
      : ""), Boolean(error));
    known = { text: null, ids: [], whole: true };
    last.ids = "";
    bars = [];
    byId("live-tokens").replaceChildren();
    byId("live-bars").replaceChildren();
    byId("live-after").textContent = error || "Type a text.";
    byId("live-raw").hidden = true;
    stale(false, "live-bars");
    setEmpty(true);
    showNoCache(0);
  }

  function setEmpty(on) {
    for (const id of ["live-one", "live-write"]) byId(id).disabled = on;
    document.querySelector(".live-influence")?.toggleAttribute("hidden", on);
  }

  // Slower answers follow the bars, unless a newer request has begun.
  async function follow(late) {
    const [{ ids }, part] = [known, drawn];
    if (walker && parts.length) {
      const maps = await ask("/influence", { ids, part }, late);
      if (late()) return;
      drawMaps = drawMaps ?? showInfluence("live-map", "live-readout", maps);
      drawMaps(maps);
      labelMaps(maps);
      stale(false, "live-maps");
    }
    if (ids.length < 3) showNoCache(ids.length);
    else {
      const answer = await ask("/cache", { ids }, late);
      if (late()) return;
      tables = answer;
      showCache();
    }
    if (!judged || !walker) return;
    const own = verdicts[part] ??= [];
    // a check takes seconds, in which no text runs: wait for a pause
    await new Promise((wake) => setTimeout(wake, 500));
    for (const side of [0, 1]) {
      own[side] ??= await ask("/causality", { part, side }, late);
      showVerdicts();
      if (late()) return;
    }
  }

  function labelMaps({ time, early, largest }) {
    const count = known.ids.length;
    byId("live-cut").hidden = time === count;
    byId("live-cut").textContent = `The maps are of the first ${time} of ${count} tokens.`;
    names.forEach((name, side) => {
      const figure = byId(`live-map-${name}`).closest("figure");
      const [rows, below] = figure.querySelectorAll(".axis");
      for (const axis of [rows, below])
        axis.replaceChildren(...Array.from({ length: time }, (_, i) => {
          const label = document.createElement("span");
          label.textContent = i % 4 ? "" : i;
          return label;
        }));
      const leaks = early[side] > 1e-12 * largest[side];
      const said = figure.querySelector("figcaption span");
      said.textContent = leaks
        ? "sees the future: log-probabilities above the diagonal move by up to " +
          +early[side].toPrecision(2)
        : early[side] === 0 ? "exactly 0 above the diagonal"
        : "only rounding above the diagonal";
      said.classList.toggle("bad", leaks);
    });
  }

  // Show the chosen switch, before any answer arrives.
  function showPart() {
    for (const why of document.querySelectorAll(".live-why"))
      why.hidden = why.dataset.part !== part();
    byId("live-changes")?.replaceChildren();
    byId("live-marked")?.toggleAttribute("hidden", true);
    // the walk's own verdict is about the whole pair
    document.querySelector(".walk-verdict")?.toggleAttribute("hidden", Boolean(part()));
    showVerdicts();
    showBanner(field.value ? "being compared\u2026" : "type a text to compare them");
  }

  // Show the lines that are taken out, and how far both styles then differ.
  function showChanges({ changes, agreement }) {
    byId("live-was").hidden = !drawn;
    byId("live-marked")?.toggleAttribute("hidden", !drawn);
    byId("live-changes")?.replaceChildren(...changes.map(
      ([side, place, old, now, step]) => {
        const item = document.createElement("li");
        for (const [name, text] of [[step ? "a" : "span", place], ["del", old],
          ["ins", now]]) {
          const element = document.createElement(name);
          element.textContent = text;
          item.append(element);
        }
        item.firstChild.className = names[side];
        if (step) item.firstChild.href = `#step-${step}`;
        return item;
      }));
    const { apart, bound, dtype } = agreement;
    const of = byId("walk-same");
    sameSteps ??= of?.textContent;
    if (of) of.textContent = !drawn ? sameSteps : "The steps are now those of " +
      `${data.styles[0]} (shown first) and ${data.styles[1]}, both without the ` +
      `${label(drawn)}.`;
    const one = bound === null ? null : apart !== null && apart <= bound;
    showBanner(one === null ? "compared on your text" : one ? "still one function"
      : "two functions", one, `On your text, in ${dtype}, the largest difference in ` +
      `log-probabilities is ${apart === null ? "not a number" : apart.toExponential(1)}` +
      (bound === null ? "" : `; rounding can cause up to ${bound.toExponential(1)}`) +
      ". \u201cnothing\u201d brings the whole pair back.");
  }

  // The banner of the page, about the pair that runs.
  const banner = byId("verdict");
  const [whole, wholeClass] = [[...banner.childNodes], banner.className];
  function showBanner(words, one = null, more = "") {
    banner.className = part() ? `verdict ${one ? "one" : one === false ? "two" : ""}`
      : wholeClass;
    if (!part()) return banner.replaceChildren(...whole);
    const [strong, span] = ["strong", "span"].map((name) =>
      document.createElement(name));
    strong.textContent = `Both styles without the ${label(part())}: ${words}`;
    span.textContent = more;
    banner.replaceChildren(strong, span);
  }

  // A check is about a model, not about a text: its result remains.
  function showVerdicts() {
    for (const [side, name] of names.entries()) {
      const box = byId(`live-verdict-${name}`);
      if (!box) return;
      const found = verdicts[part()]?.[side];
      box.hidden = !judged;
      box.className = `live-verdict ${found?.status ?? ""}`;
      box.querySelector("strong").textContent = found ? `${found.status}:` : "";
      setMarked(box.querySelector("span"),
        found?.headline ?? "runs on this model, a few seconds\u2026");
      box.querySelector("details").hidden = !found;
      setMarked(box.querySelector("details span"), found?.sentence ?? "");
    }
  }

  // Show the bars of a token, and scroll to its tile.
  function choose(position) {
    last.token = position;
    drawBars(bars[position], position);
    for (const tiles of document.querySelectorAll(".tiles")) {
      const tile = tiles.children[position]?.firstElementChild;
      if (!tile) continue;
      if (!walker) press(tile);
      const low = tile.offsetTop + tile.offsetHeight - tiles.clientHeight;
      tiles.scrollTop = Math.min(Math.max(tiles.scrollTop, low + 4),
        Math.max(0, tile.offsetTop - 4));
    }
  }

  function press(tile) {
    for (const other of tile.closest(".tiles").querySelectorAll("button"))
      other.setAttribute("aria-pressed", String(other === tile));
  }

  // Two bars for each token, left above right; the outline is the old bar.
  function drawBars(rows, position) {
    if (!rows) return;
    const most = Math.max(...rows.flatMap((row) => row.slice(1, 5)));
    const said = (share) => `${(100 * share).toFixed(1)} %`;
    const tiles = byId("live-tokens");
    const next = tiles.children[position + 1]?.querySelector(".piece").textContent;
    byId("live-bars").replaceChildren(...rows.map(([text, ...shares]) => {
      const item = byId("live-bar").content.cloneNode(true).firstElementChild;
      item.querySelector(".piece").textContent = text;
      item.classList.toggle("actual", text === next);
      if (shares[4]) markRaw(item.querySelector(".piece"));
      const [left, right, was] = item.querySelectorAll("i, s");
      [left, right, was].forEach((bar, i) => {
        bar.style.width = `${100 * shares[i] / (most || 1)}%`;
      });
      was.hidden = !drawn;
      item.querySelector(".percent").textContent = said(shares[0]) +
        (Math.abs(shares[0] - shares[1]) > 5e-4 ? `, ${said(shares[1])}` : "") +
        (drawn ? ` (was ${said(shares[2])})` : "");
      return item;
    }));
    byId("live-actual").hidden = !byId("live-bars").querySelector(".actual");
    byId("live-after").replaceChildren(`After token ${position}, \u2026\u201c`,
      ...endAt(tiles, position), "\u201d:");
  }

  const heat = () => Number(byId("live-heat").value) / 10;
  const keep = () => Number(byId("live-keep").value) % 21;
  function showChoices() {
    byId("live-heat-said").textContent = heat() ? heat().toFixed(1) : "0: the likeliest";
    byId("live-keep-said").textContent = keep() || "all";
    byId("live-drawn").textContent = `At temperature ${heat().toFixed(1)}, ` +
      `from ${keep() ? `the ${keep()} likeliest` : "all"} tokens.`;
  }

  function setWriting(on) {
    writing = on;
    byId("live-write").textContent = on ? "Stop" : "Write on";
    byId("live-write").setAttribute("aria-pressed", String(on));
  }

  // Write token by token, until the text is full or the reader stops it.
  async function write(count) {
    if (writing) return run();
    const full = () => field.value === known.text && known.ids.length >= most;
    if (full()) return say(`The text has all ${most} tokens: nothing more is written.`);
    const late = begin();
    setWriting(true);
    const seed = Math.floor(Math.random() * 2 ** 31);
    try {
      for (let done = 0; done < count && !full(); done++) {
        const answer = await ask("/write", { ...question(), seed }, late);
        if (late()) return;
        field.value = answer.text;
        asked = field.value;
        known = { text: asked, ids: answer.ids, whole: true };
        const { length } = answer.ids;
        const tile = makeTile(answer.pieces[0], length - 1);
        if (answer.raw) markRaw(tile);
        byId("live-tokens").append(tile);
        press(tile.firstElementChild);
        drawBars(answer.bars[0], length - 1);
        say(`${length} of at most ${most} tokens; ` + (answer.agree
          ? `both styles chose \u201c${answer.pieces[0]}\u201d.`
          : `${data.styles[0]} chose \u201c${answer.pieces[0]}\u201d, ` +
            `${data.styles[1]} \u201c${answer.pieces[1]}\u201d.`));
        if (done + 1 < count) await new Promise((wake) => setTimeout(wake, 100));
        if (late()) return;
      }
      await run();
    } catch (error) {
      if (late()) return;
      setWriting(false);
      say(error.message, true);
    }
  }

  // --- The cache -------------------------------------------------------------

  function showCache() {
    const { pieces, sides, tokens } = tables;
    const ends = pieces.map((_, i) => pieces.slice(0, i + 1)
      .reduce((sum, n) => sum + n, 0));
    const [from, to] = [ends[piece] - pieces[piece], ends[piece]];
    const known = sides.find((side) => side.tables);
    if (!known) {
      byId("cache-said").textContent = "Neither style has a cache.";
      return;
    }
    hideCache(false);
    fillChoices("cache-layer", known.tables.length);
    fillChoices("cache-head", known.heads);
    byId("cache-pieces").replaceChildren(...pieces.map((count, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = i < 2 ? `Piece ${i + 1}: ${count} tokens` : "Then one token";
      button.setAttribute("aria-pressed", String(i === piece));
      button.addEventListener("click", () => {
        piece = i;
        showCache();
        byId("cache-pieces").children[i].focus();
      });
      return button;
    }));
    byId("cache-said").textContent = cacheWords(from, to, tokens);
    names.forEach((name, index) => showTables(name, sides[index], from, to, tokens));
  }

  function hideCache(on) {
    for (const part of ["#cache-pieces", "#cache-choices", ".cache-sides"])
      document.querySelector(part).hidden = on;
    stale(false, "cache");
  }

  function showNoCache(count) {
    tables = null;
    hideCache(true);
    byId("cache-said").textContent = "The cache needs at least 3 tokens: two pieces " +
      `and one token. This text has ${count}.`;
  }

  function cacheWords(from, to, tokens) {
    const text = tokens.slice(from, to).join("");
    if (from === 0)
      return `Tokens 0 to ${to - 1}, \u201c${text}\u201d, go through the model. ` +
        `Each layer computes their keys and values and keeps them: ${to} new rows.`;
    const [what, rows] = to - from > 1
      ? [`Only tokens ${from} to ${to - 1}, \u201c${text}\u201d, go`, `${to - from} new rows`]
      : [`Only token ${from}, \u201c${text}\u201d, goes`, "one new row"];
    return `${what} through the model: ${rows}, framed. Rows 0 to ${from - 1} are ` +
      "not computed again; the new queries read them as they were kept" +
      (tables.sides.every((side) => side.kept ?? true)
        ? ": bit for bit the same keys and values." : ".");
  }

  function fillChoices(id, count) {
    if (byId(id).length === count) return;
    byId(id).replaceChildren(...Array.from({ length: count }, (_, i) =>
      new Option(i, i)));
  }

  // The numbers of one head: number(row, column).
  function decodeTable(base64, rows, heads) {
    const numbers = new Float32Array(bytes(base64).buffer);
    const wide = numbers.length / rows;
    const width = wide / heads;
    const start = Number(byId("cache-head").value) * width;
    return { width, number: (i, j) => numbers[i * wide + start + j] };
  }

  function showTables(name, side, from, to, tokens) {
    const box = byId(`cache-${name}`);
    box.hidden = !side.tables;
    if (!side.tables) return;
    const layer = Number(byId("cache-layer").value);
    const [fast, slow] = side.milliseconds;
    box.querySelector(".cache-time").textContent =
      `For the last token, one row goes through the model with the cache, in ` +
      `${fast.toFixed(1)} ms; without it all ${tokens.length} rows go through ` +
      `again, in ${slow.toFixed(1)} ms (medians of ${side.runs} alternating runs). ` +
      "The log-probabilities at the end, read in pieces and read at once, are " +
      `${brief(side.apart)} apart in ${side.dtype}: matrix products of other sizes ` +
      "round differently, even of the same kept numbers.";
    box.querySelectorAll("figure").forEach((figure, which) => {
      const table = decodeTable(side.tables[layer][which], tokens.length, side.heads);
      const canvas = figure.querySelector("canvas");
      let largest = 0;
      for (let i = 0; i < tokens.length; i++)
        for (let j = 0; j < table.width; j++)
          largest = Math.max(largest, Math.abs(table.number(i, j)));
      const [below, above] = [colour("--map-left"), colour("--map-right")];
      fillCells(canvas, tokens.length, table.width, (i, j) => i >= to ? null
        : [table.number(i, j) < 0 ? below : above,
          Math.sqrt(Math.abs(table.number(i, j)) / (largest || 1))]);
      const frame = figure.querySelector("i");
      frame.hidden = false;
      frame.style.top = `${100 * from / tokens.length}%`;
      frame.style.height = `${100 * (to - from) / tokens.length}%`;
      figure.querySelector(".cache-map").style.setProperty("--rows", tokens.length);
      figure.querySelector(".axis").replaceChildren(...tokens.map((text, i) => {
        const label = document.createElement("span");
        const short = text.length > 7 ? `${text.slice(0, 6)}\u2026` : text;
        label.textContent = which || (tokens.length > 24 && i % 4) ? "" : `${short} ${i}`;
        return label;
      }));
      canvas.onpointermove = canvas.onclick = (event) => {
        const [i, j] = cellAt(event, tokens.length, table.width);
        box.querySelector(".cache-cell").textContent = i >= to || !tokens[i]
          ? "This position is not read yet."
          : `${figure.textContent.startsWith("keys") ? "key" : "value"} of ` +
            `${i} \u201c${tokens[i]}\u201d, number ${j}: ` +
            `${+table.number(i, j).toPrecision(4)}` +
            (i < from ? ", kept" : ", new");
      };
    });
  }

  // --- Events ----------------------------------------------------------------

  field.addEventListener("input", () => {
    begin();
    if (field.value) timer = setTimeout(run, 200);
    else run();
  });
  field.addEventListener("change", () => field.value === asked || run());
  byId("live-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  for (const example of document.querySelectorAll(".live-try button"))
    example.addEventListener("click", () => {
      field.value = example.value;
      telling = true;
      run();
    });
  byId("live-one").addEventListener("click", () => write(1));
  byId("live-write").addEventListener("click", () => write(Infinity));
  for (const id of ["live-heat", "live-keep"]) {
    byId(id).addEventListener("input", showChoices);
    byId(id).addEventListener("change", () => writing || run());
  }
  for (const choice of parts)
    choice.addEventListener("change", () => {
      judged = telling = true;
      run();
    });
  // a link to the step in the current address would have no effect
  byId("live-changes")?.addEventListener("click", (event) => {
    const step = event.target.closest("a");
    if (!step) return;
    event.preventDefault();
    document.querySelector(`${step.hash} > a`).click();
  });
  for (const id of ["cache-layer", "cache-head"])
    byId(id).addEventListener("change", () => tables && showCache());
  document.addEventListener("walk-token", ({ detail }) => choose(detail));
  if (!walker)
    byId("live-tokens").addEventListener("click", (event) => {
      const tile = event.target.closest("button");
      if (tile) choose(Number(tile.value));
    });
  showChoices();
  for (const choice of parts) choice.checked = choice.value === "";
  run();
}

if (data.live) startLive(data.live);
