"""Several runs that differ in strategy and seed alone."""

from collections.abc import Sequence
from pathlib import Path

from sharding.errors import UserError
from train.config import Config, load_config
from train.progress import RoundProgress
from train.run import check_directory, run


def plan_cells(
    path: str, overrides: Sequence[str], strategies: Sequence[str], seeds: Sequence[int] | None
) -> list[Config]:
    """Return the configurations to run, each with a directory of its own under the comparison's.

    Raises:
        UserError: a mistake in the file, an override, or any of the strategies; no strategy at all.
    """
    if not strategies:
        raise UserError("--strategies names no strategy; write for example --strategies unbiased,collective")
    base = load_config(path, overrides)
    into = base.output or Path("runs") / f"{base.name}-compare"
    return [
        load_config(
            path, [*overrides, f"strategy={strategy}", f"seed={seed}", f"output={into / f'{strategy}-{seed}'}"]
        )
        for strategy in dict.fromkeys(strategies)
        for seed in dict.fromkeys(seeds or [base.seed])
    ]


def compare(cells: Sequence[Config], progress: RoundProgress, resume: bool = False) -> list[Path]:
    """Run every cell, and return their directories; nothing starts unless all can."""
    for cell in cells:
        check_directory(cell, resume)
    return [
        run(cell, progress.follow(f"{cell.strategy} (seed {cell.seed})", cell.rounds), resume) for cell in cells
    ]
