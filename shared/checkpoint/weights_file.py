"""Read the tensors of a checkpoint from safetensors, never from a pickle.

A pickle is a program that runs when it is read.
"""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from .gpt2_layout import State

WEIGHTS = "model.safetensors"

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


def read_tensors(file: Path) -> State:
    """Return the tensors of a safetensors file.

    Raises:
        ValueError: for a pickle, or a damaged file.
    """
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        _refuse_pickle(file)
        raise ValueError(
            f"{file} is damaged, or not a safetensors file: {error}"
        ) from None


def require_numbers(file: Path, tensors: State) -> None:
    """Raise ValueError, with the count, if tensors of a file hold NaN."""
    for name, tensor in tensors.items():
        if count := int(tensor.isnan().sum()):
            raise ValueError(
                f"{file}: {name} holds {count} NaN of {tensor.numel()}"
            )


def find_weights(folder: Path) -> Path:
    """Return a folder's model.safetensors, or its only .safetensors file.

    Raises:
        ValueError: if there is no such file, several files, or a pickle.
    """
    if folder.is_file():
        _refuse_pickle(folder)
        raise ValueError(f"{folder} is a file: give its folder")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    files = sorted(file for file in folder.iterdir() if file.is_file())
    found = [file for file in files if file.suffix == ".safetensors"]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{folder} has {len(found)} .safetensors files and none is named "
            f"{WEIGHTS}: join them, for instance with save_pretrained("
            "max_shard_size=...)"
        )
    for file in files:
        _refuse_pickle(file)
    raise ValueError(f"{folder} has no {WEIGHTS}")


def _refuse_pickle(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(4)
    raw = start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    if start == b"PK\3\4" or raw or file.suffix in _PICKLE_SUFFIXES:
        raise ValueError(
            f"{file} is a pickle, a program that runs when it is read: save "
            "the state dict with safetensors.torch.save_file instead"
        )
