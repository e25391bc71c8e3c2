"""What the builder says while it works: its log, which holds its errors, and its progress."""

from __future__ import annotations

import threading
import time
from typing import Any

from sdkit_dispatch.contract import Progress, Report

# Any: the modules tensorrt_rtx_bindings and tensorrt_bindings, which have the same shape and no
# type information.
Runtime = Any


REPORT_EVERY_S = 0.05
"""The builder completes tens of thousands of steps; each report may carry a cancellation back."""


def throttled(report: Report) -> Report:
    """Returns a report that passes on the first of many, and all that begin or end a phase."""
    last = -REPORT_EVERY_S

    def sometimes(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.fraction in (None, 1.0) or now - last >= REPORT_EVERY_S:
            last = now
            report(progress)

    return sometimes


class Lines:
    """Lines of the log, kept by severity; the builder calls from several threads."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    @property
    def words(self) -> str:
        """The errors, or, without any, the warnings, in one line."""
        return " ".join(self.errors or self.warnings) or "it says nothing"


def new_log(trt: Runtime, lines: Lines) -> Any:  # Any: a class of the bindings
    """Returns an ILogger of the runtime that fills `lines`."""

    class Log(trt.ILogger):  # type: ignore[misc] # no type information
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            # INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE: 0 to 4.
            level = int(severity)
            if level <= int(trt.ILogger.ERROR):
                lines.errors.append(message)
            elif level == int(trt.ILogger.WARNING):
                lines.warnings.append(message)

    return Log()


class Monitoring:
    """Turns the builder's phases into reports, and an error of `report` into its cancellation.

    Attributes:
        stopped_by: What `report` raised; the caller raises it again once the builder returned.
    """

    def __init__(self, component: str, report: Report) -> None:
        self.stopped_by: BaseException | None = None
        self._component = component
        self._report = report
        self._lock = threading.Lock()
        self._stack: list[tuple[str, int]] = []
        self._fraction = 0.0

    def start(self, name: str, steps: int) -> None:
        with self._lock:
            self._stack.append((name, max(steps, 1)))
        self._say()

    def step(self, name: str, step: int) -> bool:
        with self._lock:
            top = self._stack[0] if self._stack else (name, 1)
            if name == top[0]:
                self._fraction = max(self._fraction, min((step + 1) / top[1], 1.0))
        self._say()
        return self.stopped_by is None

    def finish(self, name: str) -> None:
        with self._lock:
            for index in range(len(self._stack) - 1, -1, -1):
                if self._stack[index][0] == name:
                    del self._stack[index]
                    break

    def _say(self) -> None:
        if self.stopped_by is not None:
            return
        with self._lock:
            detail = self._stack[-1][0].lower() if self._stack else "engine"
            fraction = self._fraction
        try:
            self._report(Progress(phase=f"compile {self._component}: {detail}", fraction=fraction))
        except BaseException as error:  # it must not pass through the builder
            self.stopped_by = error


def new_monitor(trt: Runtime, monitoring: Monitoring) -> Any:  # Any: a class of the bindings
    """Returns an IProgressMonitor of the runtime that tells `monitoring`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # no type information
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            monitoring.start(name, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return monitoring.step(name, step)

        def phase_finish(self, name: str) -> None:
            monitoring.finish(name)

    return Monitor()
