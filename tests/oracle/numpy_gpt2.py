"""GPT-2 in NumPy; it records each array, as a port in C would dump it."""

import numpy as np


def norm(x, gain, shift):
    centre = x - x.mean(-1, keepdims=True)
    spread = (centre**2).mean(-1, keepdims=True)
    return centre / np.sqrt(spread + 1e-5) * gain + shift


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(w, ids, n_head, fault="", dtype=np.float32):
    """Return (name, array) pairs in the order of computation."""
    w = {name: array.astype(dtype) for name, array in w.items()}
    dump, time, shape = [], ids.shape[1], (*ids.shape, n_head, -1)

    def keep(name, array):
        dump.append((f"{len(dump):03}_{name}", array.astype(dtype)))
        return array

    places = np.arange(time) + (fault == "embed")
    x = keep("embed", w["wte.weight"][ids] + w["wpe.weight"][places])
    for i in range(max(int(n.split(".")[1]) for n in w if n[:2] == "h.") + 1):
        p = {n.removeprefix(f"h.{i}."): a for n, a in w.items()}
        here = i == 1  # whether this layer has the fault: layer 1
        shift = p["ln_1.bias"] * (0 if here and fault == "ln" else 1)
        n = keep(f"ln_{i}", norm(x, p["ln_1.weight"], shift))
        qkv = n @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]
        parts = np.split(qkv, 3, -1)
        if here and fault == "q":
            parts[0] = parts[0] - p["attn.c_attn.bias"][: n.shape[-1]]
        q, k, v = (
            keep(f"{name}_{i}", a).reshape(shape).swapaxes(1, 2)
            for name, a in zip("qkv", parts, strict=True)
        )
        scale = q.shape[-1] ** (-1.0 if here and fault == "scores" else -0.5)
        scores = (q @ k.swapaxes(2, 3)) * dtype(scale)
        seen = np.tril(np.ones((time, time), bool), here and fault == "att")
        att = keep(f"att_{i}", softmax(np.where(seen, scores, -np.inf)))
        y = (att @ v).swapaxes(1, 2).reshape(*ids.shape, -1)
        y = keep(f"y_{i}", y)
        y = y @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
        x = keep(f"mid_{i}", (n if here and fault == "mid" else x) + y)
        n = norm(x, p["ln_2.weight"], p["ln_2.bias"])
        h = n @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"]
        h = keep(
            f"act_{i}",
            np.maximum(h, 0) if here and fault == "act" else gelu(h),
        )
        h = h @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
        x = keep(f"out_{i}", x + h)
    x = keep("last", norm(x, w["ln_f.weight"], w["ln_f.bias"]))
    head = "wte.weight" if fault == "logits" else "lm_head.weight"
    keep("logits", x @ w[head].T)
    return dump
