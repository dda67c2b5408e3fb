"""Compare a model on one process with the same model on several ranks.

    parameters.py       put the left's weights into shards; compare gradients
    placing.py          find which part of a left tensor a rank has
    diff.py             run both, match values on all ranks, find a difference
    causes.py           sentences that explain why a line differs

The left is the model on one process, the right the model on several ranks. All
ranks call diff_sharded.
"""
