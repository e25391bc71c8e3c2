"""The installer at hand, uv or pip, and how it is run: a clean environment, progress, cancel."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from sdkit_dispatch.contract import Progress, Report
from sdkit_dispatch.errors import VendorEnvError

ToolChoice = Literal["auto", "uv", "pip"]

OLDEST_UV = (0, 7)
"""The first minor version whose `pip compile` writes pylock.toml, which has the sizes."""
OLDEST_PIP = (23, 3)
"""The first pip whose `--dry-run` reads metadata only instead of downloading every wheel."""
POLL_S = 0.25
LOG_LINES = 25
JOIN_S = 10.0
"""For the last lines of a process that has ended; a process that it left behind may hold them."""

# What a user needs to reach an index: mirrors, credentials, certificates, caches. Everything else
# of PIP_* and UV_* changes what is installed where (PIP_TARGET, UV_PRERELEASE, UV_SYSTEM_PYTHON).
_KEPT = re.compile(
    r"PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|TRUSTED_HOST|CERT|CLIENT_CERT|PROXY"
    r"|CONFIG_FILE|CACHE_DIR|NO_CACHE_DIR|DEFAULT_TIMEOUT|TIMEOUT|RETRIES|RESUME_RETRIES"
    r"|KEYRING_PROVIDER)"
    r"|UV_(INDEX(_.*)?|DEFAULT_INDEX|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|KEYRING_PROVIDER"
    r"|NATIVE_TLS|SYSTEM_CERTS|INSECURE_HOST|OFFLINE|CACHE_DIR|NO_CACHE|CONFIG_FILE|CREDENTIALS_DIR"
    r"|HTTP_TIMEOUT|HTTP_CONNECT_TIMEOUT|HTTP_RETRIES|REQUEST_TIMEOUT)"
)
_REMOVED = re.compile(
    r"PIP_.*|UV_.*|PYTHON.*|__PYVENV_LAUNCHER__|VIRTUAL_ENV.*|CONDA_.*|TMPDIR|TEMP|TMP"
)
_INDEX = re.compile(r"(PIP|UV)_(INDEX(_URL)?|DEFAULT_INDEX|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX)")
_PIP_INDEX = re.compile(
    r"^(global|install)\.(index-url|extra-index-url|find-links|no-index)=", re.MULTILINE
)
_DISK_FULL = re.compile(
    r"no space left|not enough space|disk quota exceeded|errno 28|errno 122|os error (28|112|122)",
    re.IGNORECASE,
)
"""In the words of the C library, of Windows, of Python and of Rust."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """An installer.

    Attributes:
        command: How it is started.
        wheel: A pip wheel that runs without being installed: it is started with the Python of the
            environment that it serves.
    """

    name: Literal["uv", "pip"]
    command: tuple[str, ...]
    version: tuple[int, ...] = ()
    wheel: Path | None = None

    def pip_command(self, python: Path) -> tuple[str, ...]:
        """Returns how pip is started to serve that Python."""
        if self.wheel is not None:
            return (str(python), "-I", str(self.wheel / "pip"))
        return (*self.command, "--python", str(python))


class DiskFullError(VendorEnvError):
    """An installer met a full disk; its caller knows the sizes and says them."""


def find_tool(choice: ToolChoice = "auto", *, is_offline: bool = False) -> Tool:
    """Returns uv where there is one, else pip, else the pip that Python carries for ensurepip.

    uv does not read pip's settings: where only pip was told of an index, pip is used.

    Args:
        choice: "auto", or the one to use.
        is_offline: No index will be asked, so it does not matter who knows one.

    Raises:
        VendorEnvError: There is none.
    """
    uv = _find_uv() if choice in ("auto", "uv") else None
    if uv and is_offline:
        return uv
    pip = _find_pip() if choice in ("auto", "pip") else None
    if uv and pip and _is_index_set_for_pip_only(pip):
        return pip
    tool = uv or pip
    if tool is None:
        wanted = {"auto": "neither uv nor pip", "uv": "no uv", "pip": "no pip"}[choice]
        oldest = f" (uv {'.'.join(map(str, OLDEST_UV))} or newer)" if choice != "pip" else ""
        raise VendorEnvError(
            f"{wanted} is here to make an environment with{oldest}; Python is {sys.executable}",
            f'"{sys.executable}" -m ensurepip  (or install uv)',
        )
    return tool


def clean_environment(
    temporary: Path, *, cache: Path | None = None, is_offline: bool = False
) -> dict[str, str]:
    """Returns the variables for an installer: those of the caller that do not change the result.

    Args:
        temporary: Where it puts temporary files: beside the environment, because /tmp is often
            small and in memory.
        cache: Its download cache, if not the user's own.
        is_offline: It is given all packages: what the user set for pip does not matter.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if _KEPT.fullmatch(name.upper()) or not _REMOVED.fullmatch(name.upper())
    }
    variables |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    variables |= {
        "NO_COLOR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_USER": "0",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    if is_offline:
        variables = {name: text for name, text in variables.items() if not _INDEX.fullmatch(name)}
        variables["PIP_CONFIG_FILE"] = os.devnull
    if cache is not None:
        variables |= {"PIP_CACHE_DIR": str(cache), "UV_CACHE_DIR": str(cache)}
    return variables


def cache_folder(tool: Tool, environment: Mapping[str, str]) -> Path | None:
    """Returns where an installer keeps what it downloads; None if it does not say."""
    arguments = ("cache", "dir")
    command = tool.command if tool.wheel is None else tool.pip_command(Path(sys.executable))
    answer = _answer((*command, *arguments), environment)
    return Path(answer.splitlines()[-1]) if answer else None


def run_tool(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    report: Report,
    progress: Callable[[str], Progress],
) -> None:
    """Runs an installer to its end.

    Args:
        command: Program and arguments.
        environment: Its variables.
        folder: It works there.
        report: Called for every line and between them; what it raises ends the installer.
        progress: A line of the installer, or "" while there is none -> what to report.

    Raises:
        DiskFullError: It met a full disk.
        VendorEnvError: It failed; with its last lines.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is ours to handle, for it and for all its children
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        raise VendorEnvError(f"{command[0]} cannot be started: {error}") from error
    tail: deque[str] = deque(maxlen=LOG_LINES)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        line: str | None = ""
        while line is not None:
            report(progress(line))
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                line = ""
            if line:
                log.debug("%s", line)
                tail.append(line)
        process.wait()
    except BaseException:
        _kill(process)
        raise
    finally:
        reader.join(JOIN_S)
    if process.returncode:
        text = "\n".join(tail)
        if _DISK_FULL.search(text):
            raise DiskFullError(text)
        raise VendorEnvError(
            f"{Path(command[0]).name} ended with code {process.returncode}:\n{text}",
            "check the connection, proxy and index settings, then run it again: "
            "what was downloaded is kept",
        )


def newer_pip(tool: Tool, folder: Path, *, environment: Mapping[str, str], report: Report) -> Tool:
    """Returns a pip that can say sizes before it downloads: this one, or a fetched wheel of one.

    Raises:
        VendorEnvError: It could not be fetched.
    """
    if tool.name != "pip" or tool.version >= OLDEST_PIP:
        return tool
    wanted = f"pip>={'.'.join(map(str, OLDEST_PIP))}"
    options = ("--no-deps", "--only-binary", ":all:", "--progress-bar", "off")
    run_tool(
        (*tool.pip_command(Path(sys.executable)), "download", *options, "-d", str(folder), wanted),
        environment=environment,
        folder=folder,
        report=report,
        progress=lambda _: Progress(phase="fetch a newer pip"),
    )
    wheels = sorted(folder.glob("pip-*.whl"))
    return _pip_from_wheel(wheels[-1]) if wheels else tool


def _find_uv() -> Tool | None:
    name = "uv.exe" if sys.platform == "win32" else "uv"
    beside = Path(sys.executable).parent / name
    for path in (shutil.which("uv"), str(beside) if beside.is_file() else None, _uv_of_module()):
        if path:
            version = _version(_answer((path, "--version"), os.environ))
            if version >= OLDEST_UV:
                return Tool(name="uv", command=(path,), version=version)
    return None


def _uv_of_module() -> str | None:
    if importlib.util.find_spec("uv") is None:
        return None
    answer = _answer((sys.executable, "-c", "import uv; print(uv.find_uv_bin())"), os.environ)
    return answer.strip() or None


def _find_pip() -> Tool | None:
    command = (sys.executable, "-I", "-m", "pip")
    version = _version(_answer((*command, "--version"), os.environ))
    if version:
        return Tool(name="pip", command=command, version=version)
    # Python carries a wheel of pip for ensurepip; Linux distributions keep it elsewhere.
    import sysconfig

    folders = [Path(sysconfig.get_path("stdlib")) / "ensurepip" / "_bundled"]
    folders += [Path(sysconfig.get_config_var("WHEEL_PKG_DIR") or "/usr/share/python-wheels")]
    found = [_pip_from_wheel(wheel) for folder in folders for wheel in folder.glob("pip-*.whl")]
    return max(found, key=lambda tool: tool.version, default=None)


def _pip_from_wheel(wheel: Path) -> Tool:
    return Tool(
        name="pip",
        command=(sys.executable, "-I", str(wheel / "pip")),
        version=_version(wheel.name),
        wheel=wheel,
    )


def _is_index_set_for_pip_only(pip: Tool) -> bool:
    names = [match[1] for name in os.environ if (match := _INDEX.fullmatch(name.upper()))]
    if "UV" in names or any(_mentions_index(file) for file in _uv_settings()):
        return False
    if "PIP" in names:
        return True
    settings = _answer((*pip.command, "config", "list"), os.environ)
    return _PIP_INDEX.search(settings) is not None


def _uv_settings() -> list[Path]:
    import platformdirs

    given = os.environ.get("UV_CONFIG_FILE")
    home = Path.home() / ".config" / "uv" / "uv.toml"
    windows = platformdirs.user_config_path("uv", appauthor=False, roaming=True) / "uv.toml"
    return [Path(given)] if given else [home, windows, Path("/etc/uv/uv.toml")]


def _mentions_index(file: Path) -> bool:
    try:
        return re.search(r"index|find-links", file.read_text("utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _answer(command: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else ()


def _read_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line.rstrip())
    lines.put(None)


def _kill(process: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        subprocess.run(
            ("taskkill", "/T", "/F", "/PID", str(process.pid)), capture_output=True, check=False
        )
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
