"""A third style for the tests: someone's own decoder, in a package of theirs.

Everything is its own: per-head projections in one 3-D parameter, a norm from
functional, no word about what it calls things.
"""

SOURCE = '''
"""My own GPT."""

import torch
import torch.nn.functional as F
from torch import nn

from shared.checkpoint.gpt2_layout import read_gpt2

CAUSAL = {causal}
BY_HAND = {by_hand}


class Heads(nn.Module):
    """All heads in one einsum."""

    def __init__(self, config):
        super().__init__()
        C, H = config.n_embd, config.n_head
        self.qkv = nn.Parameter(torch.randn(3, H, C, C // H) * 0.02)
        self.shift = nn.Parameter(torch.zeros(3, H, C // H))
        self.join = nn.Linear(C, C)

    def forward(self, x):
        T = x.size(1)
        q, k, v = torch.einsum("btc,nhcd->nbhtd", x, self.qkv) + (
            self.shift[:, None, :, None]
        )
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        if CAUSAL:
            seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        if BY_HAND:
            p = (scores - scores.amax(-1, keepdim=True)).exp()
            p = p / p.sum(-1, keepdim=True)
        else:
            p = torch.softmax(scores, -1)
        return self.join((p @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Both halves."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        eps = 1e-5 if config.norm_eps is None else config.norm_eps
        self.norms = nn.ModuleList(nn.LayerNorm(C, eps) for _ in range(2))
        self.heads = Heads(config)
        act = {{"relu": nn.ReLU(), "gelu": nn.GELU()}}.get(
            config.activation, nn.GELU(approximate="tanh")
        )
        inner = config.inner_size
        self.net = nn.Sequential(
            nn.Linear(C, inner), act, nn.Linear(inner, C)
        )

    def forward(self, x):
        x = x + self.heads(self.norms[0](x))
        return x + self.net(self.norms[1](x))


class Mine(nn.Module):
    """The whole of it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        C, V = config.n_embd, config.vocab_size
        self.tables = nn.ModuleList(
            [nn.Embedding(V, C), nn.Embedding(config.block_size, C)]
        )
        self.start = nn.Identity()
        self.layers = nn.ModuleList(
            Layer(config) for _ in range(config.n_layer)
        )
        eps = 1e-5 if config.norm_eps is None else config.norm_eps
        self.norm = nn.LayerNorm(C, eps)
        self.out = nn.Linear(C, V)

    @property
    def vocab_size(self):
        return self.config.vocab_size

    @property
    def block_size(self):
        return self.config.block_size

    def log_probs(self, tokens):
        where = torch.arange(tokens.size(1), device=tokens.device)
        x = self.start(self.tables[0](tokens) + self.tables[1](where))
        for layer in self.layers:
            x = layer(x)
        return F.log_softmax(self.out(self.norm(x)), -1)


def build_model(config):
    return Mine(config)


def from_gpt2(state, config):
    state = read_gpt2(state, config)
    model = Mine(config).to(state["wte.weight"])
    C, H = config.n_embd, config.n_head
    bias = state.get("lm_head.bias", torch.zeros(config.vocab_size))
    mine = {{
        "tables.0.weight": state["wte.weight"],
        "tables.1.weight": state["wpe.weight"],
        "norm.weight": state["ln_f.weight"],
        "norm.bias": state["ln_f.bias"],
        "out.weight": state["lm_head.weight"],
        "out.bias": bias,
    }}
    for i in range(config.n_layer):
        his, own = f"h.{{i}}.", f"layers.{{i}}."
        for n in (0, 1):
            for kind in ("weight", "bias"):
                mine[f"{{own}}norms.{{n}}.{{kind}}"] = state[
                    f"{{his}}ln_{{n + 1}}.{{kind}}"
                ]
        fused = state[f"{{his}}attn.c_attn.weight"]
        mine[f"{{own}}heads.qkv"] = fused.view(C, 3, H, C // H).permute(
            1, 2, 0, 3
        )
        mine[f"{{own}}heads.shift"] = state[
            f"{{his}}attn.c_attn.bias"
        ].view(3, H, C // H)
        for name, there in (
            ("heads.join", "attn.c_proj"),
            ("net.0", "mlp.c_fc"),
            ("net.2", "mlp.c_proj"),
        ):
            to, of = f"{{own}}{{name}}", f"{{his}}{{there}}"
            mine[f"{{to}}.weight"] = state[f"{{of}}.weight"].t()
            mine[f"{{to}}.bias"] = state[f"{{of}}.bias"]
    model.load_state_dict(mine)
    return model


def to_gpt2(model):
    mine = model.state_dict()
    C = model.config.n_embd
    state = {{
        "wte.weight": mine["tables.0.weight"],
        "wpe.weight": mine["tables.1.weight"],
        "ln_f.weight": mine["norm.weight"],
        "ln_f.bias": mine["norm.bias"],
        "lm_head.weight": mine["out.weight"],
        "lm_head.bias": mine["out.bias"],
    }}
    for i in range(model.config.n_layer):
        his, own = f"h.{{i}}.", f"layers.{{i}}."
        for n in (0, 1):
            for kind in ("weight", "bias"):
                state[f"{{his}}ln_{{n + 1}}.{{kind}}"] = mine[
                    f"{{own}}norms.{{n}}.{{kind}}"
                ]
        state[f"{{his}}attn.c_attn.weight"] = (
            mine[f"{{own}}heads.qkv"].permute(2, 0, 1, 3).reshape(C, 3 * C)
        )
        shift = mine[f"{{own}}heads.shift"]
        state[f"{{his}}attn.c_attn.bias"] = shift.flatten()
        for name, there in (
            ("heads.join", "attn.c_proj"),
            ("net.0", "mlp.c_fc"),
            ("net.2", "mlp.c_proj"),
        ):
            to, of = f"{{his}}{{there}}", f"{{own}}{{name}}"
            state[f"{{to}}.weight"] = mine[f"{{of}}.weight"].t()
            state[f"{{to}}.bias"] = mine[f"{{of}}.bias"]
    return {{name: tensor.clone() for name, tensor in state.items()}}


COMPONENTS = {{
    "embedding": (Mine,),
    "attention": (Heads,),
    "feed_forward": (Layer,),
    "block": (Layer,),
    "model": (Mine,),
    "head": (Mine.log_probs,),
    "weights": (from_gpt2,),
}}
STAGES = {{
    "embedding": "start",
    "block.{{i}}.attention": "layers.{{i}}.heads",
    "block.{{i}}.feed_forward": "layers.{{i}}.net",
    "block.{{i}}": "layers.{{i}}",
    "final_norm": "norm",
}}
'''


def write(folder, name, *, causal=True, by_hand=False):
    """Write the package into a folder, and return its name."""
    package = folder / name
    package.mkdir()
    source = SOURCE.format(causal=causal, by_hand=by_hand)
    (package / "__init__.py").write_text(source)
    return name
