"""Write the generated parts of the documentation into its pages.

A part stands in a page between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. Tables are made from the files in
`results/`, the reference from the code, so run this after either has changed.
"""

import os
import re
import sys
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
os.environ["MPLBACKEND"] = "agg"  # a notebook's backend may not be installed here
sys.path.insert(0, str(ROOT))  # `train` and `docs` run from a checkout

from docs import reference, tables  # noqa: E402

PART = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def parts() -> dict[str, str]:
    """Return every generated part by its name, as Markdown."""
    texts = {part.__name__: "\n".join(part()) for part in reference.PARTS}
    return texts | {name: part() for name, part in tables.PARTS.items()}


def filled(page: str, texts: dict[str, str]) -> str:
    """Return a page with each part between its marks replaced by its present text."""
    return PART.sub(lambda part: f"{part[1]}\n{texts[part[2]]}\n\n{part[3]}", page)


def pages() -> list[Path]:
    """Return the pages that may hold generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]


def main() -> None:
    """Rewrite the pages whose generated parts are stale."""
    ArgumentParser(description=__doc__).parse_args()
    texts = parts()
    for page in pages():
        old = page.read_text(encoding="utf-8")
        if (new := filled(old, texts)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
