"""Runs what is missing of a study, and writes its curves, its table and its picture.

    python -m studies uneven_clients [--into results/uneven_clients] [--quick] [KEY=VALUE …]

What has a curve in the folder's `curves.csv` is not run again, and a run that was cut off resumes. So the committed
tables are made again in seconds; those of `beyond*`, of which not all is run, with `--only`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sharding.errors import UserError
from studies import beyond, decay, multi_task, uploads, wireless
from studies.runner import Asked
from studies.upload_studies import UPLOADS
from train.runtime.errors import RunError

STUDIES: dict[str, Callable[[Asked], None]] = {
    **{name: partial(uploads.run, study) for name, study in UPLOADS.items()},
    "multi_task": multi_task.run,
    **{name: partial(wireless.run, setup) for name, setup in wireless.SETUPS.items()},
    **{name: partial(beyond.run, experiment) for name, experiment in beyond.EXPERIMENTS.items()},
    "decay": decay.run,
}


def main(words: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code."""
    asked = read(words)
    asked.into.mkdir(parents=True, exist_ok=True)
    try:
        STUDIES[asked.study](asked)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read(words: Sequence[str]) -> Asked:
    """Return what a command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run, e.g. rounds=3")
    parser.add_argument("--into", type=Path, help="folder to write to (default: results/STUDY)")
    parser.add_argument("--quick", action="store_true", help="a few rounds of a few runs, to see that it works")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="in place of the study's own")
    parser.add_argument("--only", nargs="*", metavar="METHOD", help="of beyond*: what to run of it, else all")
    parser.add_argument("--jobs", type=int, help="runs at a time; one a core if not given")
    args = parser.parse_intermixed_args(words)
    into = args.into or Path("results") / args.study
    seeds, only = (None if its is None else tuple(its) for its in (args.seeds, args.only))
    return Asked(args.study, into, tuple(args.overrides), args.quick, seeds, only, args.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
