"""One line for each mistake in a configuration, with what is allowed; keys of earlier versions in their new form."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sharding.errors import UserError, safe_repr, suggest
from train.config.values import Section, section_of
from train.config.yaml_text import in_yaml

RENAMED = {  # keys of earlier versions
    "clip": "local.clip",
    "local.lr": "local.optimizer.lr",
    "local.momentum": "local.optimizer.momentum",
    "local.optimizer_options": "local.optimizer",
    "local.frobenius_decay": "local.decay",
    "local.frobenius_decay_of": "local.decay_of",
    "server_lr": "server_optimizer.lr",
    "server_momentum": "server_optimizer.momentum",
    "data.options": "data",
    "data.partition_options": "data.partition",
    "data.alpha": "data.partition.alpha",
    "data.fine_alpha": "data.partition.fine_alpha",
    "data.concentration": "data.partition.concentration",
    "clients.options": "clients.sampler",
    "clients.replacement": "clients.sampler.replacement",
    "clients.budget": "clients.sampler.budget",
    "clients.signal": "clients.sampler.signal",
    "clients.beta_over_alpha": "clients.sampler.beta_over_alpha",
    "tracking": "tracker",
    "tracking.use": "tracker",
    "tracking.wandb": "tracker={name: wandb, mode: %s}",
    "tracking.name": "tracker.run_name",
    "tracking.layers_every": "layers_every",
}
# Of the alternatives of a value, which are no keys.
TAG = re.compile(r"number|shares|range|float|int|str|\[key\]|(is-instance|tuple|list)\[.*")
HELP = "docs/reference/configuration.md lists all keys, `python -m train config CONFIG` prints a run's"


def explain(error: ValidationError, config: type[Section]) -> str:
    """Return one line for all that is wrong; where keys of an earlier version are, only for those."""
    lines = {
        _explain(details, config): _is_unknown(details) and _key_of(details) in RENAMED
        for details in error.errors()
        if details["type"] != "is_instance_of" or not TAG.fullmatch(str(details["loc"][-1]))  # a tensor, say
    }
    return "; ".join(line for line, renamed in lines.items() if renamed or not any(lines.values()))


def _explain(error: ErrorDetails, config: type[Section]) -> str:
    key, value = _key_of(error), error["input"]
    if isinstance(cause := error.get("ctx", {}).get("error"), UserError):
        return str(cause)
    if _is_unknown(error) and key in RENAMED:
        return "; ".join(_renamed(key, value))
    subject = f"{key}={safe_repr(value)}"
    match error["type"]:
        case _ if ":" in key and (value is None or value in error["loc"]):
            subject, reason = repr(key), "YAML needs a space after the colon, as in {0.2: 0.5}"
        case "option":
            subject, reason = key, error["msg"]
        case "extra_forbidden":
            return f"unknown config key {key!r}{_meant(key, config)}; {_allowed(error['loc'], config)}"
        case "missing":
            return f"the config lacks {key!r}"
        case "tuple_type" | "list_type" | "sequence_str":
            reason = f"a list is needed, as {key}=[…]"
        case "is_instance_of" if error["ctx"]["class"] == "Sequence":
            reason = f"a list is needed, as {key}=[…]"
        case "model_type":
            reason = f"a section of keys is needed, as {key}={{key: value}}"
        case _:
            reason = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{subject}: {reason}"


def _is_unknown(error: ErrorDetails) -> bool:
    return error["type"] in ("extra_forbidden", "option")


def _key_of(error: ErrorDetails) -> str:
    parts = [str(part) for part in error["loc"] if _is_unknown(error) or not TAG.fullmatch(str(part))]
    return ".".join(part[:80] for part in parts)


def _renamed(key: str, value: Any) -> Iterator[str]:
    """Yield a line for a key of an earlier version; one for each key in its section."""
    if key == "tracking":
        for inner, each in value.items() if isinstance(value, Mapping) else ():
            yield from _renamed(f"{key}.{inner}", each)
        return
    new = RENAMED.get(key, key.replace("tracking.", "tracker."))
    overrides = [new % in_yaml(value)] if "%s" in new else [f"{new}={in_yaml(value)}"]
    if key.endswith("options") and isinstance(value, Mapping):
        overrides = [f"{new}.{option}={in_yaml(each)}" for option, each in value.items()]
    yield f"{key} is of an earlier version; write {' '.join(overrides) or 'nothing for it'}"


def _allowed(loc: tuple[int | str, ...], config: type[Section]) -> str:
    """Return the keys of the section of an unknown key."""
    section = config
    for part in loc[:-1]:
        section = section_of(section.model_fields[str(part)]) or section
    return (
        HELP if section is config else f"the keys of {'.'.join(map(str, loc[:-1]))}: {', '.join(section.model_fields)}"
    )


def _meant(key: str, config: type[Section]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest key; keys with the same last part come first."""
    keys = [*_keys(config), *RENAMED.values()]
    last = [other.rpartition(".")[2] for other in keys]
    similar = get_close_matches(key.rpartition(".")[2], set(last), cutoff=0.85)
    candidates = [other for other, word in zip(keys, last, strict=True) if word in similar]
    return suggest(key, candidates, cutoff=0) if candidates else suggest(key, keys)


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if (inner := section_of(field)) is not None:
            yield from _keys(inner, f"{prefix}{name}.")
