"""Which GPUs the library sees, asked in a process of its own: it binds to them for good."""

from __future__ import annotations

import re
import subprocess
import sys

from sdkit_dispatch.contract import Device

_CODE = (
    "import cyllama.sd.stable_diffusion as sd\n"
    "sd.ggml_backend_load_all()\n"
    "print('system:', ' '.join(sd.get_system_info().split()))\n"
)
_LIMIT_S = 60
_LINE = re.compile(r"^ggml_vulkan: (\d+) = (.+?) \([^()]*\) \| ", re.MULTILINE)


class BrokenRuntimeError(RuntimeError):
    """The library does not start here; says how it ended."""


def visible_gpus() -> tuple[str, ...]:
    """Returns the names of the GPUs, in the order of their numbers.

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
    wanted = _letters(device.name)
    hits = [
        index
        for index, name in enumerate(gpus)
        if wanted and (wanted in _letters(name) or _letters(name) in wanted)
    ]
    return hits[0] if len(hits) == 1 else None


def _letters(name: str) -> str:
    """Returns a name without marks: drivers write "(R)" and "(TM)" as they like."""
    plain = re.sub(r"\((r|tm|c)\)|graphics", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", plain)
