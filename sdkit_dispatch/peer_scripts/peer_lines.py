"""What all peers share: JSON lines in, JSON lines out, and the clock.

This folder is no package and imports nothing of ours: its scripts run in other environments.
"""

import json
import os
import sys
import time
import traceback
from typing import Any

WORDS = 600
"""Characters of an error that go into a report."""


def serve(peer_class: Any) -> None:
    """Answers commands until the caller goes away."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print what they like
    job = json.loads(sys.stdin.readline())
    peer = None
    feeds: dict[str, Any] = {}  # Any: dicts of numpy arrays
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if peer is None:
                peer = peer_class(job)
            answer = _answer(peer, job, command, feeds)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": _words(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(peer: Any, job: Any, command: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    # Any: the class of a script; JSON data
    import numpy as np

    what = command["do"]
    if what == "prepare":
        return dict(peer.prepare())
    if what == "open":
        return {"ran": peer.open(command["use"])}
    if what == "compute":
        with np.load(command["feeds"], allow_pickle=False) as arrays:
            outputs = peer.compute(command["component"], dict(arrays))
        np.savez(command["outputs"], **outputs)
        return {}
    if what == "run":
        component = command["component"]
        if hasattr(peer, "timed"):
            walls, cpus = peer.timed(component, command["runs"])
            return {"wall_s": walls, "cpu_s": cpus}
        if component not in feeds:
            with np.load(job["components"][component]["feeds"], allow_pickle=False) as arrays:
                feeds[component] = dict(arrays)
        walls, cpus = [], []
        for _ in range(command["runs"]):
            started = time.perf_counter(), time.process_time()
            peer.compute(component, feeds[component])
            walls.append(time.perf_counter() - started[0])
            cpus.append(time.process_time() - started[1])
        return {"wall_s": walls, "cpu_s": cpus}
    if what == "image":
        started = time.perf_counter(), time.process_time()
        pixels = peer.image()
        wall_s, cpu_s = time.perf_counter() - started[0], time.process_time() - started[1]
        path = None
        if pixels is not None:
            path = os.path.join(job["work"], "image.npy")
            np.save(path, pixels)
        return {"wall_s": wall_s, "cpu_s": cpu_s, "pixels": path}
    raise ValueError(f"{what!r} is no command")


def _words(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= WORDS else text[:WORDS] + " ..."


def threads_of(job: Any, default: int | None = None) -> int:  # Any: JSON data
    """Returns how many threads to use; all processors where the job leaves it open."""
    return int(job["threads"] or default or os.cpu_count() or 1)
