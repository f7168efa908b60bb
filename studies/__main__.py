"""Run what is missing of a study, and write its curves, its table and its picture.

    python -m studies uneven_clients [--into results/uneven_clients] [KEY=VALUE …]

Runs with a curve in the folder's `curves.csv` are not repeated, and an interrupted run resumes. So the committed tables
take seconds to make again; add `--only` for a study that was not run completely (docs/results/index.md names them).
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # pictures go to files; a notebook's backend may not be installed here
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # others may have packages of our names, as `models`

from sharding import UserError
from studies import beyond, epochs, finetune, full_rank, multi_task, narrow, options, privacy, trials, uploads, wireless
from studies.runner import Arguments
from studies.upload_studies import UPLOADS
from train.cli.arguments import positive
from train.cli.commands import explain
from train.utils.errors import RunError

STUDIES: dict[str, Callable[[Arguments], None]] = {
    **{name: partial(uploads.run, study) for name, study in UPLOADS.items()},
    "multi_task": multi_task.run,
    **{name: partial(privacy.run, experiment) for name, experiment in privacy.EXPERIMENTS.items()},
    **{name: partial(wireless.run, setup) for name, setup in wireless.SETUPS.items()},
    **{name: partial(beyond.run, experiment) for name, experiment in beyond.EXPERIMENTS.items()},
    **{
        name: partial(options.run, experiment)
        for name, experiment in (options.EXPERIMENTS | narrow.EXPERIMENTS | epochs.EXPERIMENTS).items()
    },
    **{name: partial(trials.run, experiment) for name, experiment in trials.EXPERIMENTS.items()},
    **{
        name: partial(finetune.run, experiment)
        for name, experiment in (finetune.EXPERIMENTS | full_rank.EXPERIMENTS).items()
    },
}

OF_METHODS = tuple(
    name for module in (beyond, options, narrow, epochs, trials, finetune, full_rank) for name in module.EXPERIMENTS
)


def main(words: Sequence[str]) -> int:
    """Run a command line and return the exit code."""
    arguments = read(words)
    try:
        arguments.into.mkdir(parents=True, exist_ok=True)
        STUDIES[arguments.study](arguments)
    except (UserError, RunError, OSError, KeyboardInterrupt) as error:
        line, code = explain(error, "the same command")
        print(line, file=sys.stderr)
        return code
    return 0


def read(words: Sequence[str]) -> Arguments:
    """Parse a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="set a key of every run, e.g. rounds=3")
    parser.add_argument("--into", type=Path, help="folder to write to (default: results/STUDY)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="use these seeds instead of the study's")
    only = "run only these methods of a study that compares methods; without a method, run none"
    parser.add_argument("--only", nargs="*", metavar="METHOD", help=only)
    parser.add_argument("--jobs", type=positive, help="runs at a time (default: one per core)")
    args = parser.parse_intermixed_args(words)
    into = args.into or Path("results") / args.study
    if args.only and args.study not in OF_METHODS:
        parser.error(f"--only chooses methods of {', '.join(OF_METHODS)}; {args.study} runs all")
    seeds, methods = (None if values is None else tuple(values) for values in (args.seeds, args.only))
    given = ["--seeds", *map(str, seeds)] if seeds else []
    command = shlex.join(["python", "-m", "studies", args.study, *args.overrides, *given])
    return Arguments(args.study, into, tuple(args.overrides), seeds, methods, args.jobs, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
