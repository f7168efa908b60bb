"""What Frobenius decay does where nothing clips: clients lost, and accuracy, of its three forms.

The quickstart at r = 0.1 and 60 rounds, without clipping (`clip=.inf`). Runs that are there are not run again.

    python benchmarks/decay.py results/decay
"""

import csv
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

import torch
from arguments import read_arguments

from sharding.optim import DecayOf
from train.config import Config, load_config
from train.report import History
from train.report.targets import mean_and_spread
from train.rounds import DivergedError
from train.run import run

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
STRATEGIES, SEEDS = ("unbiased", "prism_wallenius"), (0, 1, 2, 3)
PUBLISHED = ("start=as_built", "local.optimizer=sgd", "server_optimizer=plain", "result=last")
FIXED = (*PUBLISHED, "keep_ratio=0.1", "rounds=60", "evaluate_every=20", "clip=.inf")


def main(into: Path, overrides: Sequence[str]) -> None:
    """Run what is missing, and write the table."""
    torch.set_num_threads(1)
    raw: list[tuple[object, ...]] = [("decay_of", "strategy", "seed", "rounds", "lost", "trained", "test_accuracy")]
    rows = [
        "| decay of | strategy | clients lost of trained | ended by divergence | test accuracy, % |",
        "|---|---|---:|---:|---:|",
    ]
    for form, strategy in product(get_args(DecayOf), STRATEGIES):
        configs = [_config(form, strategy, seed, into, overrides) for seed in SEEDS]
        histories = [_history(config) for config in configs]
        rows.append(_row(form, strategy, configs[0].rounds, histories))
        raw += [(form, strategy, seed, *_counts([history])) for seed, history in zip(SEEDS, histories, strict=True)]
    command = " ".join(["python benchmarks/decay.py", f"results/{into.name}", *overrides])
    title = "# Frobenius decay without clipping: the quickstart, r = 0.1, 60 rounds"
    about = f"{len(SEEDS)} seeds; accuracy is the mean ± sd of the runs that ended."
    text = "\n".join([title, "", about, "", *rows, "", f"Made by `{command}`.", ""])
    with (into / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(raw)
    (into / "summary.md").write_text(text, encoding="utf-8")
    print(text)


def _config(form: str, strategy: str, seed: int, into: Path, overrides: Sequence[str]) -> Config:
    own = (f"local.frobenius_decay_of={form}", f"strategy={strategy}", f"seed={seed}")
    return load_config(CONFIG, [*FIXED, *overrides, *own, f"output={into}/runs/{form}-{strategy}-{seed}"])


def _history(config: Config) -> History:
    try:
        run(config, lambda metrics: None, resume=True)
    except DivergedError as error:
        print(f"{config.directory}: {error}", flush=True)
    return History.read(config.directory)


def _counts(histories: Sequence[History]) -> tuple[int, int, int, float]:
    """Return rounds, clients lost, clients trained, and the last accuracy (0…1, of the last run)."""
    lines = [line for history in histories for line in history.lines]
    lost, trained = (sum(int(line[key]) for line in lines) for key in ("failed", "clients"))
    accuracies = [line["test_accuracy"] for line in lines if "test_accuracy" in line]
    return len(lines), lost, trained, accuracies[-1] if accuracies else 0.0


def _row(form: str, strategy: str, rounds: int, histories: Sequence[History]) -> str:
    _, lost, trained, _ = _counts(histories)
    ended = [100 * history.lines[-1]["test_accuracy"] for history in histories if len(history.lines) == rounds]
    accuracy = mean_and_spread(ended) if len(ended) > 1 else "–"
    early = len(histories) - len(ended)
    return f"| {form} | {strategy} | {lost} of {trained} | {early} of {len(histories)} | {accuracy} |"


if __name__ == "__main__":
    main(*read_arguments(__doc__))
