"""gpt-duet tokenizers: what works here and now."""

from rich.console import Console
from rich.table import Table


def tokenizers() -> None:
    """List the tokenizers that can be used here, and why others cannot.

    The network is not asked. tiktoken downloads what is not in its cache
    when it is first used. The names of models ("davinci") work, too.
    """
    import tiktoken

    from ..tokenization.tiktoken_cache import Availability, look_up
    from ..tokenization.tokenizers import DEFAULT, load_tokenizer

    own = load_tokenizer(DEFAULT).n_vocab
    rows = [
        Availability(DEFAULT, own, "gpt-duet's own, the default"),
        Availability("bytes", 256, "the bytes of UTF-8"),
        Availability("char", None, "the characters of the text given"),
        *(look_up(name) for name in tiktoken.list_encoding_names()),
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column("tokenizer", no_wrap=True)
    table.add_column("usable", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        style = None if row.works else "dim"
        tokens = "" if row.n_vocab is None else f"{row.n_vocab:,}"
        works = "yes" if row.works else "no"
        table.add_row(row.name, works, tokens, row.note, style=style)
    console = Console(highlight=False)
    console.print(table)
    if not all(row.works for row in rows):
        console.print(
            "\nThe network was not asked: tiktoken downloads what is not "
            "cached when it is first used."
        )
