"""The four studies of few uploads: uneven clients, Shakespeare's characters, equal clients, and holders of shards.

Grid, seeds and rounds are those of Chen, Horváth & Richtárik (TMLR 2022).

- `uneven_clients`: their first experiment, on MNIST instead of the digits of FEMNIST, with a smaller network of the
  same form. The three distributions of sizes are those of their code: 10, 20 and 50 % of the clients hold 82, 90 and
  98 % of the data. AOCS, equal to OCS in all published runs, is run with the first distribution only.
- `shakespeare_uploads`: their second experiment, with its clients: 2 or 6 of 32 invited, or 4 or 12 of 128 (the paper
  lists the four numbers, and names 6 of 32 and 12 of 128 together). Each client has the first 5 % of its text, for
  testing too, so that the study takes hours. The step sizes of 32 are used for 128 too, as published.
- `cifar100_uploads`: their Appendix G. 500 clients of 100 images take the same number of steps, so updates differ only
  by the clients' data. Network, rounds and targets are ours, the first two for two cores.
- `joint_sampling`: ours. Clients train shards of 21 to 53 % of the bytes. Of 32 invited, `ocs_partial` selects
  clients whose uploads weigh as much as three average shards. OCS, which ignores prices, and independent coins select
  three.
"""

from fractions import Fraction

from studies.uploads import ADAPTIVE, ALIKE, FULL, OPTIMAL, PRICED, SEEDS, UNIFORM, Arm, Comparison, Study


def _large_clients(share: float, small: int, uniform_step: float, *more: Arm) -> Comparison:
    """Compare on data where this share of the clients has 380 samples each, and the others `small`."""
    sizes = f"data.partition={{share: {share}, large: [380, 380], small: [{small}, {small}]}}"
    return Comparison(
        f"share{share}",
        f"{100 * share:g} % of the clients with 380 samples, the others with {small}",
        (Arm(FULL), Arm(OPTIMAL, 3), Arm(OPTIMAL, 6), *more, Arm(UNIFORM, 3), Arm(UNIFORM, 6)),
        (sizes,),
        published={FULL: 1 / 8, OPTIMAL: 1 / 8, UNIFORM: uniform_step},
    )


def _invited(count: int, few: int, more: int, seeds: tuple[int, ...]) -> Comparison:
    """Compare `few` and `more` uploads of `count` invited clients."""
    budgets = [Arm(method, budget) for method in (OPTIMAL, UNIFORM) for budget in (few, more)]
    return Comparison(
        f"n{count}",
        f"{count} invited a round, {{seeds}} seeds",
        # ALIKE: full participation and OCS have the same published step size, but not the same one here.
        (Arm(FULL), Arm(ALIKE), *budgets),
        (f"clients.per_round={count}",),
        seeds,
        {FULL: 1 / 4, OPTIMAL: 1 / 4, UNIFORM: 1 / 8},
    )


UPLOADS = {
    "uneven_clients": Study(
        "uneven_clients",
        "# Some clients large, most small, on MNIST\n\n"
        "250 clients, 32 invited a round, {rounds} rounds, mean ± sd of {seeds} seeds.\n"
        "Each client has all digits; in FEMNIST each client is one writer. Published for 10 % large clients: OCS with\n"
        "m = 3 reaches 85 % after 6,400 Mbit, when the others have at most 40 %. Full participation needs eight\n"
        "times as many, uniform draws at least that.",
        "10 % large clients: accuracy and loss against rounds and bits",
        (
            _large_clients(0.1, 9, 1 / 32, Arm(ADAPTIVE, 3)),
            _large_clients(0.2, 11, 1 / 16),
            _large_clients(0.5, 8, 1 / 16),
        ),
        (0.85, 0.95),
        5000,
    ),
    "shakespeare_uploads": Study(
        "shakespeare_gru",
        "# Shakespeare's characters, a recurrent network\n\n"
        "715 clients with 5 % of their text each, for testing too, {rounds} rounds, mean ± sd over seeds.\n"
        "Published, without numbers: OCS is near full participation with 2 of 32 and equal to it with 6 of 32 and 12\n"
        "of 128. `full at the step of OCS` was added after the search had found different step sizes for both.",
        "32 invited: accuracy and loss against rounds and bits",
        (_invited(32, 2, 6, SEEDS), _invited(128, 4, 12, SEEDS[:2])),
        (0.25, 0.3),
        2000,
        tuned_once=True,
    ),
    "cifar100_uploads": Study(
        "cifar100_uploads",
        "# Clients of equal size, on CIFAR-100\n\n"
        "500 clients of 100 samples, 32 invited a round, {rounds} rounds, mean ± sd of {seeds} seeds;\n"
        "data: a lossy re-encoding (WebP). Published, without numbers: OCS is ahead of uniform draws here too.",
        "Accuracy and loss against rounds and bits",
        (
            Comparison(
                "balanced",
                "3 of 32 upload",
                (Arm(FULL), Arm(OPTIMAL, 3), Arm(UNIFORM, 3)),
                published={FULL: Fraction(1, 1000), OPTIMAL: Fraction(1, 1000), UNIFORM: Fraction(3, 10_000)},
            ),
        ),
        (0.04, 0.06),
        5000,
    ),
    "joint_sampling": Study(
        "joint_sampling",
        "# Few uploads of shards, on MNIST\n\n"
        "A sharded ResNet (`collective`), 250 clients, a tenth of them with most of the data;\n"
        "{rounds} rounds, mean ± sd of {seeds} seeds.",
        "Accuracy and loss against rounds and bits",
        (
            Comparison(
                "joint",
                "Uploads that weigh as much as three average shards",
                (Arm(FULL), Arm(PRICED, 1.03), Arm(OPTIMAL, 3), Arm(UNIFORM, 3)),
            ),
        ),
        (0.7, 0.85),
        5000,
    ),
}
