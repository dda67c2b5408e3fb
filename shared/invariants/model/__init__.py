"""The model under test: how it is built, called, read and sized.

    subject.py      the model as the checks see it: the other parts together
    building.py     built anew for each check
    calling.py      called as its signature asks
    probing.py      where its scores are, found out by calling it
    refusals.py     lengths and rows that it refuses, and noise in eval mode
    reading.py      its scores, read from whatever it answers
    sizes.py        vocabulary, length and window, as it declares them
    costs.py        what calls take, and how much time there is
    tokens.py       ids, lengths and splits to try
    randomness.py   the random state, set and put back
    operations.py   what is computed inside, operation by operation
    elsewhere.py    a second device, where a machine has none

Of these the checks see the subject, and draw tokens.
"""
