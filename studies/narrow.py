"""A fair baseline: our recipe with shards against a narrow network that every client trains whole.

Earlier tables gave the narrow network the bytes of a shard or fewer, so it was a fifth smaller and had a quarter more
rounds. Here it has the even width whose bytes are nearest to the shard's, and both have our recipe and the same start.
One more arm has timm's start, which docs/results/start.md asks for.

- `narrow_fifth`: r = 0.2 and 16 channels, 1,188,488 and 1,238,872 B one way.
- `narrow_tenth`: r = 0.1 and 12 channels, 613,984 and 700,792 B.
- `four_epochs`: as `narrow_fifth`, with four local epochs a round in place of one (docs/results/beyond.md, "Trials of
  changes").

Rules, set before the runs:

- Arms: the shards for 160 rounds; the narrow network for as many rounds, and for as many bytes; in `narrow_tenth` the
  shards with timm's start, too.
- Rates: four for each arm, on seed 1000, for a quarter of the rounds. Where the lowest or the highest is the best, the
  table says so.
- Number: the accuracy at the end, mean of the seeds 0, 1 and 2, and the differences of each seed to the shards.
- If the narrow network at equal rounds is ahead by less than a point, "factorized layers lose more to averaging" goes
  from our pages. At equal bytes, whatever comes out stands in the README's "When not to use it".
- On one core a run of 160 rounds takes about 12 minutes with shards, and 7 or 4 with the narrow network: four hours
  for both studies.
- `four_epochs`: three rates for each arm. The narrow network at equal bytes decides: shards beat it if they end at
  least a point ahead in the mean, and ahead on each seed; below that the two are level, as with one epoch. About six
  hours on one core.

    python -m studies narrow_fifth
    python -m studies narrow_tenth
    python -m studies four_epochs
"""

from studies.beyond import TIMM, Benchmark, narrow_network
from studies.options import OptionSet, OptionStudy

ROUNDS, EQUAL_ROUNDS = 160, "narrow, equal rounds"
SHARD_RATES, NARROW_RATES = (0.01, 0.02, 0.03, 0.05), (0.02, 0.03, 0.05, 0.1)
FOUR_EPOCHS_RATES = (0.005, 0.01, 0.02)  # half of those that are best with one epoch, and higher


def against_narrow(keep_ratio: float, width: int, rounds_for_bytes: int) -> OptionStudy:
    """Return the study of a keep ratio and a width, and the rounds in which the narrow network moves as many bytes."""
    narrow = narrow_network(width)  # groups as large as the shard's
    return OptionStudy(
        Benchmark("beyond", f"CIFAR-10 (re-encoded), medium scale, r = {keep_ratio}", ("recipe=tuned",)),
        1 / 4,
        {
            f"r = {keep_ratio} for all": OptionSet((f"keep_ratio={keep_ratio}", f"rounds={ROUNDS}"), SHARD_RATES),
            EQUAL_ROUNDS: OptionSet((*narrow, f"rounds={ROUNDS}"), NARROW_RATES),
            "narrow, equal bytes": OptionSet((*narrow, f"rounds={rounds_for_bytes}"), NARROW_RATES),
        },
    )


def with_four_epochs(study: OptionStudy) -> OptionStudy:
    """Return the arms of a study that move equal bytes, with four local epochs a round."""
    on = study.on._replace(
        title=f"{study.on.title}, four local epochs", overrides=(*study.on.overrides, "local.epochs=4")
    )
    arms = {name: arm._replace(rates=FOUR_EPOCHS_RATES) for name, arm in study.arms.items() if name != EQUAL_ROUNDS}
    return OptionStudy(on, study.trial, arms)


FIFTH = against_narrow(0.2, 16, 153)
TENTH = against_narrow(0.1, 12, 140)
WITH_TIMM = OptionSet(("keep_ratio=0.1", f"rounds={ROUNDS}", *TIMM), SHARD_RATES)
EXPERIMENTS = {
    "narrow_fifth": FIFTH,
    "narrow_tenth": TENTH._replace(arms={**TENTH.arms, "r = 0.1 for all, zero_init_last": WITH_TIMM}),
    "four_epochs": with_four_epochs(FIFTH),
}
