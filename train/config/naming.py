"""Names of run directories, which differ if the overrides differ."""

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

from train.config.schema import Config, is_named

# Keys that no result depends on: a run can be resumed with other values. A check compares the data.
RESUMABLE_KEYS = frozenset({"engine", "tracker", "layers_every", "checkpoint_every", "data.root", "data.download"})
# Keys that do not change the experiment: they are not in directory names, and reports average over such runs.
NON_EXPERIMENT_KEYS = RESUMABLE_KEYS | {"seed", "output", "plugins", "device", "threads", "evaluate_every"}
LONGEST = 60  # characters of the settings in a directory's name


def with_directory(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with a directory named after the overrides, if it has none."""
    if config.output is not None:
        return config
    name = "-".join(filter(None, (config.name, config.strategy, describe(overrides), str(config.seed))))
    return config.model_copy(update={"output": Path("runs") / name})


def describe(overrides: Iterable[str]) -> str:
    """Return ``lr=0.05,width=8`` of overridden keys: their last words, unless two have the same, and their values.

    If that is longer than 60 characters: the first keys, and a hash of all.
    """
    unnamed = NON_EXPERIMENT_KEYS | {"name", "strategy"}  # in a directory's name anyway
    pairs = sorted(dict(override.split("=", 1) for override in overrides).items())
    kept = {key: value for key, value in pairs if not is_named(key, unnamed)}
    label = ",".join(f"{word}={_plain(value)}" for word, value in zip(short_names(kept), kept.values(), strict=True))
    if len(label) <= LONGEST:
        return label
    digest = blake2b(label.encode(), digest_size=4).hexdigest()
    return f"{label[: LONGEST - len(digest)].rpartition(',')[0]},{digest}".lstrip(",")


def short_names(keys: Iterable[str]) -> list[str]:
    """Return each key's last word, or all of it where that is another key's as well."""
    keys = list(keys)
    lasts = [key.rpartition(".")[2] for key in keys]
    return [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]


def settings_in_name(config: Config) -> str:
    """Return the settings in the names of a run's and its comparison's folder, as ``lr=0.05``, if there are any."""
    name, folder = re.escape(config.name), config.directory
    shared = re.fullmatch(rf"{name}-compare-(.+)", folder.parent.name)
    run = re.fullmatch(rf"(?:{name}-)?{re.escape(config.strategy)}-(.+)-{config.seed}", folder.name)
    return ",".join(match[1] for match in (shared, run) if match)


def _plain(value: str) -> str:
    """Return a value in a form that can be in a file's name and differs for different values."""
    plain = re.sub(r"[^\w.+=-]+", "_", value).strip("_")
    return plain if plain == value else f"{plain[:20]}~{blake2b(value.encode(), digest_size=3).hexdigest()}"
