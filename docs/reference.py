"""The generated parts of the reference: configuration keys and public names, from the code."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sharding
from train.config.parts import Part, options_of
from train.config.schema import Config, flatten, recipe_of
from train.config.values import Section, section_of
from train.config.yaml_text import in_yaml


def configuration() -> Iterator[str]:
    """Yield one list of keys a section of the configuration, and the options of each part."""
    yield (
        "- **`recipe`** (default `tuned`). The file of `configs/recipes` that sets `strategy`, `init`, "
        "`tail`, `local.optimizer`, `server_optimizer` and `result` where the configuration does not: `tuned` is ours, "
        "`published` the paper's. A run's `config.yaml` has the values instead."
    )
    yield from _section(Config, "")


def _section(section: type[Section], prefix: str) -> Iterator[str]:
    inner = {name: part for name in section.model_fields if (part := section_of(section, name))}
    recipes = {name: flatten(recipe_of({"recipe": name})) for name in ("tuned", "published")}
    for name, info in section.model_fields.items():
        if name not in inner and not (name == "name" and issubclass(section, Part)):
            key = f"{prefix}{name}"
            if key in recipes["tuned"]:
                default = "; ".join(f"`{recipe}`: `{json.dumps(values[key])}`" for recipe, values in recipes.items())
            else:
                value = info.get_default(call_default_factory=True)
                default = "required" if info.is_required() else f"default `{json.dumps(value)}`"
            yield f"- **`{key}`** ({default}). {_line(info.description)}"
    for name, part in inner.items():
        key, level = f"{prefix}{name}", "#" * (2 + prefix.count("."))
        yield from ("", f"{level} `{key}`", "", _line(part.__doc__), "")
        if issubclass(part, Part):
            default = part.model_fields["name"].default
            if isinstance(default, str):
                yield f"Default: `{default}`."
            elif key in recipes["tuned"]:
                yield f"The recipe `tuned` has {_of_recipe('tuned', key)}, `published` {_of_recipe('published', key)}."
            yield from ("", "| name | | options |", "|---|---|---|", *_parts(part), "")
        yield from _section(part, f"{key}.")


def _of_recipe(recipe: str, key: str) -> str:
    values: Any = recipe_of({"recipe": recipe})
    for word in key.split("."):
        values = values[word]
    return f"`{in_yaml(values)}`"


def _parts(part: type[Part]) -> Iterator[str]:
    """Yield a row for each registered part: its name, what it is, and its options with their defaults."""
    for name in part.registry.entries:
        function = part.registry[name]
        options = options_of(function, part.registry.num_arguments).values()
        texts = [
            each.name if each.default is each.empty else f"{each.name}={in_yaml(each.default)}" for each in options
        ]
        first = _line(inspect.getdoc(getattr(function, "func", function))).partition(". ")[0].rstrip(".")
        yield f"| `{name}` | {first} | {', '.join(f'`{text}`' for text in texts)} |"


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
    entry = getattr(sharding, name)
    if isinstance(entry, Mapping) or (isinstance(entry, type) and issubclass(entry, Exception)):
        return name
    parameters = []
    for parameter in inspect.signature(entry).parameters.values():
        default = parameter.default
        value = getattr(default, "__name__", repr(default))
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parameters.append(f"{mark}{parameter.name}" + ("" if default is parameter.empty else f"={value}"))
    return f"{name}({', '.join(parameters)})"


def _purpose(name: str) -> str:
    """Return the first sentence of a docstring, or the names that a registry holds."""
    entry = getattr(sharding, name)
    if isinstance(entry, Mapping):
        return ", ".join(f"`{key}`" for key in entry)
    text = re.sub(r"::(\s|$)", r".\1", _line(inspect.getdoc(entry))).replace("``", "`")  # a colon before an example
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


PARTS = (configuration, api)
