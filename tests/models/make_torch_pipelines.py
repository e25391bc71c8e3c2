"""Writes the tiny pipelines as PyTorch folders: `make_torch_pipelines.py BUILD`. See README.md."""

from __future__ import annotations

import sys
from pathlib import Path

import tiny


def main(build: Path) -> None:
    for family in tiny.FAMILIES:
        folder = build / family
        folder.mkdir(parents=True, exist_ok=True)
        {"sd15": tiny.make_sd15, "sdxl": tiny.make_sdxl}[family](folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
