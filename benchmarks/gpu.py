"""The paper's CIFAR-10 column (ResNet-18, r = 0.1, 1,000 rounds) on a GPU: what the CPU stand-ins cannot show.

A GPU machine may be bare. Where packages can be had, `pack` gathers what the project needs besides torch, timm and the
like, and the data, in one folder to carry over:

    python benchmarks/gpu.py pack FOLDER --data ../shared/data [--python 3.12]

There, `column` runs what is missing of the column, all strategies side by side on the one GPU, and writes `table1.md`
with the published column beside it, as `python -m train table 1 --scale paper` does:

    PYTHONPATH=FOLDER/site python benchmarks/gpu.py column OUTPUT --data FOLDER/data [--jobs 10] [KEY=VALUE …]

OUTPUT holds all that a later call needs: the same command goes on from the checkpoints in it. To stop in time, put
`timeout -s TERM 9m` before it: every run ends its round, and keeps it.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

ORDER = (
    *("collective", "top_n", "unbiased", "prism_wallenius_clip", "prism", "dense", "full"),  # what is asked first
    *("prism_wallenius", "prism_scaled", "top_n_scaled"),
)
WHOLE = ("dense", "full")  # the same run at any keep ratio
LACKING = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
DATA = ("cifar10",)
OFTEN = "checkpoint_every=25"  # rounds, some minutes


def main(words: Sequence[str]) -> int:
    """Carry out one command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    gather = commands.add_parser("pack", help="gather packages and data to carry over")
    gather.set_defaults(command=pack)
    gather.add_argument("into", type=Path, help="folder to make")
    gather.add_argument("--python", default=".".join(map(str, sys.version_info[:2])), help="version over there")
    column = commands.add_parser("column", help="run what is missing of the column")
    column.set_defaults(command=run_column)
    column.add_argument("into", type=Path, help="folder of the table, its runs and their checkpoints")
    column.add_argument("--jobs", type=int, default=len(ORDER), help="runs side by side (default: all)")
    for command in (gather, column):
        command.add_argument("--data", type=Path, required=True, help="folder that holds cifar10/")
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    args = parser.parse_args([word for word in words if word not in overrides], argparse.Namespace(overrides=overrides))
    code: int = args.command(args)
    return code


def pack(args: argparse.Namespace) -> int:
    """Put the lacking packages in `into/site` and the data in `into/data`."""
    for name in DATA:
        shutil.copytree(args.data / name, args.into / "data" / name, dirs_exist_ok=True)
    wheels = ["--only-binary=:all:", "--platform", "manylinux2014_x86_64", "--python-version", args.python, "--no-deps"]
    target = ["--target", str(args.into / "site"), "--upgrade", "--quiet"]
    needed = [f"{name}=={version(name)}" for name in LACKING]  # as here: pydantic works with one pydantic-core only
    subprocess.run([sys.executable, "-m", "pip", "install", *wheels, *target, *needed], check=True)
    size = sum(file.stat().st_size for file in args.into.rglob("*") if file.is_file())
    print(f"{args.into}: {size / 2**20:.1f} MiB")
    return 0


def run_column(args: argparse.Namespace) -> int:
    """Run what is missing of the column."""
    from train.__main__ import main as train  # noqa: PLC0415 - `pack` needs none of it

    cells = [f"cifar10_resnet18/{'whole' if name in WHOLE else 'r0.1'}/{name}-0" for name in ORDER]
    options = ["--scale", "paper", "--seeds", "0", "--jobs", str(args.jobs), "--output", str(args.into)]
    return train(["table", "1", *options, "--only", ",".join(cells), f"data.root={args.data}", OFTEN, *args.overrides])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
