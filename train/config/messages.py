"""One line for each mistake in a configuration, with what is allowed."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sharding.errors import UserError, safe_repr, suggest
from train.config.values import Section, section_of

OPTIONS = (  # keys that a misplaced word may mean, beside those of the schema
    *("local.optimizer.lr", "local.optimizer.momentum", "server_optimizer.lr", "server_optimizer.momentum"),
    *("data.partition.alpha", "data.partition.fine_alpha", "data.partition.concentration"),
    *("clients.sampler.replacement", "clients.sampler.budget", "clients.sampler.signal"),
    "clients.sampler.beta_over_alpha",
)
# Of the alternatives of a value, which are no keys.
TAG = re.compile(r"number|shares|range|float|int|str|\[key\]|(is-instance|tuple|list)\[.*")
HELP = "docs/reference/configuration.md lists all keys, `python -m train config CONFIG` prints a run's"


def explain(error: ValidationError, config: type[Section]) -> str:
    """Return one line for all that is wrong."""
    lines = [
        _explain(details, config)
        for details in error.errors()
        if details["type"] != "is_instance_of" or not TAG.fullmatch(str(details["loc"][-1]))  # a tensor, say
    ]
    return "; ".join(dict.fromkeys(lines))


def _explain(error: ErrorDetails, config: type[Section]) -> str:
    key, value = _key_of(error), error["input"]
    if isinstance(cause := error.get("ctx", {}).get("error"), UserError):
        return str(cause)
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


def _key_of(error: ErrorDetails) -> str:
    is_unknown = error["type"] in ("extra_forbidden", "option")
    parts = [str(part) for part in error["loc"] if is_unknown or not TAG.fullmatch(str(part))]
    return ".".join(part[:80] for part in parts)


def _allowed(loc: tuple[int | str, ...], config: type[Section]) -> str:
    """Return the keys of the section of an unknown key."""
    section = config
    for part in loc[:-1]:
        section = section_of(section, str(part)) or section
    return (
        HELP if section is config else f"the keys of {'.'.join(map(str, loc[:-1]))}: {', '.join(section.model_fields)}"
    )


def _meant(key: str, config: type[Section]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest key; keys with the same last part come first."""
    keys = [*keys_of(config), *OPTIONS]
    last = [other.rpartition(".")[2] for other in keys]
    similar = get_close_matches(key.rpartition(".")[2], set(last), cutoff=0.85)
    candidates = [other for other, word in zip(keys, last, strict=True) if word in similar]
    return suggest(key, candidates, cutoff=0) if candidates else suggest(key, keys)


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and of those within."""
    for name in section.model_fields:
        yield prefix + name
        if (inner := section_of(section, name)) is not None:
            yield from keys_of(inner, f"{prefix}{name}.")
