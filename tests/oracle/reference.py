"""A reference decoder, written with loops in float64 NumPy.

It follows the equations of Vaswani et al. 2017 and Radford et al. 2019, not
the code of either style. It has no batch axis and no axis of heads; it loops
over positions.
"""

import math

import numpy as np

ACTIVATIONS = {
    "relu": lambda v: max(v, 0.0),
    "gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
    "gelu_tanh": lambda v: (
        v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2
    ),
}


def softmax(scores):
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


def masked_attention(query, key, value, visible):
    """Attend over (time, d) arrays; position t sees s if visible[t][s].

    Return the mixed values, and the weights.
    """
    mixed = np.zeros((len(query), value.shape[1]))
    weights = np.zeros((len(query), len(key)))
    for t in range(len(query)):
        seen = [s for s in range(len(key)) if visible[t][s]]
        scores = [query[t] @ key[s] / math.sqrt(query.shape[1]) for s in seen]
        for s, weight in zip(seen, softmax(scores), strict=True):
            weights[t, s] = weight
            mixed[t] += weight * value[s]
    return mixed, weights


def linear(x, b, name):
    return x @ b[f"{name}.weight"] + b[f"{name}.bias"]


def causal_attention(x, b, n_head):
    """Return the causal self-attention of one sequence (time, width)."""
    parts = linear(x, b, "attn.c_attn").reshape(len(x), 3, n_head, -1)
    heads = [
        masked_attention(*parts[:, :, h].swapaxes(0, 1), np.tri(len(x)))[0]
        for h in range(n_head)
    ]
    return linear(np.concatenate(heads, axis=1), b, "attn.c_proj")


def layer_norm(x, b, name, eps):
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        rows.append((row - mean) / math.sqrt(variance + eps))
    return np.array(rows) * b[f"{name}.weight"] + b[f"{name}.bias"]


def log_probs(state, config, tokens, eps):
    """Return the log-probabilities (time, vocab) of one sequence of ids."""
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    activate = np.vectorize(ACTIVATIONS[config.activation], otypes=[float])
    x = w["wte.weight"][list(tokens)] + w["wpe.weight"][: len(tokens)]
    for i in range(config.n_layer):
        start = f"h.{i}."
        b = {k.removeprefix(start): v for k, v in w.items() if start in k}
        x = x + causal_attention(
            layer_norm(x, b, "ln_1", eps), b, config.n_head
        )
        y = linear(layer_norm(x, b, "ln_2", eps), b, "mlp.c_fc")
        x = x + linear(activate(y), b, "mlp.c_proj")
    x = layer_norm(x, w, "ln_f", eps)
    logits = x @ w.get("lm_head.weight", w["wte.weight"]).T
    logits = logits + w.get("lm_head.bias", 0.0)
    return np.array([np.log(softmax(list(row))) for row in logits])
