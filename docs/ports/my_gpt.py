"""A GPT-2 in plain Python, without a library.

    gpt-duet check "exec:python3 my_gpt.py model.bin"

model.bin is what `gpt-duet convert --to flat` writes. The variable FAULT
plants one of five faults, for the tests: mask, scale, heads, position, eps.
"""

import os
import sys
from array import array
from math import exp, sqrt, tanh
from operator import mul

FAULT = os.environ.get("FAULT", "")


def load(path):
    """Return the sizes of a flat file, and its numbers."""
    with open(path, "rb") as file:
        words = file.readline().split()
        numbers = array("f", file.read())
    V, T, L, H, C, F = map(int, words[1:7])
    return (V, T, L, H, C, F, float(words[8])), iter(numbers)


def take(numbers, *shape):
    """Take the next numbers, as nested lists of the given shape."""
    if len(shape) == 1:
        return [next(numbers) for _ in range(shape[0])]
    return [take(numbers, *shape[1:]) for _ in range(shape[0])]


(V, T, L, H, C, F, eps), numbers = load(sys.argv[1])
wte, wpe = take(numbers, V, C), take(numbers, T, C)
ln_1 = take(numbers, L, C), take(numbers, L, C)
qkv = take(numbers, L, 3 * C, C), take(numbers, L, 3 * C)
proj = take(numbers, L, C, C), take(numbers, L, C)
ln_2 = take(numbers, L, C), take(numbers, L, C)
fc = take(numbers, L, F, C), take(numbers, L, F)
out = take(numbers, L, C, F), take(numbers, L, C)
ln_f = take(numbers, C), take(numbers, C)
head = take(numbers, V, C)


def linear(x, weight, bias):
    return [sum(map(mul, row, x), b) for row, b in zip(weight, bias)]


def norm(x, weight, bias):
    mean = sum(x) / C
    variance = sum((v - mean) ** 2 for v in x) / C
    scale = 1 / sqrt(variance + (1e-3 if FAULT == "eps" else eps))
    return [(v - mean) * scale * w + b for v, w, b in zip(x, weight, bias)]


def split(row):
    """Return the query, key and value of each head in a row of qkv."""
    size = C // H
    parts = [row[i : i + size] for i in range(0, 3 * C, size)]
    if FAULT == "heads":
        return parts[0::3], parts[1::3], parts[2::3]
    return parts[:H], parts[H : 2 * H], parts[2 * H :]


def attend(queries, keys, values, start):
    """Return what each position gathers from itself and earlier ones."""
    scale = 1 / sqrt(C if FAULT == "scale" else C // H)
    rows = []
    for t, heads in enumerate(queries, start + 1):
        end = len(keys) if FAULT == "mask" else t
        row = []
        for h, query in enumerate(heads):
            scores = [sum(map(mul, query, k[h])) * scale for k in keys[:end]]
            most = max(scores)
            weights = [exp(score - most) for score in scores]
            total = sum(weights)
            columns = zip(*(value[h] for value in values[:end]))
            row += [sum(map(mul, weights, c)) / total for c in columns]
        rows.append(row)
    return rows


def gelu(x):
    return x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def add(rows, others):
    return [[a + b for a, b in zip(x, y)] for x, y in zip(rows, others)]


def forward(ids, cache, keep):
    """Return the logits of ids that follow those in a cache."""
    start = len(cache[0][0])
    at = range(start, start + len(ids))
    if FAULT == "position":
        at = [max(t - 1, 0) for t in at]
    x = add([wte[i] for i in ids], [wpe[t] for t in at])
    keep("embed", x)
    for layer, (keys, values) in enumerate(cache):

        def by_row(function, rows, pair, layer=layer):
            return [function(r, pair[0][layer], pair[1][layer]) for r in rows]

        a = by_row(norm, x, ln_1)
        keep(f"layer {layer} ln_1", a)
        a = by_row(linear, a, qkv)
        keep(f"layer {layer} qkv", a)
        queries, new_keys, new_values = zip(*map(split, a))
        keys += new_keys
        values += new_values
        a = attend(queries, keys, values, start)
        keep(f"layer {layer} attended", a)
        x = add(x, by_row(linear, a, proj))
        keep(f"layer {layer} after attention", x)
        a = by_row(norm, x, ln_2)
        keep(f"layer {layer} ln_2", a)
        a = [[*map(gelu, row)] for row in by_row(linear, a, fc)]
        keep(f"layer {layer} gelu", a)
        x = add(x, by_row(linear, a, out))
        keep(f"layer {layer} block", x)
    a = [norm(row, *ln_f) for row in x]
    keep("ln_f", a)
    scores = [linear(row, head, [0.0] * V) for row in a]
    keep("logits", scores)
    return scores


def write_array(name, rows):
    print(f"array {name} {len(rows)}x{len(rows[0])}")
    print(*(number for row in rows for number in row))


def nothing(name, rows):
    pass


def empty():
    return [([], []) for _ in range(L)]


# the protocol of `exec:` programs: the first line says what a program can do
print(f"cache dump block_size={T}", flush=True)
kept = empty()
for line in sys.stdin:
    word = line.split()[0]
    ids = [int(i) for i in line.replace(word, "", word.isalpha()).split()]
    if word == "reset":
        kept = empty()
        continue
    seen = len(kept[0][0]) if word == "feed" else 0
    if seen + len(ids) > T or not all(0 <= i < V for i in ids):
        print(f"error at most {T} ids below {V}", flush=True)
    elif word == "dump":
        forward(ids, empty(), write_array)
        print("end", flush=True)
    else:
        cache = kept if word == "feed" else empty()
        scores = forward(ids, cache, nothing)
        print(*(number for row in scores for number in row), flush=True)
