"""A model on one process against the same sharded over several ranks.

    parameters.py       weights of the left put into shards, and gradients
    placing.py          how a tensor of a rank relates to those of the left
    diff.py             both run, matched on all ranks, and where they part
    causes.py           sentences for the line that parts

All ranks call diff_sharded.
"""
