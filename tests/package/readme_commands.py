"""Runs the commands of the README's quick start, as a newcomer would: one after the other.

A script, not a test: the second command runs the tests. CI calls it in a fresh clone.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def quick_start_commands() -> list[str]:
    """Returns the install commands: the blocks of the quick start that begin a line with .venv."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Quick start")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    return [block.strip() for block in blocks if ".venv" in block]


def main() -> int:
    for command in quick_start_commands():
        print(f"$ {command}", flush=True)
        done = subprocess.run(["bash", "-c", command], cwd=ROOT)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
