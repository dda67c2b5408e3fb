"""Compare two models or two styles: show how far and where they differ.

    styles.py           two styles on one set of weights, and the verdict
    models.py           two models: outputs by stage, costs, times
    values/             any two models, line by line, by their values
    concepts.py         the six concepts, each described for any style
    sources.py          the source of two styles, paired by concept
    text.py             texts and tokens with every character visible
    printing.py         output in a terminal, without trailing spaces

terminal.py and page/ (one HTML file) show the results.
"""
