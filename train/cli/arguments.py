"""Parse the command line: the command, its options, and overrides of the configuration."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NoReturn, TypeVar

import sharding
from sharding.errors import UserError, safe_repr
from train.cli.sweep import default_jobs
from train.config.overrides import check_once, settings
from train.config.values import check_path

Value = TypeVar("Value")
PROGRAM = "python -m train"
IMPORT = "your module that registers strategies, models, datasets, …; may be repeated"
OVERRIDES = (
    "set keys of the configuration, e.g. local.optimizer.lr=0.05 or keep_ratio='{0.2: 0.6, 0.4: 0.4}'; "
    f"`{PROGRAM} config CONFIG` prints all keys, `{PROGRAM} list` the names that they may have, and "
    "docs/reference/configuration.md explains them"
)
QUICKSTART = "configs/quickstart.yaml"
RUN_FILES = "config.yaml, metrics.jsonl (one line per round), model.safetensors, checkpoints, summary.md and plots"
HELP = {  # by command: what it does, what it writes and where, and two examples
    "run": (
        "train once",
        f"Writes {RUN_FILES} to output=DIR (default: runs/NAME-STRATEGY-OVERRIDES-SEED).",
        (f"run {QUICKSTART}", f"run {QUICKSTART} strategy=unbiased local.optimizer.lr=0.03 output=runs/first"),
    ),
    "compare": (
        "train with several strategies, seeds or values of any key, and compare",
        "Writes a folder for each run, and a table (summary.md, summary.csv) and plots over all of them, to output=DIR "
        "(default: runs/NAME-compare-OVERRIDES).",
        (
            f"compare {QUICKSTART} --strategies top_n,unbiased,collective --seeds 0,1,2",
            f"compare {QUICKSTART} --grid local.optimizer.lr=0.03,0.1 --grid keep_ratio=0.1,0.2",
        ),
    ),
    "table": (
        "run the missing cells of a published table or figure, and write it",
        "Writes tableN.md and plots to the output folder, and the runs to its folder cells/.",
        ("table 1", "table figure3 --scale medium --seeds 0 --only top_n,collective"),
    ),
    "report": (
        "make one page of finished or unfinished runs",
        "Writes report.html, which needs no network, and report.csv, with a row for each run.",
        ("report runs", "report runs/quickstart-compare --targets 80,90 --output pages"),
    ),
    "inspect": (
        "draw the clients' data and report the sizes and the memory of their shards, without training",
        "Writes NAME-partition and NAME-classes as PNG and SVG to output=DIR (default: runs).",
        (f"inspect {QUICKSTART} --memory 1MB", f"inspect {QUICKSTART} keep_ratio='{{0.1: 0.5, 0.4: 0.5}}'"),
    ),
    "config": (
        "print the whole configuration as YAML, without training",
        "Writes no file.",
        (f"config {QUICKSTART}", f"config {QUICKSTART} local.optimizer.lr=0.03 > my.yaml"),
    ),
    "list": (
        "print the names of strategies, designs, models, datasets, tables and more",
        "Writes no file.",
        ("list", "list --import examples.own_strategy"),
    ),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; overrides may stand anywhere after the config, which plain argparse does not allow.

    Raise a UserError for an unknown command or option, a value that is not allowed, or a key that is set twice.
    """
    args, rest = _parser().parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        remedy = f"keys are set as key=value, without dashes; see {PROGRAM} {args.command} --help"
        raise UserError(f"unknown option {safe_repr(unknown[0])}; {remedy}")
    if args.command == "list" and rest:
        raise UserError(f"unknown argument {safe_repr(rest[0])}; see {PROGRAM} list --help")
    if args.command == "report":
        args.folders += map(Path, rest)
    else:
        args.overrides += rest
    if args.imports:
        args.overrides.append(f"plugins=[{', '.join(args.imports)}]")
    check_once(settings(args.overrides))
    return args


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with argparse's message."""
        raise UserError(f"{message.replace(', KEY=VALUE', '')}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Train with spectral model sharding.",
        epilog=f"`{PROGRAM} COMMAND --help` shows a command's options, what it writes, and examples.",
    )
    parser.add_argument("--version", action="version", version=f"spectral-sharding {sharding.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    parser.set_defaults(overrides=[])
    parsers = {name: _command(commands, name) for name in HELP}
    compare, table, report = (parsers[name] for name in ("compare", "table", "report"))
    compare.add_argument("--strategies", type=_names, default=[], metavar="A,B,…", help="strategies to compare")
    compare.add_argument(
        "--grid", action="append", default=[], metavar="KEY=V,W,…", help="values of any key to compare; may be repeated"
    )
    table.add_argument("number", metavar="N", help="1 to 5, longer, or figure1 to figure4")
    table.add_argument(
        "--scale", default="small", help="small (default; minutes), medium (stand-ins, hours) or paper (for a GPU)"
    )
    table.add_argument("--only", type=_names, default=[], metavar="A,…", help="cells to run, by parts of their names")
    table.add_argument("--output", type=_folder, help="folder of the table and its runs (default: runs/tables-SCALE)")
    report.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="a run, or a folder with runs in it")
    report.add_argument("--output", type=_folder, help="folder to write to (default: the one that holds all DIR)")
    report.add_argument(
        "--targets",
        type=_list_of(_percent),
        default=[],
        metavar="A,B,…",
        help="accuracies in %% whose bytes to report (default: up to three that were reached)",
    )
    for command, seeds in ((compare, "the configuration's"), (table, "the scale's")):
        command.add_argument(
            "--seeds", type=_list_of(_integer), metavar="0,1,…", help=f"seeds to average over (default: {seeds})"
        )
        command.add_argument(
            "--jobs",
            type=positive,
            default=default_jobs(),
            metavar="N",
            help="runs at a time (default: %(default)s, the number of GPUs or cores)",
        )
    parsers["inspect"].add_argument(
        "--memory",
        type=_nbytes,
        metavar="SIZE",
        help="report the largest keep ratio whose clients' tensors fit this size, e.g. 96MB",
    )
    for name in ("run", "compare", "inspect", "config"):
        parsers[name].add_argument("config", metavar="CONFIG", help="a YAML file, e.g. configs/quickstart.yaml")
    for name in ("run", "compare", "inspect", "table", "config"):
        parsers[name].add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    for command in parsers.values():
        command.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=IMPORT)
        command.add_argument("--quiet", action="store_true", help="show warnings and errors only")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    for name in ("run", "compare"):
        parsers[name].add_argument("--resume", action="store_true", help="resume what the output directory holds")
    return parser


def _command(commands: "argparse._SubParsersAction[_Parser]", name: str) -> argparse.ArgumentParser:
    """Add a command with its help; the examples stand below the options."""
    summary, writes, examples = HELP[name]
    about = f"{summary[0].upper()}{summary[1:]}. {writes}".replace("%", "%%")
    lines = "\n".join(f"  {PROGRAM} {example}" for example in examples)
    form = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(
        name, help=summary, description=fill(about, 78), epilog=f"examples:\n{lines}", formatter_class=form
    )


def _list_of(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Return a parser of values that are separated by commas."""
    return lambda text: [read(word) for word in text.split(",")]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _nbytes(text: str) -> float:
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG]?)B?", text)
    if size is None or float(size[1]) == 0:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not a size above 0, such as 96MB, 1.5GB or 96000000")
    return float(size[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[size[2]]


def _folder(text: str) -> Path:
    try:
        return check_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)}: {error}") from error


def _percent(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 100:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not a number above 0 and up to 100")
    return number


def positive(text: str) -> int:
    """Read a whole number of at least 1, or raise an ArgumentTypeError."""
    number = _integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not a whole number") from error
