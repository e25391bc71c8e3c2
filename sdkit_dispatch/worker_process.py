"""The process of a worker, from the caller's side: start it, ask it, cancel it, outlive it."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from .contract import (
    Arrays,
    Progress,
    Report,
    VendorSpec,
    no_report,
    record_from_json,
)
from .errors import ERROR_KINDS, CancelledByUser, DispatchError, WorkerError
from .lifeline import Lifeline
from .wire import Frame, read_frame, write_frame

CANCEL_GRACE_S = 3.0
"""How long a cancelled worker may take to answer before it is killed."""
LOG_LINES = 16
"""Lines of a worker's log that are kept for an error message."""
FRAMES = ("  File ", "Stack (most recent", "Current thread", "Thread 0x", "Extension modules:")
"""Where Python was when a library ended the process: no use to a user, unlike the words before."""
OUTSIDE_SIGNALS = frozenset(
    getattr(signal, name, None) for name in ("SIGKILL", "SIGTERM", "SIGHUP")
)
"""What no library sends to its own process."""
POLL_S = 0.25
"""Ctrl-C is noticed between polls where waiting cannot be interrupted (Windows)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How workers run here; nothing in it changes an engine's key.

    Attributes:
        threads: CPU threads of a session; None for the runtime's own choice.
        scratch: Folder of caches that may be lost; a vendor that keeps some has its own in it.
        timeouts_s: Method name -> seconds that one request may take in all.
        silence_s: Seconds without any frame, heartbeats included, after which a worker is hung.
            Long, because a library that computes with the interpreter lock held is silent.
        variables: Environment variables, beside the caller's.
    """

    threads: int | None = None
    scratch: Path | None = None
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    silence_s: float = 900.0
    variables: Mapping[str, str] = field(default_factory=dict)


DEFAULT_TIMEOUTS_S: Mapping[str, float] = {
    "configure": 60,
    "probe": 120,
    "plan": 120,
    "can_emit": 120,
    "emit": 900,
    "compile": 3600,  # 35 minutes have been reported for MIGraphX (AMDMIGraphX#4164)
    "load": 900,
    "run": 900,
    "time": 3600,
    "close": 60,
    "generate": 7200,
    "record": 7200,
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A worker's reply: JSON data (`Any`) and tensors."""

    result: Mapping[str, Any]
    arrays: Arrays


class WorkerProcess:
    """A running worker of one vendor. Use it from one thread at a time, and close it."""

    def __init__(
        self,
        spec: VendorSpec,
        *,
        python: Path | None = None,
        is_isolated: bool = False,
        settings: WorkerSettings | None = None,
    ) -> None:
        """Starts the process; it imports the vendor's runtime at the first request that needs it.

        Args:
            spec: The vendor.
            python: Interpreter of the vendor's environment; the current one by default.
            is_isolated: Ignore PYTHONPATH and the user's site-packages: for managed environments.
            settings: Threads and timeouts.

        Raises:
            WorkerError: The process cannot be started.
        """
        self.spec = spec
        self._settings = settings or WorkerSettings()
        self._numbers = itertools.count(1)
        self._frames: queue.Queue[Frame | WorkerError | None] = queue.Queue()
        self._log_tail: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._start(Path(sys.executable) if python is None else python, is_isolated)
        try:
            scratch = self._settings.scratch
            self.request(
                "configure",
                {
                    "threads": self._settings.threads,
                    "scratch": None if scratch is None else str(scratch / spec.name),
                },
            )
        except BaseException:
            self.kill()
            raise

    def _start(self, python: Path, is_isolated: bool) -> None:
        boot: dict[str, Any] = {  # Any: JSON data
            "packages": lent_packages(self.spec),
            "adapter": self.spec.adapter,
            "vendor": self.spec.name,
        }
        self._lifeline = Lifeline()
        passed = self._lifeline.child_descriptors
        if passed:
            boot["lifeline"] = passed[0]
        script = Path(__file__).with_name("worker_boot.py")
        flags = ["-I"] if is_isolated else ["-P"]
        try:
            self._process = subprocess.Popen(
                [str(python), *flags, "-u", str(script), json.dumps(boot)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                env={**_child_environment(), **self._settings.variables},
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            self._lifeline.close()
            raise WorkerError(
                f"the {self.spec.name} worker cannot be started with {python}: {error}",
                f"sdkit-dispatch vendors install {self.spec.name}",
            ) from error
        self._lifeline.hold(self._process)
        # Popen types its pipes as optional; all three were asked for.
        self._to_child = cast(BinaryIO, self._process.stdin)
        readers = [
            threading.Thread(target=target, args=(stream,), daemon=True)
            for target, stream in (
                (self._read_frames, self._process.stdout),
                (self._read_log, self._process.stderr),
            )
        ]
        for reader in readers:
            reader.start()
        self._log_reader = readers[1]

    def _read_frames(self, stream: BinaryIO) -> None:
        with stream:
            while True:
                try:
                    frame = read_frame(stream)
                except WorkerError as error:
                    self._frames.put(error)
                    return
                except ValueError:  # closed by `close`
                    frame = None
                self._frames.put(frame)
                if frame is None:
                    return

    def _read_log(self, stream: BinaryIO) -> None:
        with stream:
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip()
                if not text.startswith(FRAMES):
                    self._log_tail.append(text)
                log.debug("%s worker: %s", self.spec.name, text)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def request(
        self,
        method: str,
        params: Mapping[str, Any],  # Any: JSON data
        arrays: Arrays | None = None,
        report: Report = no_report,
    ) -> Answer:
        """Sends one request and waits for its answer.

        Raises:
            DispatchError: What the worker raised, as the same class.
            WorkerError: It died, hung or sent what is not a frame; it is gone afterwards.
            CancelledByUser: `report` raised it, and the worker has stopped the work.
        """
        number = next(self._numbers)
        header = {"id": number, "method": method, "params": params}
        try:
            write_frame(self._to_child, Frame(header=header, arrays=arrays or {}))
        except (OSError, ValueError) as error:
            raise self._dead(method) from error
        try:
            return self._wait(method, number, report)
        except DispatchError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._stopped(f"it talked nonsense: {error!r}") from error
        except BaseException:  # Ctrl-C, a cancellation, or a fault of `report`
            self._cancel(number)
            raise

    def _wait(self, method: str, number: int, report: Report) -> Answer:
        limit_s = {**DEFAULT_TIMEOUTS_S, **self._settings.timeouts_s}[method]
        for frame in self._incoming(method, limit_s):
            header = frame.header
            if header.get("id") != number:
                continue  # a heartbeat, or the late answer of a cancelled request
            if "progress" in header:
                report(record_from_json(Progress, header["progress"]))
            elif "result" in header:
                return Answer(result=header["result"], arrays=frame.arrays)
            elif "cancelled" in header:
                raise CancelledByUser
            elif "error" in header:
                error = header["error"]
                kind = ERROR_KINDS.get(error.get("kind", ""), WorkerError)
                raise kind(error.get("message", "no message"), error.get("hint", ""))
        raise AssertionError("frames end with an exception")

    def _incoming(self, method: str, limit_s: float) -> Iterator[Frame]:
        """Yields frames until the worker is dead, silent or out of time: then raises."""
        deadline_s = time.monotonic() + limit_s
        silent_since_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise self._stopped(f"'{method}' took longer than {limit_s:g} s")
            if now_s - silent_since_s >= self._settings.silence_s:
                limit_s = self._settings.silence_s
                raise self._stopped(f"it hung in '{method}', silent for {limit_s:g} s")
            try:
                frame = self._frames.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if frame is None:
                raise self._dead(method)
            if isinstance(frame, WorkerError):
                raise self._stopped(f"it talked nonsense: {frame.message}") from frame
            silent_since_s = time.monotonic()
            yield frame

    def _stopped(self, why: str) -> WorkerError:
        self.kill()
        error = self._error(f"the {self.spec.name} worker was stopped: {why}")
        error.was_lost = True
        return error

    def _cancel(self, number: int) -> None:
        """Asks the worker to stop; kills it if it does not answer within the grace time."""
        try:
            write_frame(self._to_child, Frame(header={"cancel": number}))
            for frame in self._incoming("cancel", CANCEL_GRACE_S):
                if frame.header.get("id") == number and "progress" not in frame.header:
                    return
        except BaseException as error:  # a second Ctrl-C among them
            self.kill()
            if not isinstance(error, OSError | ValueError | WorkerError):
                raise

    def _dead(self, method: str) -> WorkerError:
        code = self._process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = self._error(f"the {self.spec.name} worker died in '{method}' ({cause})")
        error.was_killed = -code in OUTSIDE_SIGNALS
        error.was_lost = not error.was_killed
        return error

    def _error(self, message: str) -> WorkerError:
        self._log_reader.join(CANCEL_GRACE_S)  # its last words may still be in the pipe
        tail = [line for line in self._log_tail if line.strip()]
        text = message + "".join(f"\n    {line}" for line in tail)
        return WorkerError(text, "sdkit-dispatch doctor")

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Ends the process. Video memory is free when this returns. Twice is fine."""
        with contextlib.suppress(OSError):
            self._to_child.close()
        self._lifeline.close()
        try:
            self._process.wait(CANCEL_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def lent_packages(spec: VendorSpec) -> dict[str, str]:
    """Returns our packages that the worker of `spec` needs: import name -> folder.

    Raises:
        WorkerError: The vendor's package is not installed.
    """
    folders: dict[str, str] = {}
    for name in ("sdkit_dispatch", spec.adapter.partition(":")[0].partition(".")[0]):
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise WorkerError(
                f"the package '{name}' of the vendor '{spec.name}' cannot be found",
                "install the distribution that brings this vendor again",
            )
        folders[name] = found.submodule_search_locations[0]
    return folders


def _child_environment() -> dict[str, str]:
    """The caller's environment in UTF-8, with what makes runtimes predictable.

    CUDA counts devices as the bus does, so that an index in CUDA_VISIBLE_DEVICES means what
    detection says; ggml does not start a debugger when it aborts.
    """
    return {
        **os.environ,
        "PYTHONUTF8": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GGML_NO_BACKTRACE": "1",
    }
