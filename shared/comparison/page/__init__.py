"""Show a comparison as one page: a file that requires only a browser.

render.py        fills the template with the results of a comparison
sections.py      the drawing, and the source, terms and costs of each concept
folding.py       source in colours: corresponding names are marked;
                 docstrings, checks and annotations are folded
walk.py          a forward pass step by step
kinds.py         the kind of each step, from the step's value
value_maps.py    values and influence as maps, packed into the page
ladder.py        the page of gpt-duet ladder
live.py          the answers of the served page about a text
breaking.py      removes a line from copies of both models
cache_steps.py   reads a text in pieces, with each style's cache
server.py        serves the page over HTTP, on this machine only
files/           the templates, style sheets and scripts
"""

from .live import Live
from .render import render_page
from .server import PageServer

__all__ = ["Live", "PageServer", "render_page"]
