"""Federated fine-tuning of a pretrained model: ours, LoRA's federated forms, the head alone, and the whole model.

- `finetune`: all-MiniLM-L6-v2 on 20 Newsgroups (configs/finetune_newsgroups.yaml).
- `finetune_vision`: a ResNet, pretrained on CIFAR-100 by this study, on CIFAR-10 (configs/finetune_vision.yaml).

A setting has the clients' ranks and the skew of their data. In each, every method tries three rates on a seed of its
own and on samples held out of the training data, a fourth if the lowest or the highest is the best, and then trains at
the best one. docs/results/finetune_plan.md is the plan. `--only METHOD …` runs these methods.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from torch import nn

from sharding import UserError
from studies import runner
from studies.beyond import difference, format_percents
from studies.curves import by_scheme, ends
from studies.options import title
from studies.peers import aggregation
from studies.peers.federation import EXTRA, MakeServer, run_all
from studies.peers.servers import FloraServer, HeadServer, HetloraServer, LoraServer, ShardServer
from studies.runner import CONFIGS, Arguments, configs_of, curves_of, kept_curves, write_summary
from train.config.schema import Config, load_config
from train.data import default_root
from train.experiment.assembly import make_planner
from train.report.text import frame_table
from train.rundir.file_names import MODEL_FILE

COLUMNS = ("rounds", "bytes_up", "bytes_down", "num_aggregated", "test_accuracy", "test_loss", *EXTRA)
TRIAL_SEED, SEEDS = 1000, (0, 1, 2)
TRIAL = 1 / 3  # of the rounds
REDRAW = 10  # rounds between draws of L
WHOLE, TERMS, LORA, HEAD = (  # rates of texts; those of the head are for 30 times the mean state
    (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
    (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
    (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
)
HEAD_RATE = 0.3  # of the head of texts, whatever the rate of all else
VISION_LOW, VISION_HIGH = (0.005, 0.01, 0.02, 0.05, 0.1), (0.01, 0.02, 0.05, 0.1, 0.2)

Overrides = Mapping[str, object]


class Method(NamedTuple):
    """A method, and the rates to try.

    Attributes:
        make: builds its server.
        rates: five values of `local.optimizer.lr`: the middle three, and one on each side for where those get better.
        overrides: of a setting.
        at: returns further overrides for a rate.
        one_rank: whether all clients have the smallest keep ratio of a setting.
    """

    make: MakeServer
    rates: Sequence[float]
    overrides: Overrides = MappingProxyType({})
    at: Callable[[float], Overrides] = lambda rate: {}
    one_rank: bool = False


class Scenario(NamedTuple):
    """The ranks and data of the clients.

    Attributes:
        keep_ratios: the share of the clients that have each.
        overrides: of the configuration.
        waves: the methods' names, in waves: each is finished on all seeds before the next.
    """

    keep_ratios: Mapping[float, float]
    overrides: Overrides
    waves: Sequence[Sequence[str]]

    def overrides_of(self, method: Method) -> Overrides:
        """Return the overrides of a method in this setting."""
        ratios = {min(self.keep_ratios): 1} if method.one_rank else dict(self.keep_ratios)
        return {"keep_ratio": ratios, **self.overrides, **method.overrides}


class FineTuning(NamedTuple):
    """A pretrained model and data to tune it on.

    Attributes:
        config: its file in configs/.
        title: of its table.
        held_out: training samples on which rates are compared.
        prepare: returns overrides that name pretrained weights, by method; those of "" are for all other methods.
        settings: by name, the most decisive first.
        methods: by name.
    """

    config: str
    title: str
    held_out: int
    prepare: Callable[[Arguments], Mapping[str, Overrides]]
    settings: Mapping[str, Scenario]
    methods: Mapping[str, Method]


def ours(config: Config, start: nn.Module, model: nn.Module, redraw: int = 0) -> ShardServer:
    """Return the library's server; without a residual and with the strategy ``dense`` it is FedAvg."""
    return ShardServer(start, make_planner(config), model, redraw)


def lora(aggregate: aggregation.Aggregate, config: Config, start: nn.Module, model: nn.Module) -> LoraServer:
    """Return a server of LoRA."""
    return LoraServer(start, model, aggregate, config.seed)


def hetlora(config: Config, start: nn.Module, model: nn.Module) -> HetloraServer:
    """Return HetLoRA's server."""
    return HetloraServer(start, model, config.seed)


def flora(config: Config, start: nn.Module, model: nn.Module) -> FloraServer:
    """Return FLoRA's server."""
    return FloraServer(start, model, config.seed)


def head(name: str, config: Config, start: nn.Module, model: nn.Module) -> HeadServer:
    """Return FedAvg of the last layer."""
    return HeadServer(start, model, name)


def methods(
    last: str,
    whole: Sequence[float],
    terms: Sequence[float],
    of_lora: Sequence[float],
    of_head: Sequence[float],
) -> dict[str, Method]:
    """Return all methods by name.

    Args:
        last: the name of the last layer.
        whole: rates of dense training.
        terms: rates of the terms of weights.
        of_lora: rates of LoRA's factors.
        of_head: rates of the last layer.
    """
    exact, fedavg = {"residual": "float32"}, {"strategy": "dense", "residual": "null"}
    redrawn = partial(ours, redraw=REDRAW)
    return {
        "top_n": Method(ours, terms, {"tail": "null"}),
        "HetLoRA": Method(hetlora, of_lora),
        "FlexLoRA": Method(partial(lora, aggregation.flexlora), of_lora),
        "head only": Method(partial(head, last), of_head),
        "dense FedAvg": Method(ours, whole, fedavg),
        TAIL: Method(ours, terms),
        "FedIT": Method(partial(lora, aggregation.fedit), of_lora, one_rank=True),
        "FLoRA": Method(flora, of_lora, exact),
        "top_n, drawn anew": Method(redrawn, terms),
        "top_n, exact residual": Method(ours, terms, exact),
        "collective": Method(ours, terms, {"strategy": "collective"}),
        "unbiased": Method(ours, terms, {"strategy": "unbiased"}),
        "collective, drawn anew": Method(redrawn, terms, {"strategy": "collective"}),
        "unbiased, drawn anew": Method(redrawn, terms, {"strategy": "unbiased"}),
    }


def with_head_rate(named: Mapping[str, Method]) -> dict[str, Method]:
    """Return the methods with a head that learns at `HEAD_RATE`; "head only" tries rates of the head."""
    return {
        name: method if name == "head only" else method._replace(at=lambda rate: {"model.scale": HEAD_RATE / rate})
        for name, method in named.items()
    }


TAIL = "top_n, tail"
FIRST = ("top_n", "HetLoRA", "FlexLoRA", "head only", "dense FedAvg")
ALIKE = ("FedIT", "FLoRA", "top_n, drawn anew", "top_n, exact residual")
DRAWN = ("collective", "unbiased", "collective, drawn anew", "unbiased, drawn anew")
IMAGES = (TAIL, *FIRST[1:], "small sibling")  # without a tail `top_n` was refuted on texts


def settings(
    uneven: Mapping[float, float], even: float, first: Sequence[str], even_first: Sequence[str]
) -> dict[str, Scenario]:
    """Return the settings (b), uneven ranks, and (a), one rank, each with strong and weak skew.

    With one rank a tail is empty, and the strategies that draw terms are `top_n`.

    Args:
        uneven: the share of the clients that have each keep ratio.
        even: the one keep ratio.
        first: the methods of the first wave with uneven ranks.
        even_first: with one rank.
    """
    return {
        f"{name}, α = {alpha}": Scenario(ratios, {"data.partition.alpha": alpha}, waves)
        for name, ratios, waves in (
            ("uneven", uneven, (first, (*ALIKE, *DRAWN))),
            ("even", {even: 1.0}, (even_first, ALIKE)),
        )
        for alpha in (0.1, 1)
    }


def minilm(_: Arguments) -> dict[str, Overrides]:
    """Return where the encoder is: in the folder of the data."""
    return {"": {"model.weights": default_root() / "minilm"}}


def pretrained(arguments: Arguments) -> dict[str, Overrides]:
    """Train a ResNet and a narrow one on CIFAR-100, unless that was done, and return where their weights are."""
    narrow = {"model.width": 10, "model.groups": 5}
    words = {"pretrained": (), "pretrained, narrow": [f"{key}={value}" for key, value in narrow.items()]}
    wide, small = pretrain(arguments, words)
    return {"": wide, "small sibling": {**narrow, **small}}


def pretrain(arguments: Arguments, words: Mapping[str, Sequence[str]]) -> list[Overrides]:
    """Train ResNets with these overrides on CIFAR-100, unless that was done, and return where their weights are."""
    configs = configs_of(CONFIGS / "finetune_pretrain.yaml", words, (0,), arguments.into)
    if arguments.only != ():
        runner.run_all(configs, arguments.jobs)
    return [{"model.weights": config.directory / MODEL_FILE} for config in configs.values()]


RANKS = {4: 0.0104, 8: 0.0208, 16: 0.0416}  # n of 384, and r
EXPERIMENTS = {
    "finetune": FineTuning(
        "finetune_newsgroups",
        "all-MiniLM-L6-v2 on 20 Newsgroups",
        600,
        minilm,
        settings({RANKS[4]: 0.6, RANKS[16]: 0.4}, RANKS[8], (*FIRST, TAIL), FIRST),
        with_head_rate(methods("head", WHOLE, TERMS, LORA, HEAD)),
    ),
    "finetune_vision": FineTuning(
        "finetune_vision",
        "CIFAR-100 to CIFAR-10 (re-encoded), medium scale",
        2000,
        pretrained,
        settings({0.05: 0.6, 0.2: 0.4}, 0.1, IMAGES, ("top_n", *IMAGES[1:])),
        {
            **methods("fc", VISION_LOW, VISION_LOW, VISION_LOW, VISION_HIGH),
            "small sibling": Method(ours, VISION_LOW, {"strategy": "dense", "residual": "null"}),
        },
    ),
}


def run(experiment: FineTuning, arguments: Arguments) -> None:
    """Run what is missing, setting by setting, and write a table of all runs after each wave of methods."""
    if unknown := set(arguments.only or ()) - set(experiment.methods):
        raise UserError(f"--only: {', '.join(sorted(unknown))} is not among {', '.join(experiment.methods)}")
    if arguments.only != ():
        weights = experiment.prepare(arguments)
        for name, setting in experiment.settings.items():
            for wave in setting.waves:
                chosen = {
                    each: {**weights.get(each, weights[""]), **setting.overrides_of(experiment.methods[each])}
                    for each in wave
                    if arguments.only is None or each in arguments.only
                }
                run_wave(experiment, arguments, name, chosen)
                write_table(experiment, arguments)
    write_table(experiment, arguments)


def run_wave(experiment: FineTuning, arguments: Arguments, setting: str, chosen: Mapping[str, Overrides]) -> None:
    """Try the rates of these methods, given with overrides, and train each at its best rate, seed by seed."""
    best = {}
    for name, overrides in chosen.items():
        method, scheme = experiment.methods[name], f"{setting}, {name}"
        lowest, *rates, highest = method.rates
        for next_one in ({rates[0]: lowest, rates[-1]: highest}, {}):
            configs = configs_at(experiment, arguments, name, setting, overrides, rates, TRIAL_SEED, True)
            train(method, configs, arguments, "rates.csv")
            best[name] = best_rate(scheme, rates, by_scheme(kept_curves(arguments, "rates.csv", COLUMNS)))
            rates += [next_one[best[name]]] if best[name] in next_one else []
    for seed in arguments.seeds or SEEDS:
        for name, overrides in chosen.items():
            configs = configs_at(experiment, arguments, name, setting, overrides, [best[name]], seed)
            train(experiment.methods[name], configs, arguments, "curves.csv")


def configs_at(
    experiment: FineTuning,
    arguments: Arguments,
    name: str,
    setting: str,
    overrides: Overrides,
    rates: Sequence[float],
    seed: int,
    is_trial: bool = False,
) -> dict[str, Config]:
    """Return the configurations of a method at these rates; a trial has held-out samples and a share of the rounds."""
    path, schemes = CONFIGS / f"{experiment.config}.yaml", {}
    for rate in rates:
        values = {**overrides, "local.optimizer.lr": rate, **experiment.methods[name].at(rate)}
        words = [*(f"{key}={value}" for key, value in values.items()), *arguments.overrides]
        if is_trial:
            rounds = round(load_config(path, words).rounds * TRIAL)
            words = [word for word in words if not word.startswith("rounds=")]
            words += [f"data.holdout={experiment.held_out}", f"rounds={rounds}"]
        schemes[title(f"{setting}, {name}", rate)] = words
    return configs_of(path, schemes, (seed,), arguments.into)


def train(method: Method, configs: Mapping[str, Config], arguments: Arguments, file: str) -> None:
    """Run what has no curve in the file."""
    curves_of(configs, arguments, file, columns=COLUMNS, run=partial(run_all, method.make))


def best_rate(name: str, rates: Sequence[float], trials: pd.DataFrame) -> float:
    """Return the rate whose trial ends with the highest accuracy."""
    accuracies = ends(trials).set_index("scheme").test_accuracy
    return max(rates, key=lambda rate: accuracies[title(name, rate)])


def write_table(experiment: FineTuning, arguments: Arguments) -> None:
    """Write the summary of all runs that have a curve."""
    trials, curves = (by_scheme(kept_curves(arguments, file, COLUMNS)) for file in ("rates.csv", "curves.csv"))
    text = [
        f"# Fine-tuning: {experiment.title}",
        "",
        "## Trials of rates, on samples held out of the training data",
        "",
    ]
    text += [frame_table(rates_table(trials)), "", "## At the best rate", "", frame_table(table(experiment, curves))]
    write_summary(arguments, text)


def split_scheme(curves: pd.DataFrame) -> pd.DataFrame:
    """Add the `setting`, the `method` and the `rate` of curves by scheme."""
    parts = curves.scheme.str.extract(r"^(?P<setting>\w+, α = [\d.]+), (?P<method>.*), lr (?P<rate>.*)$")
    return curves.join(parts)


def rates_table(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracy of every trial."""
    last = split_scheme(ends(trials))
    percents = (100 * last.test_accuracy).map("{:.1f}".format)
    return last[["setting", "method", "rate"]].assign(**{"accuracy, %": percents})


def table(experiment: FineTuning, curves: pd.DataFrame) -> pd.DataFrame:
    """Return a row per setting and method: bytes, memory, accuracy and the difference to ours.

    That is `top_n` with a tail, or without one if all clients have one rank or no run has a tail.
    """
    curves, rows = split_scheme(curves), []
    for setting in experiment.settings:
        of_setting = curves[curves.setting == setting]
        default = TAIL if TAIL in of_setting.method.values else "top_n"
        for method in experiment.methods:
            runs = of_setting[of_setting.method == method]
            if runs.empty:
                continue
            last = ends(runs)
            base = of_setting[of_setting.method == default]
            rows.append(
                {
                    "setting": setting,
                    "method": method,
                    "lr": runs.rate.iloc[0],
                    "seeds": ", ".join(map(str, last.seed)),
                    "MB": f"{last.bytes_total.mean() / 1e6:,.0f}",
                    "without first contacts": f"{(last.bytes_total - last.bytes_first).mean() / 1e6:,.1f}",
                    "memory, MB": f"{last.memory_least.iloc[0] / 1e6:.0f} to {last.memory_most.iloc[0] / 1e6:.0f}",
                    "accuracy, %": format_percents(100 * last.test_accuracy),
                    "minus ours": difference(runs, base),
                }
            )
    return pd.DataFrame(rows)
