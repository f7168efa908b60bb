"""Sharding and client sampling together: uneven clients with shards of 21 to 53 % of the bytes, few of them upload.

Of 32 clients invited, `ocs_partial` hears some, whose uploads weigh as much as three average shards; OCS, which knows
no prices, and independent coins hear three. A few large clients have most of the data (configs/uneven_clients.yaml), so
that it matters who is heard. Step sizes are tuned as in the other studies of uploads: `uploads.py`. What has a curve in
WHERE/curves.csv is not run again.

    python benchmarks/joint_sampling.py results/joint_sampling [--quick] [rounds=151]
"""

from pathlib import Path

from arguments import read_study
from uploads import FULL, GRID, OPTIMAL, PRICED, SEEDS, UNIFORM, Arm, Study, run_arms, tune, write

CONFIG = Path(__file__).parents[1] / "configs" / "joint_sampling.yaml"
ARMS = (Arm(FULL), Arm(PRICED, 1.03), Arm(OPTIMAL, 3), Arm(UNIFORM, 3))


def main(into: Path, overrides: list[str], quick: bool) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    overrides += ["rounds=4", "evaluate_every=2", "clients.count=60"] if quick else []
    study = Study("joint", CONFIG, (), ARMS, (0.2, 0.99) if quick else (0.7, 0.85), 5000)
    steps = tune(study, into, overrides, (0.125,) if quick else GRID)
    results = run_arms(study, steps, SEEDS[: 1 if quick else None], into, overrides)
    head = [
        "# Who of the holders of shards uploads, on MNIST",
        "",
        "A sharded ResNet (`collective`), 250 clients, a tenth of them with most of the data;",
        f"{results[0].rounds} rounds, mean ± sd of {len(results[0].runs)} seeds.",
    ]
    sections = {"Uploads that weigh as much as three average shards": (study, results)}
    write(into, "joint_sampling", overrides, head, sections, "Accuracy and loss against rounds and bits")


if __name__ == "__main__":
    main(*read_study(__doc__))
