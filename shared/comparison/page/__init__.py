"""A comparison as one page: a file that needs nothing but a browser.

render.py        what was compared, put into the template
sections.py      the drawing, and for each concept source, terms, costs
folding.py       source in colours, corresponding names marked, and without
                 docstrings, checks and annotations
walk.py          a forward pass step by step
kinds.py         the kind of each step, by its value
value_maps.py    its values, and influence, as maps packed into the page
ladder.py        the page of gpt-duet ladder
files/           the template, its style sheet and its script
"""

from .render import render_page

__all__ = ["render_page"]
