"""What a command line says: the command, its options, and overrides of the configuration."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import sharding
from sharding.errors import UserError, shown
from train.compare import default_jobs
from train.config.naming import check_once, settings
from train.config.schema import Config
from train.config.values import check_path

PROGRAM = "python -m train"
IMPORT = "a module of your own that registers strategies, models, datasets, …; may be repeated"
OVERRIDES = "dotted.key=value, e.g. local.lr=0.05 or keep_ratio='{0.2: 0.6, 0.4: 0.4}'"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; overrides may stand anywhere after the config, which argparse alone would refuse.

    ``--dotted.key=value``, as sweeps write it, is an override as well.

    Raises:
        UserError: an unknown command or option, a value that is not allowed, or a key that is set twice.
    """
    args, rest = _parser().parse_known_args(words)
    rest = [word[2:] if _is_key(*word.partition("=")[:2]) else word for word in rest]
    if unknown := [word for word in rest if word.startswith("-")]:
        told = f"unknown option {shown(unknown[0])}{_meant(unknown[0], words)}"
        raise UserError(f"{told}; see {PROGRAM} {args.command} --help")
    args.overrides += rest
    if args.imports:
        args.overrides.append(f"plugins=[{', '.join(args.imports)}]")
    check_once(settings(args.overrides))
    return args


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UserError(f"{message.replace(', KEY=VALUE', '')}; see {self.prog} --help")


def _is_key(option: str, equals: str) -> bool:
    """Tell whether ``--key=value`` sets a key of the configuration."""
    return option.startswith("--") and bool(equals) and option[2:].partition(".")[0] in Config.model_fields


def _meant(option: str, words: Sequence[str]) -> str:
    """Return how ``--key value`` is written, where the option is a key of the configuration."""
    value = [*words, "…"][words.index(option) + 1]
    return f" (write {option[2:]}={value})" if _is_key(option, "=") else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Train with spectral model sharding.")
    parser.add_argument("--version", action="version", version=f"spectral-sharding {sharding.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    single = commands.add_parser("run", help="train once")
    several = commands.add_parser("compare", help="train with several strategies and seeds, and compare")
    several.add_argument("--strategies", type=_names, default=[], metavar="A,B,…", help="strategies to compare")
    several.add_argument(
        "--grid", action="append", default=[], metavar="KEY=V,W,…", help="values of any key to compare; may be repeated"
    )
    numbered = commands.add_parser("table", help="run what is missing of a published table or figure, and write it")
    numbered.add_argument("number", metavar="N", help="1 to 5, longer, designs, or figure1 to figure4")
    numbered.add_argument(
        "--scale", default="small", help="small (minutes), medium (stand-ins, hours) or paper (for a GPU)"
    )
    numbered.add_argument("--only", type=_names, default=[], metavar="A,B,…", help="run these cells only, by pattern")
    numbered.add_argument(
        "--output", type=_folder, help="folder of the table and its runs (default: runs/tables-SCALE)"
    )
    page = commands.add_parser("report", help="make one page of runs that exist, whatever made them")
    page.set_defaults(overrides=[])
    page.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="a run, or a folder with runs in it")
    page.add_argument("--output", type=_folder, help="folder to write to (default: the one that holds all DIR)")
    page.add_argument(
        "--targets", type=_percents, default=[], metavar="A,B,…", help="accuracies in %% to tell the bytes of"
    )
    for command in (several, numbered):
        command.add_argument("--seeds", type=_numbers, metavar="0,1,…", help="seeds to average over")
        command.add_argument(
            "--jobs",
            type=_positive,
            default=default_jobs(),
            metavar="N",
            help="runs at a time (default: GPUs or cores)",
        )
    spread = commands.add_parser(
        "federate",
        help="train once, each client a process of its own, on Flower",
        description="Each client is a SuperNode of its own on this machine. WARNING: Flower has no login for whoever "
        "submits runs, so any local user of this machine can run code as you for as long as this command runs.",
    )
    spread.add_argument("--nodes", type=_positive, required=True, metavar="N", help="clients, a SuperNode each")
    for wait, seconds, what in (("start", 300.0, "all nodes"), ("round", 600.0, "the replies of a round")):
        spread.add_argument(
            f"--{wait}-timeout", type=float, default=seconds, metavar="S", help=f"seconds to wait for {what}"
        )
    look = commands.add_parser("inspect", help="draw who has what, tell the sizes of shards, and train nothing")
    resolved = commands.add_parser("config", help="print the whole configuration as YAML, and train nothing")
    listing = commands.add_parser("list", help="print the names of strategies, designs, models, datasets, tables, …")
    listing.set_defaults(overrides=[])
    for command in (single, several, spread, look, resolved):
        command.add_argument("config", metavar="CONFIG", help="a YAML file, e.g. configs/quickstart.yaml")
    for command in (single, several, spread, look, numbered, resolved):
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    for command in (single, several, spread, look, numbered, page, resolved, listing):
        command.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=IMPORT)
        command.add_argument("--quiet", action="store_true", help="show warnings and errors only")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    for command in (single, several, spread):
        command.add_argument("--resume", action="store_true", help="go on with what the output directory holds")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _folder(text: str) -> Path:
    try:
        path = check_path(text)
        if path.exists() and not path.is_dir():
            raise argparse.ArgumentTypeError(f"{shown(text)} is a file, and a folder is needed")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {error}") from error
    return path


def _percents(text: str) -> list[float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no list of numbers above 0 and up to 100")
    return numbers


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _numbers(text: str) -> list[int]:
    return [_whole(number) for number in text.split(",")]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number") from error
