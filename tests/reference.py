"""The decoder once more, in float64 NumPy and loops, to compare with.

Written from the equations of Vaswani et al. 2017 and Radford et al. 2019,
not from either style: no batch axis, no heads axis, one position at a time.
"""

import math

import numpy as np


def softmax(scores):
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


def attend(query, keys, values):
    """One query against a list of keys; returns the mixture and weights."""
    scores = [
        sum(q * k for q, k in zip(query, key, strict=True))
        / math.sqrt(len(query))
        for key in keys
    ]
    weights = softmax(scores)
    mixed = sum(w * v for w, v in zip(weights, values, strict=True))
    return mixed, weights


def masked_attention(query, key, value, visible):
    """Attention of (time, d) arrays; visible[t][s] tells who sees whom."""
    rows, weights = [], np.zeros((len(query), len(key)))
    for t in range(len(query)):
        seen = [s for s in range(len(key)) if visible[t][s]]
        row, row_weights = attend(query[t], key[seen], value[seen])
        rows.append(row)
        weights[t, seen] = row_weights
    return np.array(rows), weights


def causal_attention(x, qkv_weight, qkv_bias, out_weight, out_bias, n_head):
    """Multi-head causal self-attention of one sequence (time, width)."""
    parts = (x @ qkv_weight + qkv_bias).reshape(len(x), 3, n_head, -1)
    visible, heads = np.tri(len(x)), []
    for h in range(n_head):
        query, key, value = (parts[:, part, h] for part in range(3))
        heads.append(masked_attention(query, key, value, visible)[0])
    return np.concatenate(heads, axis=1) @ out_weight + out_bias


def layer_norm(x, gain, shift, eps):
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        rows.append((row - mean) / math.sqrt(variance + eps) * gain + shift)
    return np.array(rows)


def activate(x, name):
    function = {
        "relu": lambda v: max(v, 0.0),
        "gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
        "gelu_tanh": lambda v: (
            v
            * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
            / 2
        ),
    }[name]
    return np.vectorize(function, otypes=[float])(x)


def log_probs(state, config, tokens, eps):
    """Log-probabilities (time, vocab) of one sequence of ids."""
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    x = np.array([w["wte.weight"][i] for i in tokens])
    x = x + w["wpe.weight"][: len(tokens)]
    for i in range(config.n_layer):
        b = {
            name.removeprefix(f"h.{i}."): array
            for name, array in w.items()
            if name.startswith(f"h.{i}.")
        }
        y = layer_norm(x, b["ln_1.weight"], b["ln_1.bias"], eps)
        x = x + causal_attention(
            y,
            b["attn.c_attn.weight"],
            b["attn.c_attn.bias"],
            b["attn.c_proj.weight"],
            b["attn.c_proj.bias"],
            config.n_head,
        )
        y = layer_norm(x, b["ln_2.weight"], b["ln_2.bias"], eps)
        y = activate(
            y @ b["mlp.c_fc.weight"] + b["mlp.c_fc.bias"], config.activation
        )
        x = x + y @ b["mlp.c_proj.weight"] + b["mlp.c_proj.bias"]
    x = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"], eps)
    logits = x @ w.get("lm_head.weight", w["wte.weight"]).T
    logits = logits + w.get("lm_head.bias", 0.0)
    return np.array([np.log(softmax(list(row))) for row in logits])
