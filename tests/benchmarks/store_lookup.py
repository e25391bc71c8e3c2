"""How long a look-up takes in a store of 10,000 engines, beside one of 10, and one for siblings.

    python tests/benchmarks/store_lookup.py [--rounds 300] [--entries 10000]

The two stores take turns (A B A B ...), for hits, misses and siblings of a miss, so that a machine
that gets slower is slower for both. The ratio is the median of the rounds' own ratios, in CPU
seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from sdkit_dispatch.cache import MANIFEST, EngineStore
from sdkit_dispatch.contract import BuildRequest
from sdkit_dispatch.siblings import siblings_of
from sdkit_dispatch.store_layout import prepare
from sdkit_dispatch.store_manifest import StoredFile, Verdict, new_manifest, write_manifest

LIMIT = 2.0
"""What a look-up in the large store may cost, over one in the small store."""
CONTENT = bytes(4096)
REQUEST = BuildRequest(
    vendor="null",
    revision=1,
    runtime="null 1",
    target="",
    component="unet",
    graph_digest="a" * 64,
    weights_digest="",
    precision="fp32",
    shapes={"sample": (2, 4, 64, 64), "timestep": (), "encoder_hidden_states": (2, 77, 768)},
)


def request(number: int) -> BuildRequest:
    """Returns a request like no other."""
    return replace(REQUEST, graph_digest=hashlib.sha256(str(number).encode()).hexdigest())


def fill(store: EngineStore, count: int) -> None:
    """Writes engines straight into a store: `publish` forces each to the disk."""
    prepare(store.home)
    stored = StoredFile(size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    for number in range(count):
        one = request(number)
        folder = store.folder(one.key)
        folder.mkdir(parents=True)
        (folder / "engine.bin").write_bytes(CONTENT)
        verdict = Verdict(status="passed")
        manifest = new_manifest(one, {"engine.bin": stored}, verdict=verdict, started_s=0.0)
        write_manifest(folder / MANIFEST, manifest)


def siblings_s(store: EngineStore, number: int) -> float:
    """Returns the CPU seconds of one look for engines that a new one may build upon."""
    wanted = replace(request(number), shapes={**REQUEST.shapes, "sample": (2, 4, 96, 64)})
    started_s = time.process_time()
    found = siblings_of(store, wanted, onnx=Path("model.onnx"))
    store.let_go()
    elapsed_s = time.process_time() - started_s
    assert len(found) == 1
    return elapsed_s


def look_up_s(store: EngineStore, number: int, *, is_hit: bool) -> float:
    """Returns the CPU seconds of one look-up."""
    wanted = request(number)
    started_s = time.process_time()
    found = store.look_up(wanted, onnx=Path("model.onnx"))
    store.let_go()
    elapsed_s = time.process_time() - started_s
    assert (found is not None) == is_hit
    return elapsed_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--entries", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = EngineStore(Path(folder, "small")), EngineStore(Path(folder, "large"))
        fill(small, 10)
        fill(large, options.entries)
        worst = 0.0
        measured = {
            "hit": lambda store, turn: look_up_s(store, turn, is_hit=True),
            "miss": lambda store, turn: look_up_s(store, -1 - turn, is_hit=False),
            "sibling": siblings_s,
        }
        for kind, measure in measured.items():
            times: list[tuple[float, float]] = []
            for turn in range(options.rounds + 10):
                pair = (measure(small, turn * 37 % 10), measure(large, turn * 37 % options.entries))
                if turn >= 10:  # the first ones warm up
                    times.append(pair)
            ratio = statistics.median(b / a for a, b in times)
            worst = max(worst, ratio)
            few, many = (statistics.median(side) * 1e6 for side in zip(*times, strict=True))
            print(
                f"{kind:<7} 10 engines {few:8.0f} us   {options.entries} engines {many:8.0f} us   "
                f"ratio {ratio:.2f}"
            )
    print(f"limit {LIMIT:g}: {'kept' if worst <= LIMIT else 'broken'}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
