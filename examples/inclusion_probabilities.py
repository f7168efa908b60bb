"""Draw π and ω of every strategy for one trained layer, in one figure.

Trains the quickstart's ResNet on the digits for a few rounds of dense FedAvg, takes the spectrum of one layer, and
plots each strategy's inclusion probabilities and multipliers against the terms' magnitudes:

    python examples/inclusion_probabilities.py inclusion_probabilities.png
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

os.environ["MPLBACKEND"] = "agg"  # the picture goes to a file; a notebook's backend may not be installed here
sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sharding import STRATEGIES, Allocation, LayerContext, shardable_layers
from sharding.matrices.spectrum import decompose
from sharding.terms.strategies import num_terms
from train.callbacks import EachRound
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.report.plots import Style, save, style_of
from train.rounds import run_rounds

LAYER, KEEP_RATIO, NUM_CLIENTS = "stages.2.0.conv2", 0.2, 10
# Strategies that differ only after the draw share a curve.
SHOWN = {
    "top_n": "top_n (and top_n_scaled)",
    "prism": "prism (and prism_scaled): ω = 1",
    "prism_wallenius": "prism_wallenius (and _clip)",
    "unbiased": "unbiased",
    "collective": "collective",
    "schatten": "schatten",
}


def trained_magnitudes() -> np.ndarray:
    """Return λ of the layer after 20 rounds of FedAvg, shape (N,)."""
    config = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    plain = ["strategy=dense", "server_optimizer=plain"]
    experiment = assemble(load_config(config, [*plain, "rounds=20", "evaluate_every=20"]))
    experiment.start()
    run_rounds(
        experiment, 0, [EachRound(lambda metrics: print(f"round {metrics['round'] + 1} of 20", end="\r", flush=True))]
    )
    weight = shardable_layers(experiment.model)[LAYER].weight
    return decompose({LAYER: weight.detach().flatten(1)})[LAYER].magnitudes.numpy()


def draw(magnitudes: np.ndarray) -> Figure:
    """Return the figure: the spectrum, π and ω, over the terms from the largest to the smallest."""
    layer = LayerContext(magnitudes, num_terms(len(magnitudes), KEEP_RATIO), NUM_CLIENTS, KEEP_RATIO)
    allocations = {
        name: strategy.allocate(layer) for name, strategy in STRATEGIES.items() if name in SHOWN and strategy.allocate
    }
    figure = Figure(figsize=(9, 8.5), layout="constrained")
    spectrum, inclusion, multipliers = figure.subplots(3, 1, sharex=True, height_ratios=[1, 2, 2])
    terms = np.arange(1, len(magnitudes) + 1)
    spectrum.fill_between(terms, magnitudes, step="mid", color="0.8")
    spectrum.set(ylabel="magnitude λ", ylim=(0, None))
    for name, allocation in allocations.items():
        _curves(inclusion, multipliers, terms, allocation, style_of(name), SHOWN[name])
    inclusion.axhline(KEEP_RATIO, color="0.6", linewidth=0.8)
    inclusion.annotate("n/N: all terms equally likely", (terms[-1], KEEP_RATIO), ha="right", va="bottom", color="0.4")
    inclusion.set(ylabel="inclusion probability π", ylim=(-0.02, 1.02))
    inclusion.legend(frameon=False)
    multipliers.set(
        ylabel="multiplier ω, where π > 0", yscale="log", xlabel="singular term, from the largest to the smallest"
    )
    multipliers.axhline(10, color="0.6", linewidth=0.8)
    multipliers.annotate("τ = 10: clipping starts", (terms[-1], 10), ha="right", va="bottom", color="0.4")
    figure.suptitle(
        f"What each strategy makes of one trained layer ({LAYER}, N = {layer.magnitudes.size} terms,\n"
        f"each of {NUM_CLIENTS} clients gets n = {layer.num_terms})"
    )
    return figure


def _curves(
    inclusion: Axes, multipliers: Axes, terms: np.ndarray, allocation: Allocation, style: Style, label: str
) -> None:
    look = {"color": style.color, "linestyle": style.dash}
    inclusion.step(terms, allocation.inclusion, where="mid", label=label, **look)
    multipliers.step(terms, np.where(allocation.inclusion > 1e-12, allocation.multipliers, np.nan), where="mid", **look)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?", default="inclusion_probabilities.png")
    target = Path(parser.parse_args().target)
    for path in save(draw(trained_magnitudes()), target):
        print(f"wrote {path}       ")
