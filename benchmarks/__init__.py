"""How fast a GPT is: both styles, their peers, and the machine's limit.

    app.py          the command and its options
    plan.py         what is measured: sizes, tokens, how often
    models.py       the styles, from one set of weights
    peers.py        other people's decoders of the same shape
    gates.py        what must hold before anything is timed
    measure.py      a forward pass, a training step or decoding, in rounds
    profiling.py    memory and operations of a run
    machine.py      the machine's facts, load and limits
    work.py         operations and bytes of a pass
    output.py tables.py chart.py compare.py    where results go

measured/ keeps results; README.md says how they were measured.
"""

from typing import Literal

# Here, as --help is not to wait for torch.
Kind = Literal["forward", "generate", "train-step"]
STYLES = ("annotated", "mingpt_style")
