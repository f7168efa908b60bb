"""The command line of the studies: a folder to write to, and overrides."""

import argparse
from pathlib import Path


def read_arguments(text: str | None, default: str | None = None) -> tuple[Path, list[str]]:
    """Return the folder or file to write to, and the overrides; ``--help`` prints the script's text and ends.

    Args:
        text: of the script.
        default: where to write if it is not said.
    """
    args = parser_of(text, default).parse_args()
    return Path(args.into), args.overrides


def read_study(text: str | None) -> tuple[Path, list[str], bool]:
    """Return the folder to write to, the overrides, and whether to run just enough to see that it works."""
    parser = parser_of(text)
    parser.add_argument("--quick", action="store_true", help="two rounds of a few runs, to see that it works")
    args = parser.parse_args()
    return Path(args.into), args.overrides, args.quick


def parser_of(text: str | None, default: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a study's folder and overrides."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, metavar="WHERE", nargs="?" if default else None, default=default)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run, e.g. rounds=3")
    return parser
