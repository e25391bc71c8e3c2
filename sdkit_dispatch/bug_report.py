"""One text file that a user can attach to a bug report, without their name or their folders."""

from __future__ import annotations

import getpass
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contract import record_to_json
from .failures import Failures
from .version import __version__

if TYPE_CHECKING:
    from .api import Dispatcher
    from .doctor import Finding

SHORTEST_SECRET = 3
"""A shorter name would blot out parts of ordinary words."""


def bug_report(dispatcher: Dispatcher, findings: Sequence[Finding]) -> str:
    """Returns versions, devices, plans, vendors, findings and remembered failures as text."""
    entries = list(dispatcher.store.entries())
    sections: dict[str, Any] = {  # Any: JSON data
        "sdkit-dispatch": {
            "version": __version__,
            "python": sys.version.split()[0],
            "platform": platform.platform(),
        },
        "plan": record_to_json(dispatcher.plan_report()),
        "vendors": [record_to_json(one) for one in dispatcher.vendor_states()],
        "doctor": [record_to_json(finding) for finding in findings],
        "failures": [record_to_json(one) for one in Failures(dispatcher.home).all()],
        "store": {
            "engines": len(entries),
            "damaged": [entry.damage for entry in entries if entry.damage],
        },
        "settings": {
            key: [str(getattr(dispatcher.config, key)), source]
            for key, source in dispatcher.config.sources.items()
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("SDKIT_", "CUDA_", "HIP_", "ROCR_", "HSA_", "GGML_", "ONEAPI_"))
        },
    }
    text = "\n\n".join(
        f"== {title}\n{json.dumps(content, indent=1, default=list)}"
        for title, content in sections.items()
    )
    return redacted(text, private_words(dispatcher.home)) + "\n"


def private_words(home: Path) -> dict[str, str]:
    """Returns what must not leave this machine -> what stands in its place."""
    words = {
        str(home): "<home of sdkit-dispatch>",
        str(Path.home()): "<home>",
        sys.prefix: "<environment>",
        sys.base_prefix: "<python>",
        str(Path(__file__).parents[1]): "<sdkit-dispatch>",
        os.getcwd(): "<here>",
        platform.node(): "<host>",
    }
    with suppress(KeyError, OSError, ImportError):  # a user without a name has none to hide
        words[getpass.getuser()] = "<user>"
    return {word: name for word, name in words.items() if len(word) >= SHORTEST_SECRET}


def redacted(text: str, words: Mapping[str, str]) -> str:
    """Returns `text` without those words, the longest first, in any way that JSON writes them."""
    for word in sorted(words, key=len, reverse=True):
        plain = {word, word.replace("\\", "/")}
        for spelling in plain | {json.dumps(one)[1:-1] for one in plain}:
            text = text.replace(spelling, words[word])
    return text
