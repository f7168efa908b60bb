"""Names of run directories, which differ if the overrides differ."""

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from train.config.parts import Part
from train.config.schema import Config, is_named
from train.config.values import Section

_FREE_KEYS = frozenset({"engine", "tracker", "checkpoint_every", "data.root", "data.download"})
# Keys with which a run can be resumed: no result depends on them, or they name what may have moved. A checkpoint has
# the weights, and a check compares the data.
RESUMABLE_KEYS = _FREE_KEYS | {"model.weights", "data.tokenizer"}
# Keys that do not change the experiment: they are not in directory names, and reports average over such runs.
NON_EXPERIMENT_KEYS = (
    _FREE_KEYS | {"seed", "output", "plugins", "device", "threads", "evaluate_every"} | {"privacy.secret_seed"}
)
LONGEST = 60  # characters of the settings in a directory's name


def with_directory(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with a directory named after the overrides, if it has none."""
    if config.output is not None:
        return config
    words = (config.name, config.strategy, describe(config, overrides), str(config.seed))
    name = "-".join(filter(None, words))
    return config.model_copy(update={"output": Path("runs") / name})


def describe(config: Config, overrides: Iterable[str]) -> str:
    """Return ``lr=0.05,width=8`` of overridden keys and their values.

    A key is its last word if it is the first of the configuration's keys with that word, and else all of it, so that
    no other key has its name. If all that is longer than 60 characters: the first keys, and a hash of all.
    """
    first: dict[str, str] = {}
    for key in keys_and_options(config):
        first.setdefault(_last(key), key)
    unnamed = NON_EXPERIMENT_KEYS | {"name", "strategy"}  # in a directory's name anyway
    pairs = sorted(dict(override.split("=", 1) for override in overrides).items())
    kept = {key: value for key, value in pairs if not is_named(key, unnamed)}
    named = {_last(key) if first.get(_last(key)) == key else key: value for key, value in kept.items()}
    label = ",".join(f"{word}={_plain(value)}" for word, value in named.items())
    if len(label) <= LONGEST:
        return label
    digest = blake2b(label.encode(), digest_size=4).hexdigest()
    return f"{label[: LONGEST - len(digest)].rpartition(',')[0]},{digest}".lstrip(",")


def settings_in_name(config: Config) -> str:
    """Return the settings in the names of a run's and its comparison's folder, as ``lr=0.05``, if there are any."""
    name, folder = re.escape(config.name), config.directory
    shared = re.fullmatch(rf"{name}-compare-(.+)", folder.parent.name)
    run = re.fullmatch(rf"(?:{name}-)?{re.escape(config.strategy)}-(.+)-{config.seed}", folder.name)
    return ",".join(match[1] for match in (shared, run) if match)


def keys_and_options(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section, set or not, with all options of its parts; its own before those within."""
    fields, options = type(section).model_fields, section.parameters if isinstance(section, Part) else ()
    yield from (prefix + key for key in (*fields, *options))
    for key in fields:
        if isinstance(inner := getattr(section, key), Section):
            yield from keys_and_options(inner, f"{prefix}{key}.")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _plain(value: str) -> str:
    """Return a value in a form that can be in a file's name and differs for different values."""
    plain = re.sub(r"[^\w.+=-]+", "_", value).strip("_")
    return plain if plain == value else f"{plain[:20]}~{blake2b(value.encode(), digest_size=3).hexdigest()}"
