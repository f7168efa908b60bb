"""The commands of ``python -m train``, their messages and exit codes.

Reports are imported where they are written: pandas and matplotlib take a second.
"""

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from sharding.errors import UserError, join_first, lookup
from train.callbacks import EachRound
from train.cli.arguments import parse
from train.cli.listing import names
from train.cli.progress import RoundProgress
from train.cli.sweep import FailedRun, grid_configs, sweep
from train.config.naming import with_directory
from train.config.schema import Config, load_config
from train.config.unread import refuse_unread
from train.config.yaml_text import dump_yaml
from train.registries import import_parts
from train.report.tables.cells import cells_of, choose
from train.report.tables.layout import TABLES
from train.run import run
from train.rundir.directory import check_comparison, check_directory, check_writable, is_measured
from train.rundir.file_names import CONFIG_FILE
from train.rundir.records import wandb_state
from train.utils.errors import RunError
from train.utils.signals import Stopped
from train.utils.stages import stage_listener

log = logging.getLogger(__name__)

LITERAL: Any = {"markup": False, "emoji": False, "highlight": False}  # names may have [brackets] and :colons:


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    It is 0, 1 if a run failed, 2 for a user's mistake, and 128 plus a signal's number if that stopped the run: 130 for
    Ctrl-C, and 141 if nobody reads the output any more.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not end a run
    try:
        args = parse(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.line = shlex.join(["python", "-m", "train", *argv])
    console = Terminal(quiet=args.quiet, **LITERAL)
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.WARNING,
        format="%(message)s",
        handlers=[handler(Terminal(stderr=True, **LITERAL) if args.quiet else console)],
    )
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    logging.getLogger("models").setLevel(logging.DEBUG if args.debug else logging.INFO)  # what of weights was loaded
    try:
        import_parts(args.imports)
        COMMANDS[args.command](args, console)
        if sys.stdout is not None:  # closed, as by some service managers
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if args.debug:
            raise
        again = "the same command with --resume" if "resume" in args else "the same command"
        line, code = explain(error, again if "jobs" in args or "resume" in args else None)
        print(line, file=sys.stderr)
        return code
    return 0


def explain(error: BaseException, again: str | None) -> tuple[str, int]:
    """Return one line about an error, and the exit code; `again` says what continues an interrupted run, if any."""
    if isinstance(error, UserError | ImportError):  # a package that an option needs is missing
        return f"error: {error}", 2
    if isinstance(error, RunError):
        return f"error: {error}", 1
    if isinstance(error, KeyboardInterrupt):
        number = error.signal if isinstance(error, Stopped) else signal.SIGINT
        remedy = f"; {again} continues from the last checkpoint" if again else ""
        return f"interrupted{remedy}", 128 + number
    if isinstance(error, OSError):
        prefix = f"{error.filename}: " if error.filename else ""
        return f"error: {prefix}{error.strerror or error}", 1
    message = " ".join(str(error).split())
    return f"error: {type(error).__name__}: {message[:500]}; --debug shows where", 1


def _checked(args: argparse.Namespace) -> Config:
    """Return the configuration of one run, all of whose overrides have an effect."""
    config = load_config(args.config, args.overrides)
    refuse_unread([config], args.overrides)
    return config


def _run(args: argparse.Namespace, console: Console) -> None:
    config = with_directory(_checked(args), args.overrides)
    if args.resume and not (config.directory / CONFIG_FILE).exists():
        check_directory(config, resume=True)  # it may hold other files
        log.warning("%s holds no run to resume: a new run starts there", config.directory)
    with RoundProgress(console, [config]) as progress, stage_listener(partial(progress.show_stage, 0)):
        run(config, [EachRound(partial(progress.show, 0))], args.resume)
    _report_run(config, bool(progress.idle), args.line, console)


def _compare(args: argparse.Namespace, console: Console) -> None:
    configs = grid_configs(args.config, args.overrides, args.strategies, args.seeds, args.grid)
    check_comparison(configs[0].directory.parent)
    with RoundProgress(console, configs, [config.directory.name for config in configs]) as progress:
        failures = sweep(configs, progress.show, args.jobs, args.resume, progress.show_stage)
    if finished := {*progress.idle} - {*failures}:
        console.print(f"{len(finished)} of {len(configs)} runs had already finished")
    directories = [config.directory for config in configs if config.directory not in failures]
    if directories:
        reasons = {directory: failure.reason for directory, failure in failures.items()}
        _report(directories, directories[0].parent, configs[0].name, args.line, console, reasons)
    _raise_failures(failures, len(configs))


def _table(args: argparse.Namespace, console: Console) -> None:
    from train.report.tables.write import TableReport  # noqa: PLC0415 - heavy

    table = lookup(TABLES, args.number, "table")
    into = args.output or Path("runs") / f"tables-{args.scale}"
    check_writable(into, "--output")
    cells = cells_of(table, args.scale, into, args.seeds, args.overrides)
    for cell in cells:
        check_directory(cell.config, resume=True)  # neither run nor show what was run with another configuration
    chosen = {cell.name: cell.config for cell in choose(cells, args.only)}
    failures: dict[Path, FailedRun] = {}
    if missing := {name: config for name, config in chosen.items() if not is_measured(config)}:
        with RoundProgress(console, [*missing.values()], [*missing]) as progress:
            failures = sweep([*missing.values()], progress.show, args.jobs, True, progress.show_stage)
    paths = TableReport(args.number, table, cells, args.scale, args.line, into).write()
    _show_paths(paths, console)
    _raise_failures(failures, len(chosen))


def _raise_failures(failures: Mapping[Path, FailedRun], total: int) -> None:
    """Report the runs that failed, after the report on the others is written. Report equal failures once."""
    if failures:
        directories_of: dict[str, list[str]] = {}
        for directory, failure in failures.items():
            directories_of.setdefault(failure.reason, []).append(str(directory))
        each = "; ".join(f"{join_first(directories)}: {reason}" for reason, directories in directories_of.items())
        error = UserError if all(failure.is_mistake for failure in failures.values()) else RunError
        others = ", the others finished" if len(failures) < total else ""
        raise error(f"{len(failures)} of {total} runs failed{others}: {each}")


def _inspect(args: argparse.Namespace, console: Console) -> None:
    from train.cli.inspection import inspect_partition  # noqa: PLC0415 - heavy

    config = _checked(args)
    into = config.output or Path("runs")
    check_writable(into)
    for line in inspect_partition(config, into, args.memory):
        console.print(line, soft_wrap=True)


def _config(args: argparse.Namespace, console: Console) -> None:
    config = _checked(args)
    text = dump_yaml(config.model_dump(mode="json", exclude={"output"} if config.output is None else None))
    if config.output is None:  # a directory in the file would also be that of other settings
        text += f"# output: {with_directory(config, args.overrides).directory}\n"
    console.print(text, end="", highlight=True, soft_wrap=True)


def _list(args: argparse.Namespace, console: Console) -> None:
    for line in names():
        console.print(line, soft_wrap=True)


def _page(args: argparse.Namespace, console: Console) -> None:
    from train.report.page import write_page  # noqa: PLC0415 - heavy

    folders = args.folders
    if any(folder.is_absolute() for folder in folders):  # no path is common to one that is and one that is not
        folders = [folder.absolute() for folder in folders]
    into = args.output or Path(os.path.commonpath(folders))
    check_writable(into, "--output")
    _show_paths(write_page(folders, into, args.line, [percent / 100 for percent in args.targets]), console)


def _report_run(config: Config, finished: bool, command: str, console: Console) -> None:
    """Report on one run. A run that had already finished gets a report only if it has none."""
    from train.report.summary import SUMMARY  # noqa: PLC0415 - heavy

    directory = config.directory
    if finished:
        console.print(f"{directory} has already finished: nothing was run", soft_wrap=True)
    if not (finished and (directory / SUMMARY).exists()):
        _report([directory], directory, config.name, command, console)


def _report(
    directories: list[Path],
    into: Path,
    title: str,
    command: str,
    console: Console,
    failed: Mapping[Path, str] | None = None,
) -> None:
    from train.report.summary import write_report  # noqa: PLC0415 - heavy

    table, paths = write_report(directories, into, title, command, failed)
    console.print(table)
    _show_paths(paths, console)
    console.print(f"for one page with all plots: python -m train report {shlex.quote(str(into))}", soft_wrap=True)
    for where in filter(None, (wandb_state(directory).get("where") for directory in directories)):
        console.print(f"W&B: {where}", soft_wrap=True)


def _show_paths(paths: Sequence[Path], console: Console) -> None:
    """List the files that were written, all of them in one folder."""
    console.print(f"wrote {', '.join(path.name for path in paths)} to {paths[0].parent}", soft_wrap=True)


class Lines(logging.Handler):
    """Prints each record in one line; as everywhere, without wrapping it (`soft_wrap`), so that paths can be copied."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        self._console.print(self.format(record), soft_wrap=True)


class Terminal(Console):
    """A console that ends the program as SIGPIPE does if its reader has left, as in ``… | head -1``."""

    def on_broken_pipe(self) -> None:
        """End the program without a word."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # Python would complain about what it has not written
        sys.exit(128 + signal.SIGPIPE)


def handler(console: Console) -> logging.Handler:
    """Return the handler that shows the log on this console."""
    return RichHandler(console=console, show_path=False) if console.is_terminal else Lines(console)


COMMANDS = {
    "run": _run,
    "compare": _compare,
    "table": _table,
    "report": _page,
    "inspect": _inspect,
    "config": _config,
    "list": _list,
}
