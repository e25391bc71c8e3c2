"""Where the program starts: `sdkit-dispatch`, and `python -m sdkit_dispatch`.

Installers ask for `devices` and people for help far more often than for anything else, and
importing typer takes longer than answering them: both are answered before it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .version import __version__

BUG_EXIT_CODE = 70
INTERRUPTED_EXIT_CODE = 130
REPORT_TO = "https://github.com/easydiffusion/sdkit-dispatch/issues"
HELP_FILE = Path(__file__).with_name("_data") / "help.txt"
"""What `--help` prints, as typer renders it; a test keeps it true."""


def main() -> NoReturn:
    """Runs the command line; our errors end with their exit code, a bug with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a path may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:]
    if words in ([], ["-h"], ["--help"]):
        print(HELP_FILE.read_text(encoding="utf-8"), end="")
        sys.exit(0)
    if words[0] == "devices" and set(words[1:]) <= {"--json"}:
        sys.exit(guarded(lambda: _devices(as_json="--json" in words)))
    sys.exit(guarded(_everything_else))


def _devices(*, as_json: bool) -> int:
    from .show_devices import show_devices

    show_devices(as_json=as_json)
    return 0


def _everything_else() -> int:
    from .cli import app

    code = int(app(prog_name="sdkit-dispatch", standalone_mode=False) or 0)
    # typer turns Ctrl-C into this code and says nothing.
    return _cancelled() if code == INTERRUPTED_EXIT_CODE else code


def guarded(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`, and says on stderr what it raised."""
    from .errors import CancelledByUser, DispatchError

    try:
        return run()
    except DispatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, CancelledByUser):
        return _cancelled()
    except Exception as error:
        code = _usage_error(error)
        return _bug() if code is None else code


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
