"""Writes what a suite's own checkpoint holds: names, shapes and the bounds of its seeded weights.

    python tests/models/make_suite_checkpoint.py

Needs numpy alone. The names are those of `seeded_checkpoint.py`, the bounds what its values have;
`benchmark/seeded_checkpoint.py` fills the file in.
"""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

from seeded_checkpoint import sd15

OUT = Path(__file__).parents[2] / "sdkit_dispatch" / "_data" / "suites" / "sd15"
EMBEDDING = 0.02 * math.sqrt(3)
"""The bound of a uniform distribution as wide as CLIP's normal one."""


def bound_of(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) == 1:
        is_scale = "norm" in name or name.split(".")[-2] == "0"
        return float(name.endswith("weight") and is_scale)
    if "embedding" in name:
        return round(EMBEDDING, 6)
    return round(1 / math.sqrt(math.prod(shape[1:])), 6)


def main() -> None:
    rows = [[name, shape, bound_of(name, shape)] for name, shape in sd15()]
    packed = lzma.compress(json.dumps(rows).encode(), preset=9)
    (OUT / "checkpoint.json.xz").write_bytes(packed)
    print(f"{len(rows)} tensors, {len(packed)} bytes")


if __name__ == "__main__":
    main()
