"""Trains the small model that comes with the kit, and measures it.

`python -m gpt_duet.training.make_small_model --out FOLDER` runs `gpt-duet
train` with the recipe below, rounds the weights to half precision, and
writes them with a config.json and a README that says what they reach. On
two cores it takes a quarter of an hour.
"""

import argparse
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ..checkpoint.folder import save_checkpoint
from ..checkpoint.gpt2_layout import State
from ..config import GPTConfig
from ..protocol import LanguageModel, load_style
from ..tokenization import Tokenizer
from ..tokenization.texts import default_text, split_ids, text_stamp
from .resume import load_trained

STYLE = "mingpt_style"
TOKENIZER = "duet-1k"
RECIPE = (
    f"--style {STYLE} --tokenizer {TOKENIZER} --n-layer 4 --n-head 4 "
    "--n-embd 128 --block-size 128 --tie-weights --dropout 0.2 --steps 2000 "
    "--batch-size 16 --lr 2e-3 --eval-interval 250 --eval-batches 30 --seed 0"
)

README = """\
# The small trained model

{layers} layers of {width}, {heads} heads, a block of {block}, a tied head and
the {vocab:,} tokens of {tokenizer}: {parameters:,} parameters, in half
precision, in the GPT-2 layout that both styles and transformers read.

| text | tokens | nats a token | bits a byte |
| --- | --- | --- | --- |
{rows}

Half precision costs {cost:.6f} nats a token on the held-out tenth.

Trained on nine tenths of the documentation that comes with Python {python}
(pydoc_data.topics; sha256 of the text begins with {stamp}) by
`python -m gpt_duet.training.make_small_model`:

    gpt-duet train {recipe}

That text is Copyright Python Software Foundation, under the PSF License
Version 2, its code examples under the Zero Clause BSD License.
"""


def mean_loss_of(model: LanguageModel, ids: Int[Tensor, "tokens"]) -> float:
    """Return the mean loss in nats a token, each token but the first once.

    The text is cut into windows of block_size tokens that do not overlap.
    """
    total, block = 0.0, model.block_size
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, block):
            inputs = ids[start : start + block][: len(ids) - 1 - start]
            targets = ids[start + 1 : start + 1 + len(inputs)]
            scores = model.log_probs(inputs[None])[0]
            total -= float(scores.gather(1, targets[:, None]).double().sum())
    return total / (len(ids) - 1)


def bits_a_byte(nats: float, ids: list[int], tokenizer: Tokenizer) -> float:
    """Return a loss in bits for each byte of the text."""
    size = len(tokenizer.decode(ids).encode())
    return nats * (len(ids) - 1) / math.log(2) / size


def main() -> None:
    """Train, round, measure, write."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt_duet.training.make_small_model",
        description="Train the small model that comes with the kit.",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="a run that is there already")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = chosen.run or Path(folder) / "run"
        if chosen.run is None:
            command = [sys.executable, "-m", "gpt_duet.cli", "train"]
            command += [*RECIPE.split(), "--out", str(run)]
            subprocess.run(command, check=True)
        model, tokenizer, _ = load_trained(run)
    state = load_style(STYLE).to_gpt2(model)
    halved = {name: tensor.half() for name, tensor in state.items()}
    config = model.config
    assert isinstance(config, GPTConfig)
    save_checkpoint(chosen.out, halved, config)
    (chosen.out / "README.md").write_text(
        describe(config, state, halved, tokenizer), encoding="utf-8"
    )


def describe(
    config: GPTConfig, state: State, halved: State, tokenizer: Tokenizer
) -> str:
    """Return the README of the model: what it is and what it reaches."""
    text = default_text()
    parts = split_ids(torch.tensor(tokenizer.encode(text)))
    whole, half = rebuild(state, config), rebuild(halved, config)
    rows = []
    for name, ids in zip(("learnt from", "held out"), parts, strict=True):
        nats = mean_loss_of(half, ids)
        bits = bits_a_byte(nats, ids.tolist(), tokenizer)
        rows.append(f"| {name} | {len(ids):,} | {nats:.4f} | {bits:.4f} |")
    cost = mean_loss_of(half, parts[1]) - mean_loss_of(whole, parts[1])
    return README.format(
        layers=config.n_layer,
        width=config.n_embd,
        heads=config.n_head,
        block=config.block_size,
        vocab=config.vocab_size,
        tokenizer=TOKENIZER,
        parameters=sum(
            t.numel() for n, t in halved.items() if n != "lm_head.weight"
        ),
        rows="\n".join(rows),
        cost=cost,
        python=".".join(platform.python_version_tuple()[:2]),
        stamp=text_stamp(text),
        recipe=RECIPE,
    )


def rebuild(state: Mapping[str, Tensor], config: GPTConfig) -> LanguageModel:
    """Return a model of these weights that computes in float32."""
    wide = {name: tensor.float() for name, tensor in state.items()}
    model = load_style(STYLE).from_gpt2(wide, config).eval()
    assert isinstance(model, LanguageModel)
    return model


if __name__ == "__main__":
    main()
