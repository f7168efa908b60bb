"""Shakespeare's 715 characters as clients, a recurrent network, few of the invited upload: rounds and bits.

After the second experiment of Chen, Horváth & Richtárik (TMLR 2022), whose clients these are: 2 or 6 of 32 invited, or
4 or 12 of 128 (the paper lists the four numbers, and names 6 of 32 and 12 of 128 together), by optimal draws and by
independent coins, beside all of them. Each client has the first 5 % of its text, of that for testing too, so that it
takes hours and not days; the sizes are in their own proportions. The step sizes of 32 serve 128 too, as published. Grid
and seeds are theirs: `uploads.py`. What has a curve in WHERE/curves.csv is not run again.

    python benchmarks/shakespeare_uploads.py results/shakespeare_uploads [--quick] [rounds=151]
"""

from pathlib import Path

from arguments import read_study
from uploads import ALIKE, FULL, GRID, OPTIMAL, SEEDS, UNIFORM, Arm, Study, run_arms, tune, write

CONFIG = Path(__file__).parents[1] / "configs" / "shakespeare_gru.yaml"
INVITED = {32: ((2, 6), SEEDS), 128: ((4, 12), SEEDS[:2])}  # n -> m, seeds
PUBLISHED = {FULL: 1 / 4, OPTIMAL: 1 / 4, UNIFORM: 1 / 8}


def study_of(invited: int, quick: bool) -> Study:
    """Return the study in which so many are invited."""
    budgets, _ = INVITED[invited]
    # ALIKE, for the published step sizes of full participation and OCS are the same, and those tuned here are not.
    arms = [Arm(FULL), Arm(ALIKE), *(Arm(method, budget) for method in (OPTIMAL, UNIFORM) for budget in budgets)]
    targets = (0.01, 0.99) if quick else (0.25, 0.3)
    return Study(f"n{invited}", CONFIG, (f"clients.per_round={invited}",), tuple(arms), targets, 2000, PUBLISHED)


def main(into: Path, overrides: list[str], quick: bool) -> None:
    """Run what is missing, and write."""
    into.mkdir(parents=True, exist_ok=True)
    overrides += ["rounds=2", "evaluate_every=1", "model.width=8"] if quick else []
    steps = tune(study_of(min(INVITED), quick), into, overrides, (0.25,) if quick else GRID)
    sections = {}
    for invited, (_, seeds) in list(INVITED.items())[: 1 if quick else None]:
        study = study_of(invited, quick)
        results = run_arms(study, steps, seeds[: 1 if quick else None], into, overrides)
        sections[f"{invited} invited a round, {len(results[0].runs)} seeds"] = (study, results)
    head = [
        "# Shakespeare's characters, a recurrent network",
        "",
        f"715 clients with 5 % of their text each, for testing too, {results[0].rounds} rounds, mean ± sd over seeds.",
        "Published, without numbers: OCS is near full participation with 2 of 32 and equal to it with 6 of 32 and 12",
        "of 128. `full at the step of OCS` was added when the search had found another step size for each.",
    ]
    write(
        into, "shakespeare_uploads", overrides, head, sections, "32 invited: accuracy and loss against rounds and bits"
    )


if __name__ == "__main__":
    main(*read_study(__doc__))
