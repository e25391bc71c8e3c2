"""Where the program starts: `sdkit-dispatch`, and `python -m sdkit_dispatch`.

Installers ask for `devices` and people for help far more often than for anything else, and
importing typer takes longer than answering them: both are answered before it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
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

    end_as_on_ctrl_c()
    try:
        code = int(app(prog_name="sdkit-dispatch", standalone_mode=False) or 0)
    except SystemExit as end:  # typer's own answer to a broken pipe, and to nothing else
        raise BrokenPipeError from end
    # typer turns Ctrl-C into this code and says nothing.
    return _cancelled() if code == INTERRUPTED_EXIT_CODE else code


def end_as_on_ctrl_c() -> None:
    """Lets who stops us otherwise have what Ctrl-C has: nothing half-built, nothing lost."""
    import signal

    # `kill` and `timeout`; a closed terminal, unless it is to be survived (nohup); Ctrl-Break.
    names = ("SIGTERM", "SIGHUP", "SIGBREAK")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> NoReturn:
        for one in ours:  # a terminal says it twice, in the middle of what we tidy up
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)


def guarded(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`, and says on stderr what it raised."""
    from .errors import CancelledByUser, DispatchError

    try:
        code = run()
        sys.stdout.flush()
        return code
    except DispatchError as error:
        _say(f"error: {error}")
        return _told(type(error).__name__, error.message, error.exit_code, hint=error.hint)
    except (KeyboardInterrupt, CancelledByUser):
        return _cancelled()
    except BrokenPipeError:  # `| head`: the reader has seen enough
        _forget_output()
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        _say(f"error: the operating system says: {error}")
        code = _told("OSError", f"the operating system says: {error}", SYSTEM_EXIT_CODE)
        _forget_output()
        return code
    except Exception as error:
        usage_code = _usage_error(error)
        return _bug(error) if usage_code is None else usage_code


def _told(kind: str, message: str, exit_code: int, *, hint: str = "") -> int:
    """Says a failure on stdout too, where a program reads JSON there; returns the exit code."""
    words = sys.argv[1:]
    if "--json" in words[: words.index("--") if "--" in words else None]:
        import json

        from .show_devices import SCHEMA_VERSION

        error = {"kind": kind, "message": message, "hint": hint, "exit_code": exit_code}
        try:
            print(json.dumps({"schema_version": SCHEMA_VERSION, "error": error}, indent=2))
            sys.stdout.flush()
        except OSError:  # nobody reads it
            _forget_output()
    return exit_code


def _forget_output() -> None:
    """Drops what could not be written, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(words: str) -> None:
    with suppress(OSError):  # the terminal is gone
        print(words, file=sys.stderr)


def _cancelled() -> int:
    words = "cancelled; nothing half-built is left"
    _say(words)
    return _told("Cancelled", words, INTERRUPTED_EXIT_CODE)


def _usage_error(error: Exception) -> int | None:
    """Shows what typer says of a wrong command line; None if `error` is something else."""
    if type(error).__name__ == "Abort":
        return _cancelled()
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if code is None:
        return None
    if show is None:  # `typer.Exit`: the command has said everything
        return int(code)
    show()
    words = getattr(error, "format_message", lambda: str(error))()
    return _told("UsageError", words, int(code))


def _bug(error: Exception) -> int:
    import traceback

    _say(
        f"{traceback.format_exc()}\n"
        f"This is a bug of sdkit-dispatch {__version__}. Please report it with the text above:\n"
        f"  {REPORT_TO}"
    )
    return _told("Bug", f"{type(error).__name__}: {error}", BUG_EXIT_CODE, hint=REPORT_TO)


if __name__ == "__main__":
    main()
