"""Our ggml beside ONNX Runtime and stable-diffusion.cpp, at full size, in one interleaved run.

    python tests/benchmarks/ggml_speed.py --onnx FOLDER --checkpoint sd15.safetensors \
        [--peer cyllama=VENV] [--peer stable-diffusion-cpp-python=VENV] [--rounds 5] [--threads 2]

FOLDER is what `tests/vendors/make_full_size_sd15.py` writes, the checkpoint what
`tests/models/seeded_checkpoint.py` writes: the same network with other random weights. A peer is a
binding of stable-diffusion.cpp in an environment of its own; without `--peer`, cyllama is installed
into a temporary one. Each binding runs with flash attention, with and without direct convolution,
and the better of the two counts, for each model by itself.

Every measurement is a process of its own (one engine in memory at a time) and they take turns, so
that a machine that gets busier is busier for all. What counts is CPU seconds of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS, REFERENCE = "ggml", "onnxruntime"
BINDINGS = ("cyllama", "stable-diffusion-cpp-python")
MODELS = {"unet": "UNet step, 512x512, batch 1", "vae_decoder": "VAE decoding, 512x512"}
BARS = {("unet", "sd.cpp"): 0.6, ("unet", REFERENCE): 1.3, ("vae_decoder", "sd.cpp"): 0.55}
"""(model, beside whom) -> the most that our share of their CPU seconds may be."""
BUFFER_MIB = 1024
"""What our VAE decoder may take to compute in."""
WAITING = {"OMP_WAIT_POLICY": "passive"}
"""For OpenMP, which the bindings bring: threads that wait do not burn the CPU seconds counted."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One row of the table: an engine with its settings, and the Python that has it."""

    name: str
    engine: str
    python: str
    params: Mapping[str, Any]  # Any: JSON data, of `full_size_run`


@dataclass(frozen=True, kw_only=True)
class Row:
    """CPU seconds of one entrant for one model."""

    name: str
    cpu_s: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.cpu_s) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.cpu_s, n=4, method="inclusive")
        return low, high


def measured(engine: str, python: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one measurement in a process of its own."""
    done = subprocess.run(
        [python, str(HERE / "full_size_run.py"), engine, json.dumps(params)],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **WAITING},
    )
    if done.returncode:
        raise SystemExit(f"{engine} in {python} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def python_in(folder: Path) -> str:
    return str(folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))


def installed_peer(folder: Path, package: str) -> str:
    """Makes an environment with a peer; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = python_in(folder)
    subprocess.run([python, "-m", "pip", "install", "-q", "numpy", package], check=True)
    return python


def entrants(
    peers: Mapping[str, str], *, onnx: str, engines: str, checkpoint: str, threads: int
) -> list[Entrant]:
    ours = {"onnx": onnx, "threads": threads}
    found = [
        Entrant(name=OURS, engine=OURS, python=sys.executable, params={**ours, "engines": engines}),
        Entrant(name=REFERENCE, engine=REFERENCE, python=sys.executable, params=ours),
    ]
    for binding, python in peers.items():
        for is_direct in (False, True):
            found.append(
                Entrant(
                    name=f"{binding}, flash{' + direct' if is_direct else ''}",
                    engine=binding,
                    python=python,
                    params={"checkpoint": checkpoint, "threads": threads, "direct": is_direct},
                )
            )
    return found


def rows_of(model: str, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    return [
        Row(name=name, cpu_s=tuple(one[model] for one in told)) for name, told in answers.items()
    ]


def verdicts(model: str, rows: Sequence[Row], buffer_mib: float) -> list[tuple[str, bool]]:
    """Returns each pass bar of a model in words, and whether we are within it."""
    by_name = {row.name: row for row in rows}
    ours = by_name[OURS].median
    peers = [row for row in rows if row.name not in (OURS, REFERENCE)]
    told = []
    for (of, beside), bar in BARS.items():
        if of != model or (beside == "sd.cpp" and not peers):
            continue
        other = (
            by_name[REFERENCE] if beside == REFERENCE else min(peers, key=lambda row: row.median)
        )
        ratio = ours / other.median
        told.append((f"{ratio:.2f} x {other.name}, at most {bar}", ratio <= bar))
    if model == "vae_decoder":
        text = f"{buffer_mib:.0f} MiB to compute in, less than {BUFFER_MIB}"
        told.append((text, buffer_mib < BUFFER_MIB))
    return told


def show(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Prints both tables and the pass bars; True if all are met."""
    is_met = True
    for model, words in MODELS.items():
        rows = rows_of(model, answers)
        ours = rows[0].median
        buffers = {
            name: told[-1].get("buffer_mib", {}).get(model) for name, told in answers.items()
        }
        print(f"\n{words}: CPU seconds, median of {len(rows[0].cpu_s)}, quartiles")
        for row in rows:
            low, high = row.quartiles
            buffer = buffers[row.name]
            memory = "" if buffer is None else f"{buffer:8.0f} MiB to compute in"
            print(
                f"  {row.name:<44}{row.median:>8.1f}{low:>8.1f} ..{high:>7.1f}"
                f"   ours/this {ours / row.median:5.2f}  {memory}"
            )
        for text, is_within in verdicts(model, rows, buffers[OURS] or 0.0):
            print(f"  {'met   ' if is_within else 'MISSED'} {text}")
            is_met = is_met and is_within
    return is_met


def peer_argument(text: str) -> tuple[str, str]:
    binding, _, folder = text.partition("=")
    if binding not in BINDINGS or not folder:
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(BINDINGS)} = folder")
    return binding, python_in(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--onnx", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--peer", type=peer_argument, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="Also write every measurement there.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        peers = dict(asked.peer) or {"cyllama": installed_peer(place / "peer", "cyllama")}
        onnx, engines = str(asked.onnx.resolve()), str(place / "engines")
        compiling = {"onnx": onnx, "engines": engines, "threads": asked.threads}
        print("compiling:", measured("compile-ggml", sys.executable, compiling), flush=True)
        field = entrants(
            peers,
            onnx=onnx,
            engines=engines,
            checkpoint=str(asked.checkpoint.resolve()),
            threads=asked.threads,
        )
        answers: dict[str, list[dict[str, Any]]] = {one.name: [] for one in field}
        for index in range(asked.rounds):
            for one in field:
                answer = measured(one.engine, one.python, one.params)
                answers[one.name].append(answer)
                print(f"round {index + 1}, {one.name}: {json.dumps(answer)}", flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"\n{asked.threads} threads, fp32, load average at the end {load:.1f}")
    for name, told in answers.items():
        print(f"  {name}: {told[-1]['what']}")
    sys.exit(0 if show(answers) else 1)


if __name__ == "__main__":
    main()
