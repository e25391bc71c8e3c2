"""How long `devices` and `--help` take as whole processes, beside a bare Python and torchruntime.

    python tests/benchmarks/startup.py [--rounds 15] [--without-torchruntime]

torchruntime gets an environment of its own, which needs a package index. The commands take turns
(A B C D, A B C D, ...), so that a machine that gets slower is slower for all.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = "python -c 'import json, subprocess'"
LIMIT_MS = 150
"""What `devices` and `--help` may take over a bare Python."""


def torchruntime_command(folder: Path) -> list[str] | None:
    """Makes an environment with torchruntime; None where no index can be reached."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    install = [str(python), "-m", "pip", "install", "-q", "torchruntime"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        print(f"torchruntime cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        return None
    return [str(python), "-m", "torchruntime", "info"]


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Returns wall milliseconds of each command, one for each round, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for index in range(rounds + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if index:
                times[name].append((time.perf_counter() - started) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-torchruntime", action="store_true")
    options = parser.parse_args()
    ours = [sys.executable, "-m", "sdkit_dispatch"]
    commands = {
        BARE: [sys.executable, "-c", "import json, subprocess"],
        "sdkit-dispatch devices": [*ours, "devices"],
        "sdkit-dispatch --help": [*ours, "--help"],
    }
    with tempfile.TemporaryDirectory() as folder:
        if not options.without_torchruntime:
            command = torchruntime_command(Path(folder))
            if command:
                commands["torchruntime info"] = command
        times = measure(commands, options.rounds)
    bare = times[BARE]
    print(f"medians of {options.rounds} rounds, interleaved")
    print(f"{'command':<40}{'wall':>10}{'over bare':>12}{'to torchruntime':>18}")
    peer = times.get("torchruntime info")
    for name, values in times.items():
        over = statistics.median(one - other for one, other in zip(values, bare, strict=True))
        ratio = ""
        if peer:
            ratio = f"{statistics.median(a / b for a, b in zip(values, peer, strict=True)):.2f}"
        print(f"{name:<40}{statistics.median(values):>7.0f} ms{over:>9.0f} ms{ratio:>18}")
    print(f"limit for ours: {LIMIT_MS} ms over bare")


if __name__ == "__main__":
    main()
