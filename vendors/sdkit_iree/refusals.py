"""What the compiler says of a graph, made readable."""

from __future__ import annotations

import re

_ERROR = re.compile(r"^(?:.*?:\d+:\d+: )?error: (?P<words>.*)$")
_OPERATOR = re.compile(r'"onnx\.(\w+)"')
_NO_RULE = "failed to legalize operation 'torch."
_WARNING = re.compile(r"UserWarning|warnings\.warn")
_MOST_WORDS = 3


def errors_in(words: str) -> tuple[str, ...]:
    """Returns what the compiler calls errors, each once; the last lines if it calls nothing so."""
    lines = words.splitlines()
    found = [_shortened(match["words"]) for line in lines if (match := _ERROR.match(line))]
    if found:
        return tuple(dict.fromkeys(found))[:_MOST_WORDS]
    said = [line.strip() for line in lines if line.strip() and not _WARNING.search(line)]
    return tuple(said[-_MOST_WORDS:]) or ("it says nothing",)


def missing_operators(words: str) -> set[str]:
    """Returns the ONNX operators that the compiler has no rule for, as far as it got."""
    lines = words.splitlines()
    missing: set[str] = set()
    for number, line in enumerate(lines):
        match = _ERROR.match(line)
        if match is None or not match["words"].startswith(_NO_RULE):
            continue
        # The operator is in the error itself, or in the line of the graph that is quoted below.
        for text in (match["words"], *lines[number + 1 : number + 3]):
            operator = _OPERATOR.search(text)
            if operator:
                missing.add(operator[1])
                break
    return missing


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
