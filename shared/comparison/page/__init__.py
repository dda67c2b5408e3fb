"""A comparison as one page: a file that needs nothing but a browser."""

from .render import render_page

__all__ = ["render_page"]
