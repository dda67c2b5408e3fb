// A GPT-2 in JavaScript, for node and without a library.
//
//     gpt-duet check "exec:node my_gpt.js model.bin"
//
// model.bin is what `gpt-duet convert --to flat` writes. A second argument
// plants one of five faults, for the tests: mask, scale, heads, position, eps.
"use strict";
const fs = require("fs");

const fault = process.argv[3] || "";
const file = fs.readFileSync(process.argv[2]);
const start = file.indexOf("\n") + 1;
const words = file.subarray(0, start).toString().trim().split(" ");
const [V, T, L, H, C, F] = words.slice(1, 7).map(Number);
const eps = fault === "eps" ? 1e-3 : Number(words[8]);
const numbers = new Float32Array(file.buffer.slice(
  file.byteOffset + start, file.byteOffset + file.length));

let offset = 0;
function take(count) {
  offset += count;
  return numbers.subarray(offset - count, offset);
}
// one array of each kind for all layers, cut into one for each layer
function takeLayers(count) {
  return Array.from({ length: L }, () => take(count));
}
const wte = take(V * C), wpe = take(T * C);
const ln1 = [takeLayers(C), takeLayers(C)];
const qkv = [takeLayers(3 * C * C), takeLayers(3 * C)];
const proj = [takeLayers(C * C), takeLayers(C)];
const ln2 = [takeLayers(C), takeLayers(C)];
const fc = [takeLayers(F * C), takeLayers(F)];
const out = [takeLayers(C * F), takeLayers(C)];
const lnf = [take(C), take(C)], head = take(V * C);

function linear(x, weight, bias) {
  const width = x.length;
  return Array.from({ length: weight.length / width }, (_, o) => {
    let sum = bias ? bias[o] : 0;
    for (let i = 0; i < width; i++) sum += weight[o * width + i] * x[i];
    return sum;
  });
}

function norm(x, weight, bias) {
  const mean = x.reduce((a, b) => a + b) / C;
  const variance = x.reduce((a, b) => a + (b - mean) ** 2, 0) / C;
  return x.map((v, i) =>
    ((v - mean) / Math.sqrt(variance + eps)) * weight[i] + bias[i]);
}

// where a feature of the query (0), key (1) or value (2) is in a row of qkv
function place(part, i) {
  const size = C / H;
  if (fault === "heads") {
    return (Math.floor(i / size) * 3 + part) * size + (i % size);
  }
  return part * C + i;
}

function attend(row, keys, values, end) {
  const size = C / H, scale = 1 / Math.sqrt(fault === "scale" ? C : size);
  const result = new Array(C).fill(0);
  for (let h = 0; h < H; h++) {
    const weights = [];
    for (let u = 0; u < end; u++) {
      let score = 0;
      for (let i = h * size; i < (h + 1) * size; i++) {
        score += row[place(0, i)] * keys[u][place(1, i)];
      }
      weights.push(score * scale);
    }
    const most = Math.max(...weights);
    const powers = weights.map((w) => Math.exp(w - most));
    const total = powers.reduce((a, b) => a + b);
    for (let u = 0; u < end; u++) {
      for (let i = h * size; i < (h + 1) * size; i++) {
        result[i] += (powers[u] / total) * values[u][place(2, i)];
      }
    }
  }
  return result;
}

function gelu(x) {
  return (x / 2) *
    (1 + Math.tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)));
}

function add(rows, others) {
  return rows.map((row, t) => row.map((v, i) => v + others[t][i]));
}

// A cache has the rows of qkv of each layer: keys and values are in them.
function forward(ids, cache, keep) {
  const seen = cache[0].length;
  let x = ids.map((id, t) => {
    const at = fault === "position" ? Math.max(seen + t - 1, 0) : seen + t;
    return Array.from({ length: C }, (_, i) => wte[id * C + i] + wpe[at * C + i]);
  });
  keep("embed", x);
  for (let l = 0; l < L; l++) {
    const byRow = (f, rows, pair) => rows.map((r) => f(r, pair[0][l], pair[1][l]));
    let a = byRow(norm, x, ln1);
    keep(`layer ${l} ln_1`, a);
    a = byRow(linear, a, qkv);
    keep(`layer ${l} qkv`, a);
    cache[l].push(...a);
    a = a.map((row, t) => attend(row, cache[l], cache[l],
      fault === "mask" ? cache[l].length : seen + t + 1));
    keep(`layer ${l} attended`, a);
    x = add(x, byRow(linear, a, proj));
    keep(`layer ${l} after attention`, x);
    a = byRow(norm, x, ln2);
    keep(`layer ${l} ln_2`, a);
    a = byRow(linear, a, fc).map((row) => row.map(gelu));
    keep(`layer ${l} gelu`, a);
    x = add(x, byRow(linear, a, out));
    keep(`layer ${l} block`, x);
  }
  const a = x.map((row) => norm(row, lnf[0], lnf[1]));
  keep("ln_f", a);
  const scores = a.map((row) => linear(row, head, null));
  keep("logits", scores);
  return scores;
}

// the protocol:
const empty = () => Array.from({ length: L }, () => []);
const say = (text) => fs.writeSync(1, text + "\n");
const flat = (rows) => rows.map((row) => row.join(" ")).join(" ");
const writeArray = (name, rows) =>
  say(`array ${name} ${rows.length}x${rows[0].length}\n${flat(rows)}`);
let kept = empty();

function answer(line) {
  const [, word, rest] = /^([a-z]*)(.*)$/.exec(line);
  const ids = rest.trim().split(/\s+/).filter(Boolean).map(Number);
  if (word === "reset") { kept = empty(); return; }
  const seen = word === "feed" ? kept[0].length : 0;
  if (seen + ids.length > T || ids.some((i) => i < 0 || i >= V)) {
    say(`error at most ${T} ids below ${V}`);
  } else if (word === "dump") {
    forward(ids, empty(), writeArray);
    say("end");
  } else {
    say(flat(forward(ids, word === "feed" ? kept : empty(), () => {})));
  }
}

say(`cache dump block_size=${T}`);
require("readline").createInterface({ input: process.stdin }).on("line", answer);
