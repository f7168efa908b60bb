"""Evaluate a model on all samples of a split."""

import logging
from math import isfinite
from typing import Any

import torch
from torch import nn

from train.data import Dataset, Split
from train.engines.memory_format import channels_last
from train.experiment.experiment import Experiment
from train.registries import cross_entropy

MOST_LOGITS = 2**26  # of a batch: 256 MB in float32

log = logging.getLogger(__name__)


def scores(experiment: Experiment) -> dict[str, Any]:
    """Return accuracy and loss on the test split and, with `evaluate_training`, on all clients' samples, by name."""
    model, dataset = experiment.result, experiment.dataset
    accuracy, loss = evaluate(model, dataset, dataset.test)
    measured = {"test_accuracy": accuracy, "test_loss": loss}
    if experiment.config.evaluate_training:
        accuracy, loss = evaluate(model, dataset, experiment.clients.data.all())
        measured |= {"train_set_accuracy": accuracy, "train_set_loss": loss}
    return measured


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, data: Split, batch_size: int = 512) -> tuple[float, float]:
    """Return (accuracy in 0…1, mean cross-entropy) of a model over all targets of `data` but the ignored ones.

    Samples are prepared as `dataset` says, and never augmented. A batch has at most `batch_size` of them.
    """
    inputs, targets, rows = data.inputs, data.targets, rows_at_once(dataset, data, batch_size)
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    for batch, labels in zip(inputs.split(rows), targets.split(rows), strict=True):
        logits = model(channels_last(dataset.prepare(batch)))
        counted = labels != dataset.ignore_index
        loss = cross_entropy(logits, labels, dataset.ignore_index, reduction="sum")
        sums += torch.stack([((logits.argmax(-1) == labels) & counted).sum(), loss, counted.sum()])
    correct, loss_sum, count = sums.tolist()
    if not isfinite(loss_sum):
        remedy = "lower local.optimizer.lr or server_optimizer.lr"
        log.warning("the model's loss on %s is %s: %s", dataset.name, loss_sum, remedy)
    return correct / count, loss_sum / count


def rows_at_once(dataset: Dataset, data: Split, most: int) -> int:
    """Return the number of samples to evaluate in one batch: `most`, or fewer if their logits take much memory."""
    logits_of_one = data.targets.shape[1:].numel() * dataset.num_classes
    return max(1, min(most, MOST_LOGITS // logits_of_one))
