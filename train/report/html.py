"""The few pieces of HTML that the page is made of; all text is escaped here."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from train.plots import svg_of
from train.report.figures import Drawing

GENERATOR = "spectral-sharding report"


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return the whole document; it loads nothing and runs nothing.

    Args:
        title: of the page.
        sections: heading and content of each; one without content is left out.
    """
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    kept = [(heading, content) for heading, content in sections if content]
    links = "".join(f'<a href="#{_anchor(heading)}">{escape(heading)}</a>' for heading, _ in kept)
    body = "".join(f'<h2 id="{_anchor(heading)}">{escape(heading)}</h2>\n{content}\n' for heading, content in kept)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="generator" content="{GENERATOR}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{body}</body>\n</html>\n"
    )


def figures(drawings: Iterable[Drawing | None]) -> str:
    """Return the pictures side by side where there is room, each inside the page and with its caption."""
    shown = [_figure(drawing) for drawing in drawings if drawing is not None]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: bool = False, colors: Sequence[str] = ()) -> str:
    """Return a table; cells are text, numbers to the right unless they are `words`.

    Args:
        header: of the columns.
        rows: of the table.
        words: whether the cells are words.
        colors: of a patch before the first cell of each row.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = ""
    for place, row in enumerate(rows):
        patch = f'<span class="swatch" style="background:{colors[place]}"></span>' if colors else ""
        body += "<tr>" + "".join(f"<td>{'' if i else patch}{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
    kind = ' class="words"' if words else ""
    return f'<div class="table"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def note(text: str, warn: bool = False) -> str:
    """Return a paragraph."""
    return f'<p class="{"warn" if warn else "note"}">{escape(text)}</p>'


def _figure(drawing: Drawing) -> str:
    caption = escape(drawing.caption)
    image = b64encode(svg_of(drawing.figure)).decode()
    picture = f'<img alt="{caption}" src="data:image/svg+xml;base64,{image}">'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _anchor(heading: str) -> str:
    return "-".join(heading.lower().split())
