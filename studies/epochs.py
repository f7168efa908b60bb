"""Four local epochs a round at full length, which the trials of changes kept (docs/results/beyond.md).

The arms of `narrow_fifth` in `studies/narrow.py` that move equal bytes, with four local epochs in place of one.

Rules, set before the runs:

- Rates: three for each arm, on seed 1000, for a quarter of the rounds. After these trials, and before any seed had run
  to the end, a rule was added: where the highest is the best, its double is tried too, and so on. The narrow network
  got three more rates by it.
- Number: the accuracy at the end, mean of the seeds 0, 1 and 2, and the differences of each seed to the shards.
- Shards beat the narrow network if they end at least a point ahead in the mean, and ahead on each seed. Otherwise they
  do not, and the recipe stays.
- On one core it takes about six hours.

    python -m studies four_epochs
"""

from studies.narrow import EXPERIMENTS as NARROW
from studies.options import OptionStudy

RATES = (0.005, 0.01, 0.02)  # the best rates with one epoch, and their halves
ARMS = {"r = 0.2 for all": RATES, "narrow, equal bytes": (*RATES, 0.04, 0.08, 0.16)}


def with_four_epochs(study: OptionStudy) -> OptionStudy:
    """Return the arms of a study that move equal bytes, with four local epochs a round."""
    title, overrides = "CIFAR-10 (re-encoded), r = 0.2, four local epochs", (*study.on.overrides, "local.epochs=4")
    arms = {name: study.arms[name]._replace(rates=rates) for name, rates in ARMS.items()}
    return study._replace(on=study.on._replace(title=title, overrides=overrides), arms=arms)


EXPERIMENTS = {"four_epochs": with_four_epochs(NARROW["narrow_fifth"])}
