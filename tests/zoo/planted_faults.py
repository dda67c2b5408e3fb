"""Faults that are planted in both styles and a third implementation.

TABLE reads like a patch. The name of a file, and perhaps of a class, comes
before its faults. "*" is a fault's name, "-" the original code, "+" the code
that replaces it. Without "-", the original code is that of the fault before.
A finding must name the changed statement, or the statement after ">", which
first shows the fault. "@" is the layer: by default the first layer for a fault
within a layer, and otherwise none.
"""

import ast
import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt_duet.importing import first_on_path

ROOT = Path(__file__).resolve().parents[2]
WITHIN_LAYERS = (
    "attention.py",
    "block.py",
    "feed_forward.py",
    "layers.py",
    "ported_gpt.py",
)

TABLE = r"""
== mingpt_style/attention.py
* no mask
- is_causal=is_causal
+ is_causal=False
* scores scaled by 1 / hs
+ is_causal=True, scale=1 / hs
* q and k swapped
- q, k, v = self.c_attn(x).split(C, dim=2)
+ k, q, v = self.c_attn(x).split(C, dim=2)
> attention.py: y = F.scaled
* queries' heads cut the wrong way round
- q = q.view(B, T, self.n_head, hs).transpose(1, 2)
+ q = q.view(B, T, hs, self.n_head).permute(0, 3, 1, 2)
> attention.py: y = F.scaled
* heads joined without their transpose
- y = y.transpose(1, 2).contiguous().view(B, T, C)
+ y = y.contiguous().view(B, T, C)
> attention.py: return self.resid_dropout
* bias of the projection dropped
- self.c_proj(y)
+ F.linear(y, self.c_proj.weight)
* dropout left on
- self.resid_dropout(self.c_proj(y))
+ F.dropout(self.c_proj(y), 0.1, training=True)
* dropout inside the kernel left on
- p = self.dropout if self.training else 0.0
+ p = 0.2
> attention.py: y = F.scaled

== mingpt_style/block.py
* residual from the normed stream
- x = x + self.mlp(self.ln_2(x))
+ x = self.ln_2(x) + self.mlp(self.ln_2(x))
* norm behind attention
- x = x + self.attn(self.ln_1(x), cache)
+ x = self.ln_1(x + self.attn(x, cache))
> attention.py: q, k, v = self.c_attn
* first norm used twice
- self.mlp(self.ln_2(x))
+ self.mlp(self.ln_1(x))

== mingpt_style/feed_forward.py
* exact GELU
- self.act(self.c_fc(x))
+ nn.functional.gelu(self.c_fc(x))
* ReLU
+ self.c_fc(x).relu()
* no activation
+ self.c_fc(x)

== mingpt_style/model.py
* positions one off
- pos = torch.arange(start, T, device=idx.device)
+ pos = torch.arange(start + 1, T + 1, device=idx.device)
> model.py: x = self.transformer.wte(idx)
* positions forgotten
- x = self.transformer.wte(idx) + self.transformer.wpe(pos)
+ x = self.transformer.wte(idx)
> block.py: x = x + self.attn
@ 0
* last norm forgotten
- return self.transformer.ln_f(x)
+ return x
> model.py: return F.log_softmax(self.lm_head(self.hidden(tokens)), dim=-1)
* a layer skipped
- blocks = self.transformer.h
+ blocks = self.transformer.h[1:]
> block.py: x = x + self.attn
@ 1
* a layer used twice
+ blocks = [self.transformer.h[0], *self.transformer.h]
> block.py: x = x + self.attn
@ 0
* head tied to the embedding
- F.log_softmax(self.lm_head(self.hidden(tokens)), dim=-1)
+ (self.hidden(tokens) @ self.transformer.wte.weight.T).log_softmax(-1)

== annotated/attention.py
* mask one off
- scores.masked_fill_(mask == 0
+ scores.masked_fill_(mask.roll(1, -1) == 0
* scores not scaled
- scores = query / math.sqrt(d_k) @
+ scores = query @
> attention.py: scores.masked_fill_(
* softmax over the queries
- scores.softmax(dim=-1)
+ scores.softmax(dim=-2)

== annotated/embedding.py
* embedding not scaled
- self.lut(x) * math.sqrt(self.d_model)
+ self.lut(x)

== annotated/layers.py
* shift of the norm dropped
- / (std + self.eps) + self.b_2
+ / (std + self.eps)
* eps of the norm too large
- / (std + self.eps)
+ / (std + 1e-4)
* mean not taken out
- x = x - x.mean(-1, keepdim=True)
+ x = x - 0.5 * x.mean(-1, keepdim=True)

== tests/zoo/ported_gpt.py
* constant of GELU
- 0.044715
+ 0.04
* eps outside the root
- centre / torch.sqrt(spread + eps)
+ centre / (torch.sqrt(spread) + eps)
* mask hides the present
- .triu(1)
+ .triu(0).tril(8)
> ported_gpt.py: scores = scores.masked_fill
* weights not normalised
- weights = weights / weights.sum(-1, keepdim=True)
+ weights = weights / weights.amax(-1, keepdim=True)
> ported_gpt.py: return weights @ v
* heads joined backwards
- torch.cat(heads, -1)
+ torch.cat(heads[::-1], -1)
> ported_gpt.py: return joined @
* attention of the stream itself
- x = x + attention(w, first, config.n_head)
+ x = x + attention(w, x, config.n_head)
> ported_gpt.py: qkv = x @
* second norm takes the first one's weights
- second = norm(x, w["ln_2.weight"], w["ln_2.bias"], eps)
+ second = norm(x, w["ln_1.weight"], w["ln_2.bias"], eps)
> ported_gpt.py: return centre /
* weight read the wrong way round
- joined @ w["attn.c_proj.weight"] +
+ joined @ w["attn.c_proj.weight"].T +
"""


@dataclass
class Fault:
    """A fault, which is one changed statement.

    Attributes:
        file: the file, as "style/file.py" or "tests/...".
        name: a description of the fault.
        old: the original code, which occurs once.
        new: the code that replaces it.
        shows: "file: text" of the line that first shows the fault, or "".
        layer: the layer that first shows the fault, or None.
        within: the class that has the fault, or "" for the whole file.
    """

    file: str
    name: str
    old: str = ""
    new: str = ""
    shows: str = ""
    layer: int | None = None
    within: str = ""

    def __str__(self):
        return f"{self.within or self.file.split('/')[0]}: {self.name}"

    def start(self, source):
        """Return the offset at which the class with the fault starts."""
        return source.index(f"class {self.within}(") if self.within else 0


def read_faults(table):
    faults, file, within = [], "", ""
    for line in table.strip().splitlines():
        mark, _, text = line.partition(" ")
        if mark == "==":
            file, _, within = text.partition(" ")
        elif mark == "*":
            layer = 0 if file.endswith(WITHIN_LAYERS) else None
            old = faults[-1].old if faults else ""
            faults.append(Fault(file, text, old, layer=layer, within=within))
        elif mark == "@":
            faults[-1].layer = int(text) if text else None
        elif mark:
            field = {"-": "old", "+": "new", ">": "shows"}[mark]
            setattr(faults[-1], field, text)
    return faults


FAULTS = read_faults(TABLE)


def plant(fault, folder):
    """Import a copy of the code with the fault; return module and file."""
    package, _, file = fault.file.partition("/")
    source = target = folder / f"faulty_{package}" / file
    if package == "tests":
        source = ROOT / fault.file
        target = folder / f"faulty_{source.name}"
    else:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, target.parent, ignore=unwanted)
    text = source.read_text()
    start = fault.start(text)
    assert fault.within or text.count(fault.old) == 1, fault
    assert fault.old in text[start:], fault
    changed = text[start:].replace(fault.old, fault.new, 1)
    target.write_text(text[:start] + changed)
    name = target.stem if package == "tests" else target.parent.name
    for key in [k for k in sys.modules if k.split(".")[0] == name]:
        del sys.modules[key]
    with first_on_path(folder):
        return importlib.import_module(name), target


def expected_lines(fault, target):
    """Return the file, and the lines of it that a finding may name."""
    file, _, text = fault.shows.partition(": ")
    if fault.shows and not target.name.endswith(file):
        target = target.with_name(file)
    source = target.read_text()
    at = source.index(text or fault.new, fault.start(source))
    line = source.count("\n", 0, at) + 1
    holding = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt)
        and node.lineno <= line <= node.end_lineno
    ]
    inner = min(holding, key=lambda node: node.end_lineno - node.lineno)
    return target, range(inner.lineno, inner.end_lineno + 1)
