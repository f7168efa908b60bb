"""A run's directory: its lock, its files, and the leftovers of a process that died.

One run writes at a time. It holds a lock that ends with its process. A run's files have fixed names; a file of such a
name that no run wrote is never touched.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from sharding.errors import UserError, join_first, safe_repr
from train.config.naming import RESUMABLE_KEYS
from train.config.schema import Config, check_config, flatten, is_named, plugins_of
from train.config.yaml_text import read_yaml
from train.rundir.checkpoint import rounds_of
from train.rundir.file_names import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    LOCK_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PILOTS_FILE,
    REPORT_FILES,
    REPORT_SIGN,
    RUN_FILES,
    SECRET_FILE,
)
from train.rundir.status import has_ended
from train.utils.errors import writing
from train.utils.files import UNFINISHED, refuse_irregular
from train.utils.jsonl import read_lines

FIRST_FILES = (PILOTS_FILE, SECRET_FILE)  # may be there before CONFIG_FILE; pilots may be given


@contextmanager
def open_directory(config: Config, resume: bool) -> Iterator[None]:
    """Check the directory of a run, create it if necessary, and lock it.

    If a new run ends without a finished round or pilot, everything that was created is removed.

    Raises:
        UserError: as `check_directory`, or another run writes there.
    """
    directory = config.directory
    check_directory(config, resume)
    created = [path for path in (directory, *directory.parents) if not path.exists()]  # the innermost first
    directory.mkdir(parents=True, exist_ok=True)
    with lock(directory / LOCK_FILE):
        check_directory(config, resume)  # again, now that no other process writes
        new = not _existing_files(directory)
        for name in RUN_FILES:  # the unfinished files of a process that died
            (directory / (name + UNFINISHED)).unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            if new and not any(_size(directory / name) for name in (METRICS_FILE, CHECKPOINT_FILE, PILOTS_FILE)):
                _remove_run(directory, created)
            raise


def check_directory(config: Config, resume: bool) -> None:
    """Check that a run can write to its directory and will overwrite nothing.

    Raises:
        UserError: the directory holds a run and `resume` is off; or it holds a run of another configuration, a
            comparison, or files of such names that no run wrote; or it is not writable.
    """
    directory, files = config.directory, _existing_files(config.directory)
    check_regular(directory)
    if resume and CONFIG_FILE in files:
        _check_same(config)
    elif resume and any(_size(directory / name) for name in files if name not in FIRST_FILES):
        raise UserError(f"{directory} holds {files[0]} but no {CONFIG_FILE}, so the run there is unknown")
    elif files and not resume:
        problem = "holds a run" if {CONFIG_FILE, METRICS_FILE} & {*files} else f"has a {files[0]}"
        raise UserError(f"{directory} already {problem}; choose another with output=…, or continue it with --resume")
    check_reports(directory)
    if not {CONFIG_FILE, METRICS_FILE} & {*files}:
        _check_alone(directory)
    check_writable(directory)


def _existing_files(directory: Path) -> list[str]:
    """Return the names of a run's files in a directory."""
    return [name for name in RUN_FILES if os.path.lexists(directory / name)]


def is_finished(config: Config) -> bool:
    """Return whether the run has ended: it is measured, and its model is there."""
    return is_measured(config) and rounds_of(config.directory / MODEL_FILE, "model") == _end(config)


def is_measured(config: Config) -> bool:
    """Return whether there are metrics of all rounds, and no checkpoint contradicts them.

    That is enough for a table. The model is written after the last line, and may have been removed since.
    """
    end, checkpoint = _end(config), config.directory / CHECKPOINT_FILE
    return end is not None and (not checkpoint.exists() or rounds_of(checkpoint) == end)


def _end(config: Config) -> int | None:
    """Return the number of rounds after which the run ended, early or not; None if it has not ended."""
    lines = read_lines(config.directory / METRICS_FILE)
    return len(lines) if has_ended(lines, config.rounds) else None


def check_comparison(directory: Path) -> None:
    """Raise a UserError if a comparison's folder holds a run or another program's report, or cannot be created."""
    check_regular(directory)
    if os.path.lexists(directory / METRICS_FILE):
        raise UserError(f"{directory} holds a run; a comparison needs another folder: choose another output=…")
    check_reports(directory)
    check_writable(directory)


def check_writable(directory: Path, option: str = "output=…") -> None:
    """Raise a UserError if nothing can be created, for a moment, in a directory or in its nearest parent."""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        TemporaryDirectory(dir=existing).cleanup()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write to {directory}: {reason}; choose another {option}") from error


def check_regular(directory: Path) -> None:
    """Raise a UserError if a pipe, folder or device has the name of a run's file: reading a pipe may never end."""
    for path in (directory / name for name in (LOCK_FILE, *RUN_FILES, *REPORT_FILES)):
        refuse_irregular(path)


def check_reports(directory: Path) -> None:
    """Raise a UserError if reports would overwrite a file of such a name that no run wrote."""
    summary = directory / REPORT_FILES[0]
    with suppress(OSError, UnicodeDecodeError):
        text = summary.read_text(encoding="utf-8")
        if not text or text.startswith(REPORT_SIGN):  # an empty file is left by a full disk
            return
    for path in (directory / name for name in REPORT_FILES):
        if os.path.lexists(path):
            raise UserError(f"{path} was not written by this program; move it, or choose another output=…")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file until this process releases it or ends. Child processes do not share it.

    Raise a UserError if another process or thread holds it, or it is no regular file.
    """
    refuse_irregular(path)
    file = FileLock(path, blocking=False)
    with writing(path):
        try:
            file.acquire()
        except Timeout:
            reason = f"another run writes to {path.parent}; wait for it, or choose another output=…"
            raise UserError(reason) from None
    try:
        yield
    finally:
        file.release()


def _check_alone(directory: Path) -> None:
    """Refuse a folder of other runs, because the run would replace their summary."""
    if (others := sorted(directory.glob(f"*/{METRICS_FILE}"))) or os.path.lexists(directory / REPORT_FILES[0]):
        content = f"other runs, as {others[0].parent.name}," if others else "the summary of other runs"
        raise UserError(f"{directory} holds {content} and a run needs its own folder; choose another output=…")


def _check_same(config: Config) -> None:
    config_there = config_in(config.directory)
    stored, requested = flatten(plain(config_there)), flatten(plain(config))
    differing = [key for key in {**stored, **requested} if _entries(stored.get(key)) != _entries(requested.get(key))]
    for key in differing:
        if not is_named(key, RESUMABLE_KEYS) and (remark := _objection(key, config_there, config)) is not None:
            other = safe_repr(requested.get(key)) if stored.get(key) != requested.get(key) else "in another order"
            difference = f"{key}={safe_repr(stored.get(key))}, not {other}{remark}"
            raise UserError(f"{config.directory} holds a run with {difference}; choose another output=…")


def _entries(value: object) -> object:
    """Return the entries of a mapping, and those within: the order of keep ratios and models decides who gets which."""
    return [(key, _entries(inner)) for key, inner in value.items()] if isinstance(value, Mapping) else value


def _objection(key: str, before: Config, config: Config) -> str | None:
    """Return the reason, if any, why a run cannot be resumed with another value; None if it can."""
    if key != "rounds" or config.rounds < before.rounds:
        return ""
    for local in (one.local for one in config.models()):
        lr, rate = local.optimizer.value("lr"), local.schedule.build
        if any(rate(lr, t, before.rounds) != rate(lr, t, config.rounds) for t in range(before.rounds)):
            return f": the schedule {local.schedule.name} depends on the total"
    return None


def config_in(directory: Path) -> Config:
    """Read the configuration of the run that a directory holds.

    Raise a UserError if it cannot be read, is of another version, or names modules that are not imported yet.
    """
    path = directory / CONFIG_FILE
    try:
        values = read_yaml(path)
        # The directory may come from anywhere, and modules are code.
        if unknown := [module for module in plugins_of(values) if module not in sys.modules]:
            raise UserError(
                f"it names the modules {join_first(unknown)}, which are code; import them first if you trust them"
            )
        return check_config(values)
    except UserError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{directory} holds no run of this version: {path.name} cannot be read ({reason})") from error


def plain(config: Config) -> dict[str, object]:
    """Return a configuration without its output directory."""
    return config.model_dump(mode="json", exclude={"output"})


def _remove_run(directory: Path, created: list[Path]) -> None:
    """Remove the files of a refused run, and the directories that were created for it."""
    for name in RUN_FILES:
        with suppress(OSError):
            (directory / name).unlink()
    if created:
        rmtree(directory / "wandb", ignore_errors=True)
        with suppress(OSError):  # a folder may hold other files
            (directory / LOCK_FILE).unlink()
            for path in created:
                path.rmdir()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
