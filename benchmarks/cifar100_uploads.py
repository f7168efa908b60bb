"""Clients of equal size, few of the invited upload: rounds and bits to an accuracy, on CIFAR-100.

After Appendix G of Chen, Horváth & Richtárik (TMLR 2022): 500 clients of 100 images take the same number of steps, so
that only what they have seen makes one update longer than another. 3 of 32 invited upload, by optimal draws and by
independent coins, beside all of them. Network, rounds and targets are ours, the first two for two cores; grid and seeds
are theirs: `uploads.py`. What has a curve in WHERE/curves.csv is not run again.

    python benchmarks/cifar100_uploads.py results/cifar100_uploads [--quick] [rounds=151]
"""

from fractions import Fraction
from pathlib import Path

from arguments import read_study
from uploads import FULL, GRID, OPTIMAL, SEEDS, UNIFORM, Arm, Study, run_arms, tune, write

CONFIG = Path(__file__).parents[1] / "configs" / "cifar100_uploads.yaml"
ARMS = (Arm(FULL), Arm(OPTIMAL, 3), Arm(UNIFORM, 3))
PUBLISHED = {FULL: Fraction(1, 1000), OPTIMAL: Fraction(1, 1000), UNIFORM: Fraction(3, 10_000)}


def main(into: Path, overrides: list[str], quick: bool) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    overrides += ["rounds=4", "evaluate_every=2", "model.widths=[2, 2]"] if quick else []
    study = Study("balanced", CONFIG, (), ARMS, (0.01, 0.99) if quick else (0.04, 0.06), 5000, PUBLISHED)
    steps = tune(study, into, overrides, (0.125,) if quick else GRID)
    seeds = SEEDS[: 1 if quick else None]
    results = run_arms(study, steps, seeds, into, overrides)
    head = [
        "# Clients of equal size, on CIFAR-100",
        "",
        f"500 clients of 100 samples, 32 invited a round, {results[0].rounds} rounds, mean ± sd of {len(seeds)} seeds;",
        "data: a lossy re-encoding (WebP). Published, without numbers: OCS is ahead of uniform draws here too.",
    ]
    sections = {"3 of 32 upload": (study, results)}
    write(into, "cifar100_uploads", overrides, head, sections, "Accuracy and loss against rounds and bits")


if __name__ == "__main__":
    main(*read_study(__doc__))
