"""Where the program starts: `sdkit-dispatch`, and `python -m sdkit_dispatch`.

Installers ask for `devices` and people for help far more often than for anything else, and
importing typer takes longer than answering them: both are answered before it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .version import __version__

BUG_EXIT_CODE = 70
INTERRUPTED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141
SYSTEM_EXIT_CODE = 4
REPORT_TO = "https://github.com/easydiffusion/sdkit-dispatch/issues"
HELP_FILE = Path(__file__).with_name("_data") / "help.txt"
"""What `--help` prints, as typer renders it; a test keeps it true."""


def main() -> NoReturn:
    """Runs the command line; our errors end with their exit code, a bug with a traceback."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next pipe would take its number
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
        elif hasattr(stream, "reconfigure"):  # a path may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:]
    if words in ([], ["-h"], ["--help"]):
        sys.exit(guarded(_help))
    if words[0] == "devices" and set(words[1:]) <= {"--json"}:
        sys.exit(guarded(lambda: _devices(as_json="--json" in words)))
    sys.exit(guarded(_everything_else))


def _help() -> int:
    print(HELP_FILE.read_text(encoding="utf-8"), end="")
    return 0


def _devices(*, as_json: bool) -> int:
    from .show_devices import show_devices

    show_devices(as_json=as_json)
    return 0


def _everything_else() -> int:
    from .cli import app

    try:
        code = int(app(prog_name="sdkit-dispatch", standalone_mode=False) or 0)
    except SystemExit as end:  # typer's own answer to a broken pipe, and to nothing else
        raise BrokenPipeError from end
    # typer turns Ctrl-C into this code and says nothing.
    return _cancelled() if code == INTERRUPTED_EXIT_CODE else code


def guarded(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`, and says on stderr what it raised."""
    from .errors import CancelledByUser, DispatchError

    try:
        code = run()
        sys.stdout.flush()
        return code
    except DispatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, CancelledByUser):
        return _cancelled()
    except BrokenPipeError:  # `| head`: the reader has seen enough
        _forget_output()
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        _forget_output()
        print(f"error: the operating system says: {error}", file=sys.stderr)
        return SYSTEM_EXIT_CODE
    except Exception as error:
        usage_code = _usage_error(error)
        return _bug() if usage_code is None else usage_code


def _forget_output() -> None:
    """Drops what could not be written, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cancelled() -> int:
    print("cancelled; nothing half-built is left", file=sys.stderr)
    return INTERRUPTED_EXIT_CODE


def _usage_error(error: Exception) -> int | None:
    """Shows what typer says of a wrong command line; None if `error` is something else."""
    if type(error).__name__ == "Abort":
        return _cancelled()
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if code is None:
        return None
    if show is not None:
        show()
    return int(code)


def _bug() -> int:
    import traceback

    traceback.print_exc()
    print(
        f"\nThis is a bug of sdkit-dispatch {__version__}. Please report it with the text above:\n"
        f"  {REPORT_TO}",
        file=sys.stderr,
    )
    return BUG_EXIT_CODE


if __name__ == "__main__":
    main()
