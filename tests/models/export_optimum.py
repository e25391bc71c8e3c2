"""Exports the tiny pipelines with optimum: `export_optimum.py BUILD`. See README.md."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tiny
from optimum.exporters.onnx import main_export

OUT = Path(__file__).parent / "pipelines"


def main(build: Path) -> None:
    for family in tiny.FAMILIES:
        out = OUT / f"{family}-optimum"
        shutil.rmtree(out, ignore_errors=True)
        main_export(str(build / family), output=out, task="text-to-image", device="cpu")
        for config in out.glob("**/*.json"):
            drop_origin(config)


def drop_origin(config: Path) -> None:
    """Drops the name of the build folder, which says where this machine had it."""
    data = json.loads(config.read_text(encoding="utf-8"))
    if data.pop("_name_or_path", None) is not None:
        config.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
