"""Some clients large, most small: rounds and bits to an accuracy when 3 or 6 of 32 invited clients upload, on MNIST.

After the first experiment of Chen, Horváth & Richtárik (TMLR 2022), on MNIST in place of the digits of FEMNIST, with a
smaller network of the same form, and with their three laws of sizes as their code has them: 10, 20 and 50 % of the
clients hold 82, 90 and 98 % of the data. Settings, grid, targets and seeds are theirs: `uploads.py`. What has a curve
in WHERE/curves.csv is not run again.

    python benchmarks/uneven_clients.py results/uneven_clients [--quick] [rounds=151]
"""

from pathlib import Path

from arguments import read_study
from uploads import ADAPTIVE, FULL, GRID, OPTIMAL, SEEDS, UNIFORM, Arm, Results, Study, run_arms, tune, write

CONFIG = Path(__file__).parents[1] / "configs" / "uneven_clients.yaml"
LAWS = {0.1: 9, 0.2: 11, 0.5: 8}  # share of clients with 380 samples -> samples of each of the others
PUBLISHED = {0.1: 1 / 32, 0.2: 1 / 16, 0.5: 1 / 16}  # the uniform method's best step size


def study_of(share: float, quick: bool) -> Study:
    """Return the study of a law of sizes; AOCS, equal to OCS in all published runs, is run with the first alone."""
    sizes = f"data.partition_options={{share: {share}, large: [380, 380], small: [{LAWS[share]}, {LAWS[share]}]}}"
    arms = [Arm(FULL), Arm(OPTIMAL, 3), Arm(OPTIMAL, 6), Arm(UNIFORM, 3), Arm(UNIFORM, 6)]
    if share == min(LAWS):
        arms.insert(3, Arm(ADAPTIVE, 3))
    published = {FULL: 1 / 8, OPTIMAL: 1 / 8, UNIFORM: PUBLISHED[share]}
    targets = (0.2, 0.99) if quick else (0.85, 0.95)
    return Study(f"share{share}", CONFIG, (sizes,), tuple(arms), targets, 5000, published)


def main(into: Path, overrides: list[str], quick: bool) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    overrides += ["rounds=4", "evaluate_every=2", "clients.count=60", "model.widths=[2, 2]"] if quick else []
    sections: dict[str, tuple[Study, list[Results]]] = {}
    for share in list(LAWS)[: 1 if quick else None]:
        study = study_of(share, quick)
        steps = tune(study, into, overrides, (0.125,) if quick else GRID)
        results = run_arms(study, steps, SEEDS[: 1 if quick else None], into, overrides)
        heading = f"{100 * share:g} % of the clients with 380 samples, the others with {LAWS[share]}"
        sections[heading] = (study, results)
        tell(into, overrides, sections)  # what there is: the next law takes its time


def tell(into: Path, overrides: list[str], sections: dict[str, tuple[Study, list[Results]]]) -> None:
    """Write the laws that have been run."""
    full = next(iter(sections.values()))[1][0]
    head = [
        "# Some clients large, most small, on MNIST",
        "",
        f"250 clients, 32 invited a round, {full.rounds} rounds, mean ± sd of {len(full.runs)} seeds.",
        "Each client has all digits, where FEMNIST's have a writer each. Published for the first law: 85 % after",
        "6,400 Mbit with OCS at m = 3, when neither of the others is above 40 %; full participation needs eight times",
        "as many, uniform draws as many or more.",
    ]
    picture = "10 % large clients: accuracy and loss against rounds and bits"
    write(into, "uneven_clients", overrides, head, sections, picture)


if __name__ == "__main__":
    main(*read_study(__doc__))
