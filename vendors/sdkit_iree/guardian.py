"""Runs one command and ends it as soon as this script's own input is closed.

The compiler is a process of its own, so that it can be stopped; this script is between it and the
worker, so that it is also stopped if the worker is killed. Needs nothing but the interpreter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    if os.name == "posix":
        os.killpg(child.pid, signal.SIGKILL)  # its linker too
    else:
        child.kill()


def main(command: list[str]) -> int:
    """Returns the exit code of the command; 128 and the signal if one ended it."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=os.name == "posix"
    )
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
