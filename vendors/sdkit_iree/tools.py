"""IREE's importer and compiler as processes: started, watched, stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

POLL_S = 0.2
"""How soon a cancellation stops the compiler."""
_GUARDIAN = Path(__file__).with_name("guardian.py")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A tool that has run: its exit code, and what it wrote to its streams."""

    code: int
    words: str


def run_tool(command: Sequence[str], workshop: Path, *, on_poll: Callable[[], None]) -> Finished:
    """Runs a command in the folder `workshop`, where its temporary files go too.

    Args:
        command: The program and its arguments.
        workshop: A folder of ours.
        on_poll: Called every `POLL_S`; if it raises, the command is ended first.
    """
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(workshop))
    log = workshop / "words.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*_python(), str(_GUARDIAN), *command],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            cwd=workshop,
            env={**os.environ, **temporary},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        assert process.stdin is not None  # a pipe was asked for
        try:
            code = _wait(process, on_poll)
        finally:
            process.stdin.close()
            process.wait()
    return Finished(code=code, words=log.read_text(encoding="utf-8", errors="replace"))


def importer() -> tuple[str, ...]:
    """Returns how the ONNX importer is started."""
    return (*_python(), "-m", "iree.compiler.tools.import_onnx")


def compiler() -> tuple[str, ...]:
    """Returns how the compiler is started.

    Raises:
        FileNotFoundError: The package does not have it where it should be.
    """
    name = "iree-compile.exe" if sys.platform == "win32" else "iree-compile"
    # The command in the environment's folder of scripts starts a Python for it.
    found = distribution("iree-base-compiler").locate_file(f"iree/compiler/_mlir_libs/{name}")
    if not Path(str(found)).is_file():
        raise FileNotFoundError(f"there is no {found}")
    return (str(found),)


def _wait(process: subprocess.Popen[bytes], on_poll: Callable[[], None]) -> int:
    while True:
        on_poll()
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue


def _python() -> tuple[str, ...]:
    return (sys.executable, "-I" if sys.flags.isolated else "-P")
