"""A model on one process against the same sharded over several ranks.

    weights.py          the left's weights, put into the shards of a rank
    placing.py          where a rank's numbers stand among those of the left
    diff.py             both run, matched on all ranks, and where they part
    causes.py           sentences for the line that parts
    gradients.py        of the parameters, whole, in shards or as parts of sums

All ranks call diff_sharded.
"""
