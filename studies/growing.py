"""Full-rank fine-tuning at the memory of a model in 4 bits: a residual for ever, and a tail of frozen terms that grows.

Drawing L anew lost to a fixed L, and each redraw rounds the residual again, which moves the model by 9 % of ‖W‖. In the
growing tail R stays; the terms of each era become frozen terms in 4 bits, and new ones train beside them.

- `growing_texts`: all-MiniLM-L6-v2 on 20 Newsgroups, n = 16 of 384 terms, 15 rounds.
- `growing_images`: a ResNet, pretrained on CIFAR-100 by the study, on CIFAR-10, r = 1/16 (16 of 256 terms in its last
  stage), 40 rounds of 5 steps. Tiny ImageNet was the first choice. There no trial of a rate, of LoRA, the head or dense
  training, had more than 3.5 % after 7 rounds of 20 steps, too little to compare by. It was given up before a full run.

An era has three rounds, so that trials of rates have several.

Rules, set before the runs:

- First the gap: "head only", LoRA of the same rank (FedIT) and dense FedAvg, α = 1, seed 0, on both tasks. The task
  with the larger difference of dense FedAvg and LoRA is used for the rest. If both differences are below two points,
  there is nothing to win here: that is written down, and the rest does not run.
- Then five arms, α = 0.1 and 1, seeds 0 to 2, rates by the trials of `studies/finetune.py`: a fixed L; L drawn anew in
  each era with R rounded again, or with R in float32; the growing tail with drawn and with fresh terms.
- If float32 is not a point ahead of rounding again (mean of both α), rounding is not why drawing anew lost.
- If no arm is level with the fixed L (within one point, mean of both α), the question is closed.
- Bytes have what a client that comes back receives of the frozen terms; memory is that of the last round.
- All takes about two hours of a core.

    python -m studies growing_texts --seeds 0 --only 'head only' FedIT 'dense FedAvg'
    python -m studies growing_images --seeds 0 --only 'head only' FedIT 'dense FedAvg'
    python -m studies growing_texts --only top_n 'drawn anew' 'drawn anew, float32' 'growing, drawn' 'growing, fresh'
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

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
    ours,
    pretrain,
    with_head_rate,
)
from studies.peers.servers import GrowingServer
from studies.runner import Arguments
from train.config.schema import Config
from train.experiment.assembly import make_planner

ERA = 3  # rounds
RATES, HEAD_RATES = (0.01, 0.02, 0.05, 0.1, 0.2), (0.05, 0.1, 0.2, 0.5, 1.0)  # of images
GAP = ("head only", "FedIT", "dense FedAvg")
ARMS = ("top_n", "drawn anew", "drawn anew, float32", "growing, drawn", "growing, fresh")


def pretrained(arguments: Arguments) -> dict[str, Overrides]:
    """Train a ResNet on CIFAR-100, unless that was done, and return where its weights are."""
    (wide,) = pretrain(arguments, {"pretrained": ()})
    return {"": wide}


def growing(fresh: bool, config: Config, start: nn.Module, model: nn.Module) -> GrowingServer:
    """Return a server of the growing tail."""
    return GrowingServer(start, make_planner(config), model, ERA, fresh)


def with_arms(peers: Mapping[str, Method]) -> dict[str, Method]:
    """Return the methods of the gap, and the arms, with the rates of `top_n` and, for fresh terms, of LoRA."""
    terms, redrawn = peers["top_n"].rates, partial(ours, redraw=ERA)
    arms = (
        Method(ours, terms),
        Method(redrawn, terms),
        Method(redrawn, terms, {"residual": "float32"}),
        Method(partial(growing, False), terms),
        Method(partial(growing, True), peers["FedIT"].rates),
    )
    return {name: peers[name] for name in GAP} | dict(zip(ARMS, arms, strict=True))


def settings(keep_ratio: float, overrides: Overrides) -> dict[str, Scenario]:
    """Return the settings: the gap is measured at α = 1."""
    waves: Mapping[float, Sequence[Sequence[str]]] = {1: (GAP, ARMS), 0.1: (ARMS,)}
    return {
        f"even, α = {alpha}": Scenario({keep_ratio: 1.0}, {"data.partition.alpha": alpha, **overrides}, each)
        for alpha, each in waves.items()
    }


EXPERIMENTS = {
    "growing_texts": FineTuning(
        "finetune_newsgroups",
        "all-MiniLM-L6-v2 on 20 Newsgroups, a growing tail",
        600,
        minilm,
        settings(RANKS[16], {}),
        with_head_rate(with_arms(methods("head", WHOLE, TERMS, LORA, HEAD))),
    ),
    "growing_images": FineTuning(
        "finetune_vision",
        "CIFAR-100 to CIFAR-10 (re-encoded), a growing tail",
        2000,
        pretrained,
        settings(0.0625, {}),
        with_arms(methods("fc", RATES, RATES, RATES, HEAD_RATES)),
    ),
}
