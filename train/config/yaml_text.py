"""Read users' YAML (UTF-8, no duplicate keys), and write values in one line."""

import os
from collections.abc import Hashable
from math import inf
from pathlib import Path
from typing import Any

import yaml

from sharding.errors import UserError, nearest, shown

LONGEST = 2**20  # bytes of a file
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is ten times faster, if available
DEEPEST = 100  # 100,000 levels would crash the process
MOST = 10**5  # values


class _Loader(_SafeLoader):  # type: ignore[valid-type, misc]
    """A safe loader that refuses duplicate keys, and keys without a blank after their colon."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if node.flow_style and _is_stuck_together(key_node, value_node):
                apart = key_node.value.replace(":", ": ", 1)
                raise UserError(f"a colon in braces needs a blank after it: {{{apart}}}, not {{{key_node.value}}}")
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                place = key_node.start_mark
                raise UserError(f"the key {shown(key)} is set twice, again in line {place.line + 1}; keep one of them")
            seen.add(key if isinstance(key, Hashable) else id(key))
        return super().construct_mapping(node, deep)


def _is_stuck_together(key: yaml.Node, value: yaml.Node) -> bool:
    """Return whether a key is like ``0.2:0.7``, which YAML reads as a key without a value."""
    plain = isinstance(key, yaml.ScalarNode) and not key.style
    return plain and ":" in key.value and value.value == ""


def parse_yaml(text: str) -> Any:
    """Parse a text in YAML.

    Raises:
        UserError: the text is not valid YAML, has a key twice, or is nested too deeply.
    """
    try:
        _check_extent(text)
        return yaml.load(text, _Loader)  # a safe loader
    except UserError:
        raise
    except Exception as error:  # tags raise many kinds: of a date in month 13, of `!!bool maybe`
        raise UserError(f"it is not valid YAML: {' '.join(str(error).split())}") from error


def _check_extent(text: str) -> None:
    """Refuse a text that is nested too deeply to be built, or whose aliases stand for too many values."""
    sizes, names, anchors = [0], list[str | None](), dict[str | None, int]()
    for event in yaml.parse(text, _SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            names.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = anchors[names.pop()] = sizes.pop()
            sizes[-1] += size
        elif isinstance(event, yaml.NodeEvent):  # a value, or an alias of one
            sizes[-1] += anchors.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if len(sizes) > DEEPEST + 1:
            raise UserError(f"it is nested too deeply: {DEEPEST} levels are allowed")
        if sizes[-1] > MOST:
            raise UserError(f"it has more than {MOST:,} values, aliases included")


def read_yaml(path: Path) -> Any:
    """Parse a file in YAML.

    Raises:
        UserError: the file does not exist, is too long or not in UTF-8, or `parse_yaml` refuses it.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            os.set_blocking(file.fileno(), True)
            content = file.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise UserError(f"the file has more than {LONGEST:,} bytes, which no configuration needs")
        return parse_yaml(content.decode("utf-8-sig"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        near = _nearest_file(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"cannot read the config {shown(str(path))}{near}: {reason}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. A pipe without a writer counts as empty instead of blocking."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def in_yaml(value: object) -> str:
    """Return a value in one line of YAML: ``null``, ``false``, ``[6, 16]``."""
    text = yaml.safe_dump(value, default_flow_style=True, width=inf, sort_keys=False, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _nearest_file(path: Path) -> str:
    try:
        return nearest(str(path), map(str, path.parent.glob("*.yaml")))
    except (OSError, ValueError):
        return ""
