"""Kills builds, damages engines, races builders and fills disks; counts what went wrong.

    python tests/faults/run.py --quick|--full [--seed N]

Prints its figures and exits with 1 if any fault was found. It needs Linux: processes are forked,
and their workers are found in /proc. Windows is out of its scope. Disks are filled on a tmpfs,
which takes root to mount; without, that part is skipped, and says so.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # a process that has threads cannot be forked
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "core")]

from fault_kinds import Figures, Size, damages, full_disks, kills, races, real_vendor  # noqa: E402
from fault_lab import make_lab  # noqa: E402

SIZES = {
    "quick": Size(kills=12, damages=60, rebuilds=1, races=1, racers=4, disks=3, real_kills=0),
    "full": Size(kills=300, damages=500, rebuilds=10, races=9, racers=16, disks=50, real_kills=12),
}
PARTS = (kills, damages, races, full_disks, real_vendor)
LANES = 4
"""Processes at a time: most of the time goes into waiting for workers to start."""


def run(size: Size, *, seed: int) -> list[Figures]:
    """Runs every part in a folder of its own; prints and returns the figures."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        lab = make_lab(Path(folder))
        shares = [size.kills // LANES + (lane < size.kills % LANES) for lane in range(LANES)]
        jobs = [partial(kills, lab, replace(size, kills=share)) for share in shares]
        jobs += [partial(part, lab, size) for part in PARTS[1:]]
        found: dict[str, Figures] = {}
        for figures in _in_lanes(jobs, Path(folder), seed):
            found.setdefault(figures.name, Figures(name=figures.name)).add(figures)
    for figures in found.values():
        print(figures, flush=True)
    return list(found.values())


def _in_lanes(
    jobs: Sequence[Callable[[int], Figures]], folder: Path, seed: int
) -> Iterator[Figures]:
    """Runs each job in a process of its own, a few at a time."""
    waiting, running = list(enumerate(jobs)), {}
    while waiting or running:
        while waiting and len(running) < LANES:
            number, job = waiting.pop(0)
            answer = folder / f"answer {number}"
            pid = os.fork()
            if pid == 0:
                try:
                    figures = job(seed + number)
                except BaseException:
                    figures = Figures(name="the run itself", faults=[traceback.format_exc()])
                answer.write_bytes(pickle.dumps(figures))
                os._exit(0)
            running[pid] = answer
        pid, _ = os.wait()
        yield pickle.loads(running.pop(pid).read_bytes())  # our own, just written


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--quick", dest="size", action="store_const", const="quick")
    which.add_argument("--full", dest="size", action="store_const", const="full")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    arguments = parser.parse_args()
    if sys.platform != "linux":
        print("this run needs Linux")
        return 2
    print(f"{arguments.size} run, seed {arguments.seed}", flush=True)
    started_s = time.monotonic()
    found = run(SIZES[arguments.size], seed=arguments.seed)
    faults = sum(len(figures.faults) for figures in found)
    print(f"{faults} faults in {time.monotonic() - started_s:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
