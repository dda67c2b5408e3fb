"""Two models or two styles side by side: how far they differ, and where.

    styles.py           two styles on one set of weights, and the verdict
    models.py           two models: outputs by stage, costs, times
    values/             any two models, line by line, by what they compute
    concepts.py         the six concepts: what each does in any style
    sources.py          the source of two styles, paired by concept
    text.py             texts and tokens, every character visible
    printing.py         what every comparison in the terminal prints with

Shown by terminal.py and page/ (one HTML file).
"""
