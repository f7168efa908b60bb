"""A run's directory: who may write there, what is whose, and what a process that died has left.

One process writes at a time: it holds a lock that ends with it, however it ends. What a run writes has fixed names; a
file of such a name that no run wrote is never touched.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

import yaml

from sharding.errors import UserError, shown
from train.checkpoint import BEST_FILE, MODEL_FILE, PREVIOUS_FILE
from train.config import Config, check_older, flatten, is_named
from train.failures import writing
from train.files import UNFINISHED
from train.parts import SCHEDULES
from train.provenance import PROVENANCE_FILE
from train.records import CLIENTS_FILE, LAYERS_FILE, PILOTS_FILE

try:
    import fcntl
except ImportError:  # not a Unix: there, nothing keeps two runs apart
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
REPORT_FILES = ("summary.md", "summary.csv", "accuracy_vs_bytes.png", "accuracy_vs_bytes.svg")
# What may change on the way, as no result depends on it; that the data are the same is checked once they are read.
FREE = frozenset({"tracking", "checkpoint_every", "data.root", "data.download"})
RUN_FILES = (
    *(CONFIG_FILE, METRICS_FILE, MODEL_FILE, PREVIOUS_FILE, BEST_FILE),
    *(PROVENANCE_FILE, CLIENTS_FILE, LAYERS_FILE, PILOTS_FILE, "wandb.json"),
)
MADE_BY = "Made by `python -m train"  # stands in every report
_LEFT_BY_SAFETENSORS = re.compile(r"\.tmp\w{6}")


def check_directory(config: Config, resume: bool) -> None:
    """Make sure that nothing will be overwritten.

    Raises:
        UserError: the directory holds a run and `resume` is off, or a run of another configuration and it is on; or
            files of such names that no run wrote; or a comparison.
    """
    directory, held = config.directory, [name for name in RUN_FILES if _exists(config.directory / name)]
    if resume and CONFIG_FILE in held:
        _check_same(config)
    elif resume and any(_size(directory / name) for name in held if name != PILOTS_FILE):  # it may be given
        raise UserError(f"{directory} holds {held[0]} but no {CONFIG_FILE}, so what was run there cannot be told")
    elif held and not resume:
        told = (
            f"{directory} already holds a run"
            if {CONFIG_FILE, METRICS_FILE} & {*held}
            else f"{directory} already has a {held[0]}"
        )
        raise UserError(f"{told}; choose another with output=…, or go on with it by --resume")
    check_reports(directory)
    if not {CONFIG_FILE, METRICS_FILE} & {*held}:
        _check_alone(directory)


def check_comparison(directory: Path) -> None:
    """Make sure that a comparison can have that folder.

    Raises:
        UserError: it holds a run of its own, or a report that is not from here; it cannot be made.
    """
    if _exists(directory / METRICS_FILE):
        raise UserError(f"{directory} holds a run; a comparison needs another folder: choose another output=…")
    check_reports(directory)
    check_writable(directory)


def check_writable(directory: Path, option: str = "output=…") -> None:
    """Make sure that there can be such a directory, by what is made for a moment where it is or would be.

    Raises:
        UserError: nothing can be written there.
    """
    try:
        place = next(path for path in (directory, *directory.parents) if path.exists())
        TemporaryDirectory(dir=place).cleanup()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write to {directory}: {why}; choose another {option}") from error


def check_reports(directory: Path) -> None:
    """Make sure that the reports to be written there overwrite none but earlier ones.

    Raises:
        UserError: a file of such a name that no run wrote.
    """
    summary = directory / REPORT_FILES[0]
    with suppress(OSError, UnicodeDecodeError):
        text = summary.read_text(encoding="utf-8")
        if not text or MADE_BY in text:  # an empty one is what a full disk had left of it
            return
    for path in (directory / name for name in REPORT_FILES):
        if _exists(path):
            raise UserError(f"{path} is not from here and would be overwritten; move it, or choose another output=…")


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Make the directory if there is none, and be the only process that writes there.

    If a new run is refused before it has come to anything, all that was made is taken away again.

    Raises:
        UserError: the directory cannot be made, or another process writes there.
    """
    made = _make(directory)
    with lock(directory / LOCK_FILE):
        clear_leftovers(directory)
        new = not any(_exists(directory / name) for name in RUN_FILES)
        try:
            yield
        except UserError:
            if new and not _size(directory / METRICS_FILE):
                _take_away(directory, made)
            raise


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file, until this process lets go of it or is no more; its workers do not share it.

    Raises:
        UserError: another process holds it.
    """
    with writing(path):
        file = path.open("a")
    with file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            told = f"another process writes to {path.parent}; wait for it, or choose another output=…"
            raise UserError(told) from None
        except OSError as error:  # some network file systems
            log.warning("%s cannot be locked (%s): start no second run there", path, error.strerror)
        yield


def clear_leftovers(directory: Path) -> None:
    """Remove what a process that died was writing; none lives that could go on with it."""
    for path in directory.iterdir():
        unfinished = path.name.endswith(UNFINISHED) and path.name.removesuffix(UNFINISHED) in RUN_FILES
        if (unfinished or _LEFT_BY_SAFETENSORS.fullmatch(path.name)) and path.is_file():
            path.unlink()


def _check_alone(directory: Path) -> None:
    """Keep a run out of a folder of other runs, whose summary its own would replace."""
    if (others := sorted(directory.glob(f"*/{METRICS_FILE}"))) or _exists(directory / REPORT_FILES[0]):
        held = f"other runs, as {others[0].parent.name}," if others else "the summary of other runs"
        raise UserError(f"{directory} holds {held} and a run needs a folder of its own: choose another output=…")


def _check_same(config: Config) -> None:
    path = config.directory / CONFIG_FILE
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"cannot read {path}, so what was run there cannot be told: {why}") from error
    if not isinstance(held, dict):
        raise UserError(f"{path} holds no configuration, so what was run there cannot be told")
    checked = check_older(held)
    before, wanted = flatten(plain(checked)), flatten(plain(config))
    differing = [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]
    for key in differing:
        if not is_named(key, FREE) and (more := _objection(key, checked, config)) is not None:
            told = f"{key}={shown(before.get(key))}, not {shown(wanted.get(key))}{more}"
            raise UserError(f"{config.directory} holds a run with {told}; choose another output=…")


def _objection(key: str, before: Config, config: Config) -> str | None:
    """Return why a run cannot go on with another value, if there is more to say than that; None where it can."""
    if key != "rounds":
        return ""
    rate, lr, held, asked = SCHEDULES[config.local.schedule], config.local.lr, before.rounds, config.rounds
    if asked < held:
        return ""
    same = all(rate(lr, t, held) == rate(lr, t, asked) for t in range(held))
    return None if same else f": the schedule {config.local.schedule} goes by their number"


def plain(config: Config) -> dict[str, object]:
    """Return what makes a configuration, which is all but where it writes."""
    return config.model_dump(mode="json", exclude={"output"})


def _make(directory: Path) -> list[Path]:
    """Make the directory and return what had to be made, the innermost first."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot make the directory {directory}: {why}; choose another output=…") from error
    return missing


def _take_away(directory: Path, made: list[Path]) -> None:
    """Remove what a refused run has written, and the directories that were made for it."""
    for name in RUN_FILES:
        with suppress(OSError):
            (directory / name).unlink()
    if made:
        rmtree(directory / "wandb", ignore_errors=True)
        (directory / LOCK_FILE).unlink(missing_ok=True)
    for path in made:
        with suppress(OSError):
            path.rmdir()


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
