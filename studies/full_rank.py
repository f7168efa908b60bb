"""Is there anything to win by full-rank fine-tuning? Only where dense training ends ahead of LoRA.

- `full_rank_texts`: all-MiniLM-L6-v2 on 20 Newsgroups, n = 16 of 384 terms, 15 rounds.
- `full_rank_images`: a ResNet, pretrained on CIFAR-100 by the study, on CIFAR-10, r = 1/16 (16 of 256 terms in its last
  stage), 40 rounds of 5 steps. Tiny ImageNet was the first choice. There no trial of a rate, of LoRA, the head or dense
  training, had more than 3.5 % after 7 rounds of 20 steps, too little to compare by. It was given up before a full run.

Rules, set before the runs:

- "head only", LoRA of the same rank (FedIT) and dense FedAvg, α = 1, seed 0, on both tasks, each at the best rate by
  the trials of `studies/finetune.py`.
- On the task with the larger difference of dense FedAvg and LoRA five full-rank arms would run, such as terms that are
  drawn anew and frozen terms that grow. If both differences are below two points, there is nothing to win here: that is
  written down, and the arms do not run.

    python -m studies full_rank_texts --seeds 0
    python -m studies full_rank_images --seeds 0
"""

from collections.abc import Mapping

from studies.finetune import (
    HEAD,
    LORA,
    RANKS,
    TERMS,
    WHOLE,
    FineTuning,
    Method,
    Overrides,
    Scenario,
    methods,
    minilm,
    pretrain,
    with_head_rate,
)
from studies.runner import Arguments

RATES, HEAD_RATES = (0.01, 0.02, 0.05, 0.1, 0.2), (0.05, 0.1, 0.2, 0.5, 1.0)  # of images
METHODS = ("head only", "FedIT", "dense FedAvg")  # of `studies/finetune.py`


def pretrained(arguments: Arguments) -> dict[str, Overrides]:
    """Train a ResNet on CIFAR-100, unless that was done, and return where its weights are."""
    (wide,) = pretrain(arguments, {"pretrained": ()})
    return {"": wide}


def compared(all_methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return the three methods that are compared."""
    return {name: all_methods[name] for name in METHODS}


def setting(keep_ratio: float) -> dict[str, Scenario]:
    """Return the one setting: all clients have this rank, and α = 1."""
    return {"even, α = 1": Scenario({keep_ratio: 1.0}, {"data.partition.alpha": 1}, (METHODS,))}


EXPERIMENTS = {
    "full_rank_texts": FineTuning(
        "finetune_newsgroups",
        "all-MiniLM-L6-v2 on 20 Newsgroups, dense training and LoRA",
        600,
        minilm,
        setting(RANKS[16]),
        compared(with_head_rate(methods("head", WHOLE, TERMS, LORA, HEAD))),
    ),
    "full_rank_images": FineTuning(
        "finetune_vision",
        "CIFAR-100 to CIFAR-10 (re-encoded), dense training and LoRA",
        2000,
        pretrained,
        setting(0.0625),
        compared(methods("fc", RATES, RATES, RATES, HEAD_RATES)),
    ),
}
