"""The same with a real vendor: builds of the sample on the command line, killed and repaired."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fault_lab import flip_or_cut

from sdkit_dispatch.cache import EngineStore

VENDOR = "cpu"


def kill_real_builds(home: Path, figures: Any, *, count: int, chance: random.Random) -> Any:
    """Kills whole process groups at random times; the last build must be right."""
    if importlib.util.find_spec("onnxruntime") is None:
        figures.counts["skipped: onnxruntime is not installed"] += 1
        return figures
    if not count:
        return figures
    keys = _keys(_build(home).communicate()[0])
    picture = _draw(home)
    store = EngineStore(home)
    for key in keys.values():
        store.remove(key)
    started_s = time.monotonic()
    _build(home).communicate()  # without making the reference, as those below
    lasts_s = time.monotonic() - started_s
    for number in range(count):
        for key in keys.values():
            if number % 2:
                store.remove(key)
            elif (folder := store.folder(key)).exists():
                flip_or_cut(chance.choice(sorted(folder.iterdir())), chance, keeps_times=True)
        process = _build(home)
        try:
            process.wait(timeout=chance.uniform(0.1, 1.0) * lasts_s)
            figures.counts["ended before the kill"] += 1
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            figures.counts["killed"] += 1
        process.communicate()
        stored = [entry.key for entry in store.entries() if not store.verify(entry)]
        figures.counts["whole engines afterwards"] += len(stored)
    last = _build(home).communicate()[0]
    figures.check(_keys(last) == keys, f"the last build said {last}")
    store.sweep()
    figures.check(not list((home / "tmp").iterdir()), "leftovers after a sweep")
    figures.check(_draw(home) == picture, "the picture is another one")
    figures.counts["same picture as before, bit for bit"] += 1
    return figures


def _build(home: Path) -> subprocess.Popen[str]:
    return _run(home, "build", "sample", "--vendor", VENDOR, "--json")


def _draw(home: Path) -> bytes:
    out = home / "picture.png"
    process = _run(
        home, "generate", "a red seven", "--vendor", VENDOR, "--seed", "1", "-o", str(out)
    )
    process.communicate()
    from PIL import Image

    with Image.open(out) as picture:
        return picture.tobytes()


def _run(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sdkit_dispatch", "--home", str(home), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _keys(document: str) -> dict[str, str]:
    parts = json.loads(document)["build"]["components"]
    return {part["component"]: part["key"] for part in parts}
