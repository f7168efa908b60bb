"""A fair baseline: our recipe with shards against a narrow network that every client trains whole.

Earlier tables gave the narrow network the bytes of a shard or fewer, so it was a fifth smaller and had a quarter more
rounds. Here it has the even width whose bytes are nearest to the shard's, and both have our recipe and the same start.
One more arm has timm's start, which docs/results/start.md asks for.

- `narrow_fifth`: r = 0.2 and 16 channels, 1,188,488 and 1,238,872 B one way.
- `narrow_tenth`: r = 0.1 and 12 channels, 613,984 and 700,792 B.

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

    python -m studies narrow_fifth
    python -m studies narrow_tenth
"""

from studies.beyond import TIMM, Benchmark, narrow_network
from studies.options import OptionSet, OptionStudy

ROUNDS = 160
SHARD_RATES, NARROW_RATES = (0.01, 0.02, 0.03, 0.05), (0.02, 0.03, 0.05, 0.1)


def against_narrow(keep_ratio: float, width: int, rounds_for_bytes: int) -> OptionStudy:
    """Return the study of a keep ratio and a width, and the rounds in which the narrow network moves as many bytes."""
    narrow = narrow_network(width)  # groups as large as the shard's
    return OptionStudy(
        Benchmark("beyond", f"CIFAR-10 (re-encoded), medium scale, r = {keep_ratio}", ("recipe=tuned",)),
        1 / 4,
        {
            f"r = {keep_ratio} for all": OptionSet((f"keep_ratio={keep_ratio}", f"rounds={ROUNDS}"), SHARD_RATES),
            "narrow, equal rounds": OptionSet((*narrow, f"rounds={ROUNDS}"), NARROW_RATES),
            "narrow, equal bytes": OptionSet((*narrow, f"rounds={rounds_for_bytes}"), NARROW_RATES),
        },
    )


TENTH = against_narrow(0.1, 12, 140)
WITH_TIMM = OptionSet(("keep_ratio=0.1", f"rounds={ROUNDS}", *TIMM), SHARD_RATES)
EXPERIMENTS = {
    "narrow_fifth": against_narrow(0.2, 16, 153),
    "narrow_tenth": TENTH._replace(arms={**TENTH.arms, "r = 0.1 for all, zero_init_last": WITH_TIMM}),
}
