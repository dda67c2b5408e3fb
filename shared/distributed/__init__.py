"""Compare a model on one process with the same model on several ranks.

    parameters.py       weights of the left put into shards, and gradients
    placing.py          how a tensor of a rank relates to those of the left
    diff.py             both run, matched on all ranks, and where they differ
    causes.py           sentences for the line that differs

All ranks call diff_sharded.
"""
