"""Which GPUs the library sees, asked in a process of its own: it binds to them for good."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from sdkit_dispatch.contract import Device
from sdkit_sdcpp.library import VISIBLE

_CODE = (
    "import cyllama.sd.stable_diffusion as sd\n"
    "sd.ggml_backend_load_all()\n"
    "print('system:', ' '.join(sd.get_system_info().split()))\n"
)
_LIMIT_S = 60
_LINE = re.compile(r"^ggml_vulkan: (\d+) = (.+?) \([^()]*\) \| ", re.MULTILINE)

_MODELS = frozenset({"d", "gre", "max", "mobile", "pro", "super", "ti", "xl", "xt", "xtx"})
"""Words that make a name another model's: a 4080 is no 4080 SUPER."""


class BrokenRuntimeError(RuntimeError):
    """The library does not start here; says how it ended."""


def visible_gpus(*, has_vulkan: bool = True) -> tuple[str, ...]:
    """Returns the names of the GPUs, in the order of their numbers.

    Args:
        has_vulkan: False asks no driver, which might end or hang the process: there are none then.

    Raises:
        BrokenRuntimeError: The library cannot be loaded.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            env=None if has_vulkan else {**os.environ, VISIBLE: ""},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokenRuntimeError(str(error)) from error
    if done.returncode or "system:" not in done.stdout:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise BrokenRuntimeError(f"it ended with {done.returncode}: {last}")
    return names_from_log(done.stderr)


def names_from_log(text: str) -> tuple[str, ...]:
    """Returns what ggml's Vulkan backend lists while it is loaded."""
    found = {int(number): name for number, name in _LINE.findall(text)}
    return tuple(found[number] for number in sorted(found))


def index_of(device: Device, gpus: tuple[str, ...]) -> int | None:
    """Returns the number of a device among the GPUs that the library sees; None if in doubt."""
    wanted = _words(device.name)
    exact = [index for index, name in enumerate(gpus) if wanted and _words(name) == wanted]
    if exact:
        return exact[0] if len(exact) == 1 else None
    hits = [index for index, name in enumerate(gpus) if wanted and _is_alike(wanted, _words(name))]
    return hits[0] if len(hits) == 1 else None


def _is_alike(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether one name says more of a card than the other, and not that it is another model."""
    return (one <= other or other <= one) and not (one ^ other) & _MODELS


def _words(name: str) -> frozenset[str]:
    """Returns the words of a name; drivers add "(R)", "(TM)" and their own name in brackets."""
    plain = re.sub(r"\([^()]*\)", " ", name.lower())
    return frozenset(re.findall(r"[a-z0-9]+", plain)) - {"graphics"}
