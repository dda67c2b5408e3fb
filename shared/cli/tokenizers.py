"""gpt-duet tokenizers: list the tokenizers that work on this machine."""

from pathlib import Path

from rich.console import Console
from rich.table import Table


def tokenizers() -> None:
    """List the tokenizers that can be used here, and say why others cannot.

    The command does not use the network; tiktoken downloads an encoding at
    its first use, unless it is cached. Names of models ("davinci") work too.
    """
    import tiktoken

    from ..tokenization.tokenizers import DEFAULT, load_tokenizer

    own = f"{load_tokenizer(DEFAULT).n_vocab:,}"
    rows = [
        (DEFAULT, "yes", own, "gpt-duet's own, the default"),
        ("bytes", "yes", "256", "the bytes of UTF-8"),
        ("char", "yes", "", "the characters of the given text"),
        *map(_look_up, tiktoken.list_encoding_names()),
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for title in ("tokenizer", "usable", "tokens", "note"):
        table.add_column(title)
    for row in rows:
        table.add_row(*row, style="dim" if row[1] == "no" else None)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\nThe network was not used: tiktoken downloads an encoding at its "
        "first use, unless it is cached (TIKTOKEN_CACHE_DIR)."
    )


def _look_up(name: str) -> tuple[str, str, str, str]:
    """Load a tiktoken encoding without using the network."""
    import tiktoken.load

    reader = tiktoken.load.read_file
    tiktoken.load.read_file = _read_here
    try:
        n_vocab = tiktoken.get_encoding(name).n_vocab
    except Exception as error:  # tiktoken's plugins may raise anything
        return name, "no", "", f"{error}"
    finally:
        tiktoken.load.read_file = reader
    return name, "yes", f"{n_vocab:,}", "tiktoken's"


def _read_here(blobpath: str) -> bytes:
    if "://" in blobpath:
        raise ConnectionError("not cached")
    return Path(blobpath).read_bytes()
