"""The command line: ``python -m train run | compare | inspect | config CONFIG …``, ``table N``, ``report DIR …``, …"""

from train import early  # before all that takes its time

# isort: split

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import yaml
from rich.console import Console

import sharding
from sharding.errors import UserError, few, shown
from train.compare import Failure, compare, default_jobs, plan_cells
from train.config import Config, load_config
from train.console import handler
from train.directory import CONFIG_FILE, check_directory, check_reports
from train.engines.workers import launched
from train.failures import RunError
from train.inspection import inspect_partition
from train.interrupts import Stopped
from train.listing import names
from train.naming import with_directory
from train.parts import import_parts
from train.progress import RoundProgress
from train.report import write_report
from train.report.page import write_page
from train.run import follow, is_measured, run
from train.stages import watched
from train.tables import Report, cells_of, choose, load_layout
from train.values import check_path

log = logging.getLogger("train")  # this module is called __main__

IMPORT = "a module of your own that registers strategies, models, datasets, …; may be repeated"
OVERRIDES = "dotted.key=value, e.g. local.lr=0.05 or keep_ratio='{0.2: 0.6, 0.4: 0.4}'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    That is 0, 1 where a run could not go on, 2 for a user's mistake, and 128 with a signal's number added when stopped
    by it, 130 for Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no … is no reason to fail
    try:
        args = _parse(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.line = shlex.join(["python", "-m", "train", *words])
    console = Console(quiet=args.quiet)
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.WARNING,
        format="%(message)s",
        handlers=[handler(Console(stderr=True) if args.quiet else console)],
    )
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    early.ready()
    try:
        import_parts(args.imports)
        args.command(args, console)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if args.debug:
            raise
        told, code = _explain(error, args)
        print(told, file=sys.stderr)
        return code
    return 0


def _explain(error: BaseException, args: argparse.Namespace) -> tuple[str, int]:
    """Return one line, and the exit code."""
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, RunError):
        return f"error: {error}", 1
    if isinstance(error, KeyboardInterrupt):
        again = "the same command with --resume" if "resume" in args else "the same command"
        number = error.signal if isinstance(error, Stopped) else signal.SIGINT
        return f"interrupted; {again} goes on from the last checkpoint", 128 + number
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"error: {where}{error.strerror or error}", 1
    why = " ".join(str(error).split())
    return f"error: {type(error).__name__}: {why[:500]}; --debug shows where", 1


def _run(args: argparse.Namespace, console: Console) -> None:
    config = with_directory(load_config(args.config, args.overrides), args.overrides)
    if args.resume and not (config.directory / CONFIG_FILE).exists():
        log.warning("%s holds no run to go on with: it starts anew; output=… names another directory", config.directory)
    with launched() as rank:
        if rank:
            follow(config)
            return
        with RoundProgress(console, [config]) as progress, watched(partial(progress.tell, 0)):
            directory = run(config, partial(progress.show, 0), args.resume)
    _report([directory], directory, config.name, args.line, console)


def _compare(args: argparse.Namespace, console: Console) -> None:
    cells = plan_cells(args.config, args.overrides, args.strategies, args.seeds, args.grid)
    check_reports(cells[0].directory.parent)
    with RoundProgress(console, cells, [cell.directory.name for cell in cells]) as progress:
        failures = compare(cells, progress.show, args.jobs, args.resume, progress.tell)
    directories = [cell.directory for cell in cells if cell.directory not in failures]
    if directories:
        whys = {directory: failure.why for directory, failure in failures.items()}
        _report(directories, directories[0].parent, cells[0].name, args.line, console, whys)
    _raise_failures(failures, len(cells))


def _table(args: argparse.Namespace, console: Console) -> None:
    layout = load_layout()
    matrix = layout.find(args.number)
    into = args.output or Path("runs") / f"tables-{args.scale}"
    if into.exists() and not into.is_dir():
        raise UserError(f"{into} is a file, but a table and its runs are written to a folder; choose another --output")
    cells = cells_of(matrix, layout, args.scale, into, args.seeds, args.overrides)
    for cell in cells:
        check_directory(cell.config, resume=True)  # neither run nor show what was run with another configuration
    missing = [cell for cell in choose(cells, args.only) if not is_measured(cell.config)]
    configs, failures = [cell.config for cell in missing], {}
    if missing:
        with RoundProgress(console, configs, [cell.name for cell in missing]) as progress:
            failures = compare(configs, progress.show, args.jobs, resume=True, stage=progress.tell)
    paths = Report.of(args.number, matrix, cells, layout, args.scale, args.line, into).write()
    _show_paths(paths, console)
    _raise_failures(failures, len(missing))


def _raise_failures(failures: Mapping[Path, Failure], total: int) -> None:
    """Tell of runs that failed, after what the others came to has been written; of the same failure once."""
    if failures:
        alike: dict[str, list[str]] = {}
        for directory, failure in failures.items():
            alike.setdefault(failure.why, []).append(str(directory))
        each = "; ".join(f"{few(directories)}: {why}" for why, directories in alike.items())
        kind = UserError if all(failure.mistake for failure in failures.values()) else RunError
        raise kind(f"{len(failures)} of {total} runs failed, the others are done: {each}")


def _federate(args: argparse.Namespace, console: Console) -> None:
    from train.federate.app import read  # noqa: PLC0415  # Flower is an extra
    from train.federate.launch import federate, settings_of  # noqa: PLC0415
    from train.federate.nodes import Patience  # noqa: PLC0415

    patience = Patience(args.start_timeout, args.round_timeout)
    settings = settings_of(args.config, args.overrides, args.nodes, patience)
    config = read(settings)
    with RoundProgress(console, [config]) as progress, watched(partial(progress.tell, 0)):
        federate(config, settings, partial(progress.show, 0), args.resume)
    _report([config.directory], config.directory, config.name, args.line, console)


def _inspect(args: argparse.Namespace, console: Console) -> None:
    config = load_config(args.config, args.overrides)
    for line in inspect_partition(config, config.output or Path("runs")):
        console.print(line, highlight=False, soft_wrap=True)


def _config(args: argparse.Namespace, console: Console) -> None:
    config = with_directory(load_config(args.config, args.overrides), args.overrides)
    console.print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="", markup=False, soft_wrap=True)


def _list(args: argparse.Namespace, console: Console) -> None:
    for line in names():
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _page(args: argparse.Namespace, console: Console) -> None:
    folders = args.folders
    if any(folder.is_absolute() for folder in folders):  # no path is common to one that is and one that is not
        folders = [folder.absolute() for folder in folders]
    into = args.output or Path(os.path.commonpath(folders))
    _show_paths(write_page(folders, into, args.line, args.targets), console)


def _report(
    directories: list[Path],
    into: Path,
    title: str,
    command: str,
    console: Console,
    failed: Mapping[Path, str] | None = None,
) -> None:
    table, paths = write_report(directories, into, title, command, failed)
    console.print(table)
    _show_paths(paths, console)


def _show_paths(paths: Sequence[Path], console: Console) -> None:
    console.print("wrote")
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UserError(f"{message.replace(', KEY=VALUE', '')}; see python -m train --help")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; overrides may stand anywhere after the config, which argparse alone would refuse.

    ``--dotted.key=value``, as sweeps write it, is an override as well.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    rest = [word[2:] if _is_key(word.partition("=")) else word for word in rest]
    if unknown := [word for word in rest if word.startswith("-")]:
        parser.error(f"unknown option {shown(unknown[0])}")
    args.overrides += rest
    if args.imports:
        args.overrides.append(f"imports=[{', '.join(args.imports)}]")
    return args


def _is_key(word: tuple[str, str, str]) -> bool:
    """Tell whether ``--key=value`` sets a key of the configuration."""
    option, equals, _ = word
    return option.startswith("--") and bool(equals) and option[2:].partition(".")[0] in Config.model_fields


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m train", description="Train with spectral model sharding.")
    parser.add_argument("--version", action="version", version=f"spectral-sharding {sharding.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    single = commands.add_parser("run", help="train once")
    single.set_defaults(command=_run)
    several = commands.add_parser("compare", help="train with several strategies and seeds, and compare")
    several.set_defaults(command=_compare)
    several.add_argument("--strategies", type=_names, default=[], metavar="A,B,…", help="strategies to compare")
    several.add_argument(
        "--grid", action="append", default=[], metavar="KEY=V,W,…", help="values of any key to compare; may be repeated"
    )
    numbered = commands.add_parser("table", help="run what is missing of a published table or figure, and write it")
    numbered.set_defaults(command=_table)
    numbered.add_argument("number", metavar="N", help="1 to 5, longer, coordination, designs, or figure1 to figure4")
    numbered.add_argument(
        "--scale", default="small", help="small (minutes), medium (stand-ins, hours) or paper (for a GPU)"
    )
    numbered.add_argument("--only", type=_names, default=[], metavar="A,B,…", help="run these cells only, by pattern")
    numbered.add_argument(
        "--output", type=_folder, help="folder of the table and its runs (default: runs/tables-SCALE)"
    )
    page = commands.add_parser("report", help="make one page of runs that exist, whatever made them")
    page.set_defaults(command=_page, overrides=[])
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
    spread = commands.add_parser("federate", help="train once, each client a process of its own, on Flower")
    spread.set_defaults(command=_federate)
    spread.add_argument("--nodes", type=_positive, required=True, metavar="N", help="clients, a SuperNode each")
    for wait, seconds, what in (("start", 300.0, "all nodes"), ("round", 600.0, "the replies of a round")):
        spread.add_argument(
            f"--{wait}-timeout", type=float, default=seconds, metavar="S", help=f"seconds to wait for {what}"
        )
    look = commands.add_parser("inspect", help="draw who has what, tell the sizes of shards, and train nothing")
    look.set_defaults(command=_inspect)
    resolved = commands.add_parser("config", help="print the whole configuration as YAML, and train nothing")
    resolved.set_defaults(command=_config)
    listing = commands.add_parser("list", help="print the names of strategies, designs, models, datasets, tables, …")
    listing.set_defaults(command=_list, overrides=[])
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


if __name__ == "__main__":
    sys.exit(main())
