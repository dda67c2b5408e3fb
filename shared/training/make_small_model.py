"""Train the small model that comes with the kit, and measure it.

`python -m gpt_duet.training.make_small_model --out FOLDER` runs `gpt-duet
train` with the recipe below. It then rounds the weights to half precision,
writes them with a config.json, and prints their losses. These losses are in
checkpoint/small_model/README.md. The command takes 15 minutes on two cores.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ..checkpoint.folder import save_checkpoint
from ..protocol import LanguageModel, load_style
from ..tokenization import Tokenizer
from ..tokenization.texts import default_text, split_ids, text_stamp
from .run_folder import load_trained

STYLE = "mingpt_style"
RECIPE = (
    f"--style {STYLE} --tokenizer duet-1k --n-layer 4 --n-head 4 "
    "--n-embd 128 --block-size 128 --tie-weights --dropout 0.2 --steps 2000 "
    "--batch-size 16 --lr 2e-3 --eval-interval 250 --eval-batches 30 --seed 0"
)


def mean_loss_of(model: LanguageModel, ids: Int[Tensor, "tokens"]) -> float:
    """Return the mean loss in nats a token, over all tokens but the first.

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
    """Train the model, round it, write it, and print its losses."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt_duet.training.make_small_model",
        description="Train the small model that comes with the kit.",
    )
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpt_duet.cli", "train"]
        command += [*RECIPE.split(), "--out", f"{folder}/run"]
        subprocess.run(command, check=True)
        model, tokenizer, run = load_trained(f"{folder}/run")
    state = load_style(STYLE).to_gpt2(model)
    halved = {name: tensor.half() for name, tensor in state.items()}
    save_checkpoint(chosen.out, halved, run.config)
    text = default_text()
    parts = split_ids(torch.tensor(tokenizer.encode(text)))
    print(f"gpt-duet train {RECIPE}\ntext {text_stamp(text)}")
    wide = {name: tensor.float() for name, tensor in halved.items()}
    written = load_style(STYLE).from_gpt2(wide, run.config).eval()
    assert isinstance(written, LanguageModel)
    for part, ids in zip(("trained on", "held out"), parts, strict=True):
        nats = mean_loss_of(written, ids)
        bits = bits_a_byte(nats, ids.tolist(), tokenizer)
        print(
            f"{part}: {len(ids):,} tokens, {nats:.6f} nats a token, "
            f"{bits:.4f} bits a byte"
        )


if __name__ == "__main__":
    main()
