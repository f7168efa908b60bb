"""The generated tables of the documentation, from the CSV, JSON and JSON Lines in `results/`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from studies import beyond as beyond_study
from studies import finetune as finetune_study
from studies import full_rank as full_rank_study
from studies import multi_task as multi_task_study
from studies import options as options_study
from studies import trials as trials_study
from studies import uploads, wireless
from studies.arrivals import main_table
from studies.beyond import difference
from studies.curves import by_scheme, ends, evaluations, mean_and_error, read_curves
from studies.narrow import EXPERIMENTS as NARROW
from studies.privacy import EXPERIMENTS as PRIVACY
from studies.privacy import named
from studies.runner import CONFIGS, Arguments
from studies.upload_studies import UPLOADS
from train.config.schema import load_config
from train.report.frame import find_runs, round_frame
from train.report.text import NOTHING, frame_table, markdown_table, mean_and_spread
from train.rundir.records import read_layers
from train.utils.jsonl import read_lines

RESULTS = Path(__file__).parents[1] / "results"
CIFAR = "CIFAR-10 (re-encoded)"  # lossy WebP, not the official images
QUARTERS = {"25 %": "25 %", "50 %": "50 %", "75 %": "75 %"}

Table = Callable[[], str]


def columns_table(frame: pd.DataFrame, columns: Mapping[str, str], left: int = 1) -> str:
    """Return some columns of a frame as a table, by their new names; the first `left` are text.

    A column may have a format, as in ``seconds:.1f``. Missing numbers are dashes.
    """
    table = {}
    for name, column in columns.items():
        key, _, form = column.partition(":")
        table[name] = [NOTHING if value != value else format(value, form) for value in frame[key]]  # noqa: PLR0124
    return frame_table(pd.DataFrame(table), left)


def measured(path: str, *keys: str) -> pd.DataFrame:
    """Return the cases of a benchmark's file in JSON, by `name`, with the keys of inner objects joined by dots.

    `keys` lead to the object of all cases.
    """
    content = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    for key in keys:
        content = content[key]
    return pd.json_normalize([{"name": name} | case for name, case in content.items() if isinstance(case, dict)])


def without_scaled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without those of scaled steps, which have a table of their own."""
    return frame[~frame.iloc[:, 0].str.contains("scaled")]


def curves(study: str, file: str = "curves.csv") -> pd.DataFrame:
    """Return the curves of a study by scheme and seed."""
    return by_scheme(read_curves(RESULTS / study / file))


# Accuracy at equal cost


def beyond() -> str:
    """Return the table of studies/beyond.py on CIFAR-10."""
    table = beyond_study.table(beyond_study.EXPERIMENTS["beyond"], curves("beyond"))
    columns = {f"{CIFAR}, r = 0.1": "method", "rounds": "rounds", "seeds": "seeds", **QUARTERS, "end, %": "end"}
    return columns_table(without_scaled(table), columns | {"minus `collective`": "end minus collective"})


def network_start() -> str:
    """Return the published strategies with our start of the network and with timm's, seed by seed."""
    cells = RESULTS / "tables_medium" / "cells" / "cifar10_resnet18" / "whole"  # dense training with our start
    whole = {path.parent.name: read_lines(path) for path in sorted(cells.glob("dense-*/metrics.jsonl"))}
    found, rows = pd.concat([curves("beyond"), by_scheme(evaluations(round_frame(whole)))]), []
    for name in ("collective", "top_n", "dense"):
        timms = found[found.scheme == f"{name}, zero_init_last"]
        for seed in sorted(timms.seed.unique()):
            numbers = []
            for runs in (found[found.scheme == name], timms):
                run = runs[runs.seed == seed].sort_values("rounds")
                late = run[run.rounds > 0.8 * run.rounds.max()]
                numbers += [100 * run.test_accuracy.iloc[-1], 100 * late.test_accuracy.mean()]
            rows.append((f"`{name}`", seed, *(f"{value:.1f}" for value in numbers)))
    columns = (f"{whose}: {number}" for whose in ("ours", "timm's") for number in ("end, %", "last fifth, %"))
    return markdown_table(("as published", "seed", *columns), rows)


def beyond_shakespeare() -> str:
    """Return the methods on Shakespeare, and our options at their best rate, beside `top_n` as published."""
    methods, arms = curves("beyond_shakespeare"), curves("options_shakespeare")
    tables = (
        beyond_study.table(beyond_study.EXPERIMENTS["beyond_shakespeare"], methods),
        options_study.arms_table(arms, "").rename(columns={"options": "method"}),
    )
    table, runs = without_scaled(pd.concat(tables)), pd.concat([methods, arms])
    published = methods[methods.scheme == "top_n"]
    table["gain"] = [difference(runs[runs.scheme == name], published) for name in table.method]
    columns = {"Shakespeare, r = 0.1": "method", "seeds": "seeds", **QUARTERS, "end, %": "end", "minus `top_n`": "gain"}
    return columns_table(table, columns)


def uneven() -> str:
    """Return strategies and smaller models for uneven clients, each at its best rate."""
    table = options_study.arms_table(curves("uneven"), "top_n")
    columns = {f"{CIFAR}, r = 0.2 and 0.4": "options", "rounds": "rounds", "GB": "GB", "seeds": "seeds", **QUARTERS}
    return columns_table(table, columns | {"end, %": "end", "minus `top_n`": "end minus the first"})


def narrow() -> str:
    """Return shards and narrow networks with our recipe, for as many rounds and for as many bytes."""
    tables = []
    for study, experiment in NARROW.items():
        runs, shards = curves(study), next(iter(experiment.arms))
        tables.append(options_study.arms_table(runs[~runs.scheme.str.contains("zero_init_last")], shards))
    return _against_shards(f"{CIFAR}, our recipe", pd.concat(tables))


def four_epochs() -> str:
    """Return shards of r = 0.2 and the narrow network of their bytes, with four local epochs a round."""
    return _against_shards(
        f"{CIFAR}, four local epochs", options_study.arms_table(curves("four_epochs"), "r = 0.2 for all")
    )


def _against_shards(title: str, table: pd.DataFrame) -> str:
    columns = {title: "options", "rounds": "rounds", "GB": "GB", "seeds": "seeds", **QUARTERS}
    return columns_table(table, columns | {"end, %": "end", "minus shards": "end minus the first"})


def trials() -> str:
    """Return the changes to our recipe that were tried."""
    table = trials_study.table(trials_study.EXPERIMENTS["trials"], curves("trials"))
    columns = {f"{CIFAR}, r = 0.2": "arm", "rounds": "rounds", "GB": "GB", "seeds": "seeds", **QUARTERS}
    return columns_table(table, columns | {"end, %": "end", "minus its base, by seed": "minus base, by seed"})


def long_run() -> str:
    """Return ends of a long run, and the narrow network of its bytes."""
    table = trials_study.table(trials_study.EXPERIMENTS["long_run"], curves("long_run"))
    columns = {f"{CIFAR}, r = 0.1, seed 0": "arm", "rounds": "rounds", "GB": "GB", **QUARTERS, "end, %": "end"}
    columns |= {"last model": "end, last model", "best": "best", "after round": "after"}
    return columns_table(table, columns | {"minus cosine": "minus base, by seed"})


def capacity() -> str:
    """Return the default's accuracy with ever more strong clients."""
    table = options_study.arms_table(curves("capacity"), "r = 0.2 for all")
    columns = {f"{CIFAR}, lr = 0.02": "arm", "rounds": "rounds", "GB": "GB", "seeds": "seeds", **QUARTERS}
    table["arm"] = table.options.str.removesuffix(", lr 0.02")
    return columns_table(table, columns | {"end, %": "end", "minus `r = 0.2 for all`": "end minus the first"})


def central() -> str:
    """Return the accuracy of models that were trained without a federation."""
    table = options_study.arms_table(curves("central"), "r = 0.2")
    columns = {f"{CIFAR}, all samples in one place": "options", "rounds of 160 steps": "rounds", "seeds": "seeds"}
    return columns_table(table, columns | QUARTERS | {"end, %": "end"})


def arms(study: str) -> pd.DataFrame:
    """Return the accuracy and the share of bytes of each arm of a comparison, in its order."""
    rows = []
    for (strategy, settings), runs in report(study).groupby(["strategy", "settings"], sort=False):
        share = f"{100 * runs.share_of_dense.mean():.1f} %"
        name = ", ".join(filter(None, (strategy, settings)))
        rows.append({"arm": name, "accuracy": f"{mean_and_spread(100 * runs.test_accuracy)} %", "share": share})
    return pd.DataFrame(rows)


def report(study: str) -> pd.DataFrame:
    """Return the row of each run in the summary of a comparison."""
    return pd.read_csv(RESULTS / study / "summary.csv", dtype={"settings": str}).fillna({"settings": ""})


def quickstart() -> str:
    """Return the quickstart's accuracy with the published algorithm and with the defaults."""
    table = arms("quickstart_seeds").merge(arms("quickstart_published"), on="arm", suffixes=("", "_published"))
    columns = {"digits, 50 rounds, 4 seeds": "arm", "published algorithm": "accuracy_published"}
    return columns_table(table, columns | {"our options": "accuracy", "of dense FedAvg's bytes": "share"})


def uneven_digits() -> str:
    """Return the quickstart's accuracy by the share of strong clients."""
    names = {
        "keep_ratio": ("r = 0.2 for all", "20 % at 0.4", "40 % at 0.4", "100 % at 0.4"),
        "tenth_and_half": ("r = 0.1 for all", "20 % at 0.5", "50 % at 0.5"),
    }
    table = pd.concat(arms(f"uneven_digits/{folder}").assign(arm=rows) for folder, rows in names.items())
    columns = {"digits, 50 rounds, 4 seeds": "arm", "accuracy": "accuracy", "of dense FedAvg's bytes": "share"}
    return columns_table(table, columns)


def wire() -> str:
    """Return what numbers of fewer bits cost in accuracy and save in bytes."""
    table = arms("wire").merge(pd.read_csv(RESULTS / "wire" / "megabytes_to_80.csv"), on="arm")
    never = [f" ({row.never} of 4 seeds never)" if row.never else "" for row in table.itertuples()]
    table["cost"] = [f"{row.mean:.1f} ± {row.deviation:.1f}" for row in table.itertuples()] + pd.Series(never)
    columns = {"quickstart, 4 seeds": "arm", "accuracy": "accuracy", "of dense FedAvg's bytes": "share"}
    return columns_table(table, columns | {"MB to 80 %": "cost"})


def wires() -> str:
    """Return what each wire loses, over pairs of equal strategy and seed, and its share of the bytes."""
    runs = report("wire").set_index(["settings", "strategy", "seed"])[["test_accuracy", "megabytes"]]
    runs, rows = runs.rename(lambda settings: settings.removeprefix("compression="), level="settings"), []
    for name in ("bfloat16", "int8"):
        gaps = 100 * (runs.test_accuracy[name] - runs.test_accuracy["float32"])
        shares = 100 * runs.megabytes[name] / runs.megabytes["float32"]
        rows.append((name, len(gaps), mean_and_error(gaps), f"{shares.min():.0f}–{shares.max():.0f} %"))
    return markdown_table(("minus float32", "pairs", "points", "of its bytes"), rows)


def wire_options() -> str:
    """Return the quickstart on int8 with the defaults, and with twice the terms."""
    named = {"our options": "wire_int8", "published, twice the terms": "wire_more_terms"}
    tables = [arms(study).assign(options=name) for name, study in named.items()]
    table = pd.concat(tables)
    columns = {"`compression=int8`": "arm", "accuracy": "accuracy", "of dense FedAvg's bytes": "share"}
    return columns_table(table.assign(arm=table.arm + ", " + table.options), columns)


def options() -> str:
    """Return each set of options at its best rate."""
    table = options_study.arms_table(curves("options"), "low_rank, nesterov")
    columns = {f"{CIFAR}, r = 0.1": "options", "rounds": "rounds", "seeds": "seeds", **QUARTERS, "end": "end"}
    return columns_table(
        without_scaled(table), columns | {"last model": "end, last model", "minus the first": "end minus the first"}
    )


def options_gains() -> str:
    """Return what all options gain over the methods of studies/beyond.py that move the same bytes."""
    arms, methods, rows = curves("options"), curves("beyond"), []
    tuned = arms[arms.scheme == "low_rank, nesterov, lr 0.02"]
    for name in ("collective", "collective, nesterov", "narrow, equal bytes", "narrow, equal bytes, nesterov"):
        others = methods[methods.scheme == name]
        shared = ", ".join(str(seed) for seed in tuned.seed.unique() if seed in set(others.seed))
        rows.append((name, shared, difference(tuned, others)))
    return markdown_table(("low_rank, nesterov, average, lr 0.02, minus", "seeds", "points at the end"), rows)


def privacy() -> str:
    """Return the accuracy of each method at each ε, on digits."""
    return _at_each_epsilon("privacy")


def privacy_cifar10() -> str:
    """Return the accuracy of each method at each ε, on CIFAR-10."""
    return _at_each_epsilon("privacy_cifar10")


def _at_each_epsilon(study: str) -> str:
    experiment = PRIVACY[study]
    found, epsilons = ends(curves(study)), sorted(experiment.epsilons)
    rows = []
    for method in experiment.methods:
        of_each = [found[found.scheme == named(method, each)].test_accuracy for each in epsilons]
        rows.append((f"`{method}`", *(mean_and_spread(100 * accuracies) for accuracies in of_each)))
    header = ("no noise" if each == inf else f"ε = {each:g}" for each in epsilons)
    return markdown_table(("test accuracy, %", *header), rows)


def scaled() -> str:
    """Return the published step of a client and a scaled one, each at its best rate, with our other options."""
    header = ("all options", "seeds", "published step", "lr", "scaled step", "lr", "difference")
    rows = []
    for name, study, *schemes in (
        ("CIFAR-10, `collective`", "options", "low_rank, nesterov, lr 0.02", "low_rank, nesterov, scaled, lr 0.03"),
        ("digits, `collective`", "options_digits", "sgd, lr 0.02", "scaled_sgd, lr 0.02"),
        (
            "Shakespeare, `top_n`",
            "options_shakespeare",
            "top_n, low_rank, nesterov, lr 0.1",
            "top_n, low_rank, nesterov, scaled, lr 0.05",
        ),
    ):
        runs = curves(study)
        steps = [runs[runs.scheme == scheme] for scheme in schemes]
        seeds = sorted({*steps[0].seed} & {*steps[1].seed})
        accuracies = (mean_and_spread(100 * ends(step[step.seed.isin(seeds)]).test_accuracy) for step in steps)
        rates = (scheme.rpartition(" ")[2] for scheme in schemes)
        cells = (cell for pair in zip(accuracies, rates, strict=True) for cell in pair)
        rows.append((name, ", ".join(map(str, seeds)), *cells, difference(steps[1], steps[0])))
    return markdown_table(header, rows)


def options_trials() -> str:
    """Return the accuracy at the end of the trials that chose these rates."""
    table = without_scaled(options_study.rates_table(curves("options", "rates.csv")))
    parts = table.options.str.rpartition(", lr ")
    return _by_rate("after 100 rounds, seed 1000, %", parts[0], parts[2], table.end)


def capacity_trials() -> str:
    """Return the accuracy at the end of the trials of changes for uneven clients."""
    table = options_study.rates_table(curves("capacity", "changes.csv"))
    parts = table.options.str.rpartition(", lr ")
    return _by_rate("after 50 rounds, seed 1000, %", parts[0], parts[2], table.end)


def _by_rate(title: str, names: pd.Series, rates: pd.Series, values: pd.Series) -> str:
    """Return a table with a row for each name and a column for each rate."""
    table = pd.DataFrame({"name": names, "rate": rates, "value": values})
    table = table.pivot_table(index="name", columns="rate", values="value", aggfunc="last", sort=False)
    table = table.reindex(columns=sorted(table, key=float)).fillna(NOTHING)
    return markdown_table([title, *(f"lr = {rate}" for rate in table)], table.itertuples())


def finetune() -> str:
    """Return bytes, memory and accuracy of each method of federated fine-tuning."""
    return _finetune("finetune")


def finetune_trials() -> str:
    """Return the accuracy of the trials that chose the rates of methods of federated fine-tuning."""
    return _finetune_trials("finetune", "after five rounds, held-out texts, %")


def finetune_one_rate() -> str:
    """Return the same in the first protocol."""
    return _finetune("finetune", "one_rate_curves.csv")


def finetune_one_rate_trials() -> str:
    """Return the trials of the first protocol."""
    return _finetune_trials("finetune", "after five rounds, held-out texts, %", "one_rate_rates.csv")


def finetune_vision() -> str:
    """Return bytes, memory and accuracy of each method of federated fine-tuning on images."""
    return _finetune("finetune_vision")


def finetune_vision_trials() -> str:
    """Return the trials on images."""
    return _finetune_trials("finetune_vision", "after 13 rounds, held-out images, %")


def full_rank() -> str:
    """Return what the head alone, LoRA and dense training reach on each task."""
    header = ("even ranks, α = 1, seed 0, %", "head only", "LoRA (FedIT)", "dense FedAvg", "dense minus LoRA")
    tasks = {"texts": "20 Newsgroups, n = 16 of 384", "images": f"{CIFAR}, r = 1/16"}
    rows = []
    for name, task in tasks.items():
        runs = finetune_study.split_scheme(ends(curves(f"full_rank_{name}"))).set_index("method")
        head, lora, dense = (100 * runs.test_accuracy[method] for method in full_rank_study.METHODS)
        rows.append((task, *(f"{value:.1f}" for value in (head, lora, dense)), f"{dense - lora:+.1f}"))
    return markdown_table(header, rows)


def _finetune(study: str, file: str = "curves.csv") -> str:
    return frame_table(finetune_study.table(finetune_study.EXPERIMENTS[study], curves(study, file)), left=2)


def _finetune_trials(study: str, title: str, file: str = "rates.csv") -> str:
    table = finetune_study.rates_table(curves(study, file))
    names = table.setting + ", " + table.method
    return _by_rate(title, names, table.rate, table["accuracy, %"])


# The paper's tables


def medium() -> str:
    """Return of each finished run at the medium scale its accuracy and what may explain it."""
    return f"{_medium(CIFAR, 'cifar10_resnet18')}\n\n{_medium('Shakespeare', 'shakespeare_gpt')}"


def _medium(title: str, experiment: str) -> str:
    header = (title, "rounds", "seed", *QUARTERS, "end", "client's error", "mean's error", "cosine", "coverage")
    rows = []
    for name, run, rounds in _medium_runs(experiment):
        total, scores = len(rounds), rounds.set_index("rounds").test_accuracy.dropna()
        quarters = (total * part // 4 for part in (1, 2, 3))
        means = (f"{100 * scores.loc[end - total // 5 : end].mean():.1f}" for end in quarters)
        late = rounds.tail(100).reindex(columns=["discrepancy_client", "discrepancy", "alignment", "coverage"]).mean()
        cells = (NOTHING if np.isnan(value) else f"{value:.2f}" for value in late)
        rows.append((name, total, run.name.rpartition("-")[2], *means, f"{100 * scores[total]:.1f}", *cells))
    return markdown_table(header, rows)


def spectra() -> str:
    """Return how norm and rank of a layer change in a run, the median over the layers."""
    rows = []
    for name, run, _ in _medium_runs("cifar10_resnet18"):
        records = [*read_layers(run).items()]
        if len(records) < 2 or records[0][0] != 0:
            continue  # the start was not recorded
        (_, start), (last_round, end) = records[0], records[-1]
        first, last = ([np.square(layer[0].magnitudes) for layer in layers.values()] for layers in (start, end))
        norm = median(after.sum() / before.sum() for before, after in zip(first, last, strict=True))
        ranks = (f"{median(map(_effective_rank, layers)):.1f}" for layers in (first, last))
        terms = [round(sum(layer[0].inclusion)) for layer in end.values()]
        kept = [100 * squares[:n].sum() / squares.sum() for squares, n in zip(last, terms, strict=True)]
        seed = run.name.rpartition("-")[2]
        rows.append((name, last_round + 1, seed, f"{norm:.2f}", *ranks, f"{min(kept):.0f}–{max(kept):.0f} %"))
    header = (CIFAR, "rounds", "seed", "norm² / start", "rank at the start", "at the end", "in n largest")
    return markdown_table(header, rows)


def _medium_runs(experiment: str) -> Iterator[tuple[str, Path, pd.DataFrame]]:
    """Yield the name, directory and rounds of each run of an experiment, those of 400 rounds first."""
    for study in ("tables_medium", "tables_longer"):
        if (folder := RESULTS / study / "cells" / experiment).exists():
            runs, _ = find_runs([folder])
            for run, rounds in runs.rounds.groupby("run", sort=False):
                strategy = Path(run).name.rpartition("-")[0]
                without_decay = Path(run).parent.name.endswith("local.decay=0")
                yield strategy + ", no decay" * without_decay, Path(run), rounds


def _effective_rank(squares: np.ndarray) -> float:
    """Return (Σλ²)²/Σλ⁴."""
    return float(squares.sum() ** 2 / np.square(squares).sum())


def learning_rates() -> str:
    """Return the accuracy after short runs at several learning rates."""
    files = (RESULTS / study / "learning_rate.csv" for study in ("tables_medium", "beyond"))
    runs = pd.concat([pd.read_csv(file, dtype={"lr": str}) for file in files])
    values = (100 * runs.test_accuracy).map("{:.1f}".format)
    return _by_rate("after 100 rounds, %", runs.strategy, runs.lr, values)


# Client sampling


def uneven_clients() -> str:
    """Return the bits that few uploads need where a few clients are large."""
    return _uploads("uneven_clients", {"large clients": ("10 %", "20 %", "50 %")})


def shakespeare_uploads() -> str:
    """Return the bits that few uploads need on Shakespeare."""
    return _uploads("shakespeare_uploads", {"invited": ("32", "128")})


def cifar100_uploads() -> str:
    """Return the bits that few uploads need where all clients are of equal size."""
    return _uploads("cifar100_uploads")


def joint_sampling() -> str:
    """Return the bits that few uploads of shards need."""
    return _uploads("joint_sampling")


def _uploads(name: str, labels: Mapping[str, Iterable[str]] | None = None) -> str:
    """Return the bits until the last target; `labels` are a first column, one word for each comparison."""
    study, labels = UPLOADS[name], labels or {}
    sections = uploads.run_comparisons(study, Arguments(name, RESULTS / name, only=()))
    tables = [uploads.table(study.targets, comparison.published, results) for comparison, results in sections]
    for column, words in labels.items():
        tables = [table.assign(**{column: word}) for table, word in zip(tables, words, strict=True)]
    target = f"{100 * study.targets[-1]:g} %"
    columns = {column: column for column in (*labels, "uploads", f"rounds to {target}")}
    columns |= {"Mbit up": f"Mbit to {target}", "of full": f"of full, {target}"}
    columns |= {"Mbit both ways": f"to {target}, both ways", "last accuracy, %": "last accuracy, %", "α": "α"}
    return columns_table(pd.concat(tables), columns, left=1 + len(labels))


def wireless_setups() -> str:
    """Return the simulated seconds of each scheme in the three setups, ours and published."""
    tables = {1: _setup("wireless_logistic"), 2: _separate_simulator(), 3: _setup("wireless_mnist")}
    table = pd.DataFrame({"seconds / proposed": tables[2].index})
    for number, setup in tables.items():
        for source, column in (("ours", "ratio"), ("paper", "published ratio")):
            table[f"Setup {number}, {source}"] = [setup[column][scheme] for scheme in tables[2].index]
    return frame_table(table)


def _setup(name: str) -> pd.DataFrame:
    """Return the times of each scheme in a setup that ran through `train`."""
    loss, accuracy = wireless.targets_of(load_config(CONFIGS / f"{name}.yaml"))
    runs = wireless.in_order(read_curves(RESULTS / name / "curves.csv"))
    return main_table(runs, loss, accuracy, wireless.SETUPS[name].seconds).set_index("scheme")


def _separate_simulator() -> pd.DataFrame:
    """Return the ratios of Setup 2, from a file with the seconds of each run."""
    runs = pd.read_csv(RESULTS / "wireless" / "runs.csv").query("part == 'main'")
    seconds = runs.groupby("scheme", sort=False)["seconds_to_loss_0.7"].mean()
    published = {
        name: seconds_of[0] for name, seconds_of in wireless.SETUPS["wireless_synthetic"].seconds.items() if seconds_of
    }
    ratios = pd.DataFrame({"ratio": seconds, "published ratio": pd.Series(published).reindex(seconds.index)})
    ratios = ratios / ratios.loc["proposed"]
    return ratios.map(lambda value: NOTHING if np.isnan(value) else f"{value:.2f}")


def multi_task() -> str:
    """Return the accuracy of several models at once, each signal at its best step."""
    arguments, tables = Arguments("multi_task", RESULTS / "multi_task", only=()), []
    for count, study in ((5, "multi_task"), (4, "multi_task_loss")):
        table = multi_task_study.table(
            study, *multi_task_study.train(study, multi_task_study.STEPS, multi_task_study.SEEDS, arguments)
        )
        tables.append(table.assign(models=count))
    columns = {"models": "models", "signal": "signal", "accuracy, %": "best", "minus uniform": "minus uniform"}
    columns |= {name: name for name in ("MB up a round", "MB down", "trainings a round")}
    return columns_table(pd.concat(tables), columns, left=2)


# Decay, and speed


def decay() -> str:
    """Return what the two forms of decay do where nothing clips; a run that diverged is in no table of a comparison."""
    rows = []
    for (settings, strategy), runs in report("decay").groupby(["settings", "strategy"], sort=False):
        arm = (settings.partition("=")[2], strategy, f"{len(runs)} of 4")
        rows.append((*arm, runs.num_failed.sum(), mean_and_spread(100 * runs.test_accuracy)))
    header = ("decay", "strategy", "runs that ended", "clients lost in them", "accuracy, %")
    return markdown_table(header, rows, left=2)


def adamw_clip() -> str:
    """Return what clipping does under AdamW, and the differences of each seed."""
    rows = []
    for strategy, runs in report("adamw_clip").groupby("strategy", sort=False):
        accuracy = 100 * runs.pivot(index="seed", columns="settings", values="test_accuracy")
        clipped, free = accuracy["clip=10.0"], accuracy["clip=.inf"]
        spreads = mean_and_spread(clipped), mean_and_spread(free)
        rows.append((strategy, *spreads, mean_and_error(clipped - free), runs.num_failed.sum()))
    header = ("AdamW", "τ = 10, %", "not clipped, %", "difference, points", "clients lost")
    return markdown_table(header, rows)


def deployment() -> str:
    """Return the table of benchmarks/deployment.py's wire."""
    cases = measured("deployment/wire.json").sort_values("name", key=lambda names: names.astype(int))
    for key in ("seconds", "seconds_empty"):
        cases[key] = cases[key].map(min)
    cases["megabytes"], cases["extra"] = cases.shard_bytes / 1e6, 100 * cases.wire_over.map(median)
    columns = {"nodes": "name", "seconds a round": "seconds:.1f", "Flower's empty round": "seconds_empty:.1f"}
    return columns_table(cases, columns | {"MB of shards a round": "megabytes:.1f", "extra bytes, %": "extra:.1f"})


def start() -> str:
    """Return the table of benchmarks/deployment.py's starts of apps, by the median round."""
    cases = measured("deployment/start.json")
    cases["median"], cases["best"] = cases.seconds.map(median), cases.seconds.map(min)
    cases["ratio"] = cases["median"] / cases["median"][0]
    columns = {"strategy": "strategy", "node": "node", "seconds a round": "median:.1f", "best round": "best:.1f"}
    return columns_table(cases, columns | {"of the first row": "ratio:.2f"}, left=2)


def engines() -> str:
    """Return the table of benchmarks/cohort.py, as far as it was run."""
    cases = measured("engines/cohort.json").dropna(subset="times_sequential.processes")
    cases["base"] = cases[["seconds_per_round.sequential", "seconds_per_round.sequential_1_thread"]].min(axis=1)
    columns = {"workload": "name", "sequential, s": "base:.2f", "processes, s": "seconds_per_round.processes:.2f"}
    columns |= {"times faster": "times_sequential.processes:.2f", "sequential, MB": "peak_memory_mb.sequential:.0f"}
    return columns_table(cases, columns | {"processes, MB": "peak_memory_mb.processes:.0f"})


def peers() -> str:
    """Return the table of benchmarks/peers.py."""
    cases = measured("engines/peers.json", "simulators").fillna({"ours_is_faster_by": 1.0})
    columns = {"simulator": "name", "seconds a round": "seconds_per_round:.2f", "times ours": "ours_is_faster_by:.2f"}
    return columns_table(cases, columns | {"peak MB": "peak_memory_mb:.0f"})


def cluster() -> str:
    """Return the table of benchmarks/cohort.py on Ray clusters; seconds are only there if the machine was quiet."""
    content = json.loads((RESULTS / "engines" / "cluster.json").read_text(encoding="utf-8"))
    cases = pd.DataFrame(
        {"case": case, "nodes": nodes} | values
        for case, by_nodes in content.items()
        for nodes, values in by_nodes.items()
    ).reindex(columns=["case", "nodes", "seconds", "head_mb", "worker_mb"])
    columns = {"clients a round": "case", "nodes": "nodes", "seconds a round": "seconds:.1f"}
    return columns_table(cases, columns | {"head, MB": "head_mb:.0f", "worker, MB": "worker_mb:.0f"})


def planner() -> str:
    """Return the table of benchmarks/planner.py."""
    cases = measured("planner/planner.json").query("name in ('unbiased', 'collective')")
    cases["reference"] = cases.reference_svd + cases.reference_r_draw
    phases = ["spectra", "inclusion", "fit", "draw", "plan"]
    cases[[*phases, "reference"]] *= 1e3
    columns = {"milliseconds": "name"} | dict(zip(("spectra", "π", "fit", "draw", "whole plan"), phases, strict=True))
    columns = {name: column if column == "name" else f"{column}:.1f" for name, column in columns.items()}
    return columns_table(cases, columns | {"reference": "reference:.0f", "ratio": "ratio:.1f"})


def scale() -> str:
    """Return the table of benchmarks/scale.py."""
    names = {
        "block": "one block of width 1024",
        "blocks": "six blocks of width 1024",
        "resnet18": "ResNet-18",
        "vit_b": "ViT-B",
        "gpt2_medium": "GPT-2 medium",
        "llama": "Llama-shaped decoder",
        "gpt2_medium_int4": "GPT-2 medium, factors on int4",
        "llama_int4": "Llama-shaped decoder, factors on int4",
    }
    cases = pd.read_csv(RESULTS / "scale" / "scale.csv", dtype={"plan_seconds": str, "aggregate_seconds": str})
    cases = cases.assign(
        model=cases.model.map(names), parameters=cases.parameters / 1e6, megabytes=cases.client_bytes / 1e6
    )
    columns = {"model": "model", "million parameters": "parameters:.0f", "MB a client": "megabytes:.0f"}
    columns |= {"plan, s": "plan_seconds", "average, s": "aggregate_seconds", "plan": "plan_peak:.1f"}
    return columns_table(cases, columns | {"round": "round_peak:.1f", "client, one step": "client_step_peak:.1f"})


def calibration() -> str:
    """Return the table of benchmarks/calibration.py."""
    rows = []
    cases = pd.read_csv(RESULTS / "calibration" / "calibration.csv", dtype=str, keep_default_na=False)
    for row in cases.to_dict("records"):
        if row["keep_ratio"] == "all":
            kept = "all"
        elif row["residual"] == "none":
            kept = f"{100 * float(row['keep_ratio']):.0f} % of the terms, chosen by {row['terms_by']}"
        else:
            kept = f"all, in `{row['residual']}` but for 16 of 384 terms"
        rows.append((kept, f"{100 * float(row['feature_error']):.0f}", row["accuracy"]))
    return markdown_table(("what is kept of each matrix", "error of the features, %", "accuracy, %"), rows)


def calibration_gpt() -> str:
    """Return the table of benchmarks/calibration.py for a GPT that is trained there."""
    cases = pd.read_csv(RESULTS / "calibration" / "gpt.csv", dtype=str, keep_default_na=False)
    rows = []
    for (share, residual), group in cases.groupby(["keep_ratio", "residual"], sort=False):
        kept = "all" if share == "all" else f"{100 * float(share):.0f} % of the terms"
        kept = kept if residual == "none" else f"all, in `{residual}` but for 6 of 128 terms"
        by = dict(zip(group.terms_by, group.perplexity, strict=True))
        rows.append((kept, by["weights"], by.get("activations", NOTHING)))
    return markdown_table(("what is kept of each matrix", "chosen by weights", "chosen by activations"), rows)


def finetune_memory() -> str:
    """Return the table of benchmarks/finetune_memory.py: counted megabytes, with activations where that was checked."""
    names = {"minilm": "MiniLM", "gpt2": "GPT-2", "vit_b": "ViT-B", "decoder": "decoder"}
    methods = {"full": "full fine-tuning", "lora": "LoRA on 16 bits", "qlora": "QLoRA", "ours": "ours, `int4`"}
    cases = pd.read_csv(RESULTS / "finetune_memory" / "memory.csv").set_index(["model", "method"])
    cases["counted"] = cases[["frozen", "trained", "gradients", "states", "message"]].sum(axis=1)
    labels = {
        "counted": "{name}, {size:,.0f} million parameters",
        "with_activations": "{name} with the activations of 16 tokens",
        "process": "… a process",
        "default_process": "… a process with glibc's defaults",
    }
    rows = []
    for model, name in names.items():
        sizes = cases.loc[model]
        for column, label in labels.items():
            if sizes[column].notna().any():
                megabytes = (sizes.loc[method, column] / 1e6 for method in methods)
                cells = ("–" if pd.isna(size) else f"{size:,.0f}" for size in megabytes)
                rows.append((label.format(name=name, size=sizes.parameters.iloc[0] / 1e6), *cells))
    return markdown_table(("MB", *methods.values()), rows)


PARTS: Mapping[str, Table] = {
    part.__name__: part
    for part in (
        *(beyond, network_start, narrow, trials, four_epochs, long_run, beyond_shakespeare),
        *(uneven, uneven_digits, quickstart),
        *(privacy, privacy_cifar10),
        *(wire, wires, wire_options),
        *(options, options_gains, options_trials, scaled, capacity_trials, capacity, central),
        *(finetune, finetune_trials, finetune_one_rate, finetune_one_rate_trials),
        *(finetune_vision, finetune_vision_trials, full_rank),
        *(medium, spectra, learning_rates),
        *(uneven_clients, shakespeare_uploads, cifar100_uploads, joint_sampling, multi_task),
        *(calibration, calibration_gpt, finetune_memory, decay, adamw_clip, engines, peers, cluster),
        *(deployment, start, planner, scale),
    )
} | {"wireless": wireless_setups}
