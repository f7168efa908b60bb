"""The generated parts of the reference: configuration keys and public names, from the code."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sharding
from train.config.schema import Config
from train.config.sections import Section, section_of


def configuration() -> Iterator[str]:
    """Yield one list of keys a section of the configuration."""
    yield from _section(Config, "")


def _section(section: type[Section], prefix: str) -> Iterator[str]:
    inner = {name: its for name, info in section.model_fields.items() if (its := section_of(info))}
    defaults: dict[str, Any] = {}  # some follow from those before them
    for name, info in section.model_fields.items():
        if name not in inner:
            if not info.is_required():
                defaults[name] = info.get_default(call_default_factory=True, validated_data=defaults)
            default = f"default `{json.dumps(defaults[name])}`" if name in defaults else "required"
            yield f"- **`{prefix}{name}`** ({default}). {_line(info.description)}"
    for name, its in inner.items():
        yield from ("", f"## `{name}`", "", _line(its.__doc__), "")
        yield from _section(its, f"{prefix}{name}.")


def api() -> Iterator[str]:
    """Yield a table of public names for each theme of ``sharding.__all__``: signature and first sentence."""
    for theme, names in _themes().items():
        yield from (f"## {theme}", "", "| name | purpose |", "|---|---|")
        yield from (f"| `{_signature(name)}` | {_purpose(name)} |" for name in names)
        yield ""


def _themes() -> dict[str, list[str]]:
    """Return the public names by the comments between them in the source."""
    themes: dict[str, list[str]] = {}
    source = Path(sharding.__file__).read_text(encoding="utf-8").partition("__all__ = [")[2].partition("]")[0]
    for theme, name in re.findall(r"^    (?:# (.+)|\"(\w+)\",)", source, re.MULTILINE):
        if theme:
            themes[theme] = names = []
        else:
            names.append(name)
    return themes


def _signature(name: str) -> str:
    """Return a name with its parameters and defaults, without types."""
    its = getattr(sharding, name)
    if isinstance(its, Mapping) or (isinstance(its, type) and issubclass(its, Exception)):
        return name
    shown = []
    for parameter in inspect.signature(its).parameters.values():
        default = parameter.default
        value = getattr(default, "__name__", repr(default))
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{mark}{parameter.name}" + ("" if default is parameter.empty else f"={value}"))
    return f"{name}({', '.join(shown)})"


def _purpose(name: str) -> str:
    """Return the first sentence of a docstring, or the names that a registry holds."""
    its = getattr(sharding, name)
    if isinstance(its, Mapping):
        return ", ".join(f"`{key}`" for key in its)
    return re.split(r"(?<=\.)\s", _line(inspect.getdoc(its)).replace("``", "`"), maxsplit=1)[0]


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


PARTS = (configuration, api)
