"""A YAML file -> plain data that remembers the line of every value, or a `ConfigError`.

Stricter than YAML, because the files are written by hand: no aliases (a few lines of them expand
to gigabytes), no tags, no duplicate keys, one document, and scalars as YAML 1.2 reads them:
`no`, `on` and `12:30` are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdkit_dispatch.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]
Scalar = str | int | float | bool | None

_WORDS: Mapping[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class YamlFile:
    """What a file says.

    Attributes:
        data: Its mapping; values are scalars, lists and mappings (`Any`: the reader checks).
        lines: Key path -> line, counted from 1.
    """

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, key_path: KeyPath) -> str:
        """Returns "file:line: key.path" for a message."""
        return f"{self.path}:{self.lines.get(key_path, 1)}: {dotted(key_path)}"


def dotted(key_path: KeyPath) -> str:
    """Returns `("options", "openvino", 0)` as "options.openvino[0]"."""
    text = ""
    for part in key_path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def scalar_from_text(text: str) -> Scalar:
    """Returns what an unquoted scalar means in YAML 1.2: null, a bool, a number or text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'x'?" if a known word is close, else the list of known words."""
    from difflib import get_close_matches

    known = sorted(known)
    match = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(known) or 'none'}"


def read_yaml(path: Path) -> YamlFile:
    """Reads a file whose top level is a mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: It cannot be read, is not YAML, or uses what the module forbids.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be read: {reason}", "check the path") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: is larger than {MAX_FILE_BYTES} bytes", "is it really a YAML file of ours?"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text", "save it as UTF-8") from error
    return _parse(path, text)


def _parse(path: Path, text: str) -> YamlFile:
    import yaml

    lines: dict[KeyPath, int] = {}
    try:
        _refuse_forbidden(path, yaml.parse(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:  # characters that YAML forbids
        raise ConfigError(f"{path}: is not YAML: {error}".splitlines()[0]) from error
    data = {} if root is None else _value(path, root, (), lines)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1: must hold `key: value` lines, not {_kind(data)}")
    return YamlFile(path=path, data=data, lines=lines)


def _refuse_forbidden(path: Path, events: Iterable[Any]) -> None:
    # Any: the event classes of PyYAML have no common typed base.
    import yaml

    depth = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(
                f"{path}:{line}: YAML anchors and aliases (& and *) are not allowed",
                "write the value out",
            )
        if getattr(event, "tag", None):
            raise ConfigError(
                f"{path}:{line}: the YAML tag {event.tag!r} is not allowed", "remove it"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{path}:{line}: is nested deeper than {MAX_DEPTH} levels")


def _value(path: Path, node: Any, key_path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    # Any: a node is one of three untyped PyYAML classes, a value is whatever the file says.
    import yaml

    if isinstance(node, yaml.ScalarNode):
        text = str(node.value)
        return text if node.style else scalar_from_text(text)
    if isinstance(node, yaml.SequenceNode):
        values = []
        for index, child in enumerate(node.value):
            lines[(*key_path, index)] = child.start_mark.line + 1
            values.append(_value(path, child, (*key_path, index), lines))
        return values
    mapping: dict[str, Any] = {}
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: {dotted(key_path)}: a key must be a word")
        child_path = (*key_path, key)
        if key in mapping:
            raise ConfigError(
                f"{path}:{line}: {dotted(child_path)}: the key is here twice, "
                f"first in line {lines[child_path]}",
                "remove one of them",
            )
        lines[child_path] = line
        mapping[key] = _value(path, child, child_path, lines)
    return mapping


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "a single value"
