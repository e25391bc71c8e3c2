"""Shows progress on stderr: a live line on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from .contract import Progress

if TYPE_CHECKING:
    import rich.progress

PLAIN_EVERY_S = 10.0
"""On plain output a phase is named when it begins, and again this often while it lasts."""


class ProgressView:
    """A `Report` that shows what it is told. A context manager."""

    def __init__(self, *, stream: TextIO | None = None, is_quiet: bool = False) -> None:
        """Shows nothing if `is_quiet`."""
        # Python has no stderr where the caller closed it.
        self._stream: TextIO | None = stream or sys.stderr
        self._is_quiet = is_quiet or self._stream is None
        self._started_s = time.monotonic()
        self._phase = ""
        self._phase_started_s = self._shown_s = self._started_s
        self._live: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Self:
        if not self._is_quiet and self._stream is not None and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._live = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, progress: Progress) -> None:
        """Shows one report."""
        if self._is_quiet:
            return
        if self._live is not None:
            self._show_live(progress)
        else:
            self._show_plain(progress)

    def _show_live(self, progress: Progress) -> None:
        assert self._live is not None
        if self._task is None or progress.phase != self._phase:
            if self._task is not None:
                self._live.remove_task(self._task)
            self._task = self._live.add_task(progress.phase, total=None)
            self._phase = progress.phase
        if progress.fraction is not None:
            self._live.update(self._task, total=1.0, completed=progress.fraction)

    def _show_plain(self, progress: Progress) -> None:
        now_s = time.monotonic()
        is_new = progress.phase != self._phase
        if is_new:
            self._phase, self._phase_started_s = progress.phase, now_s
        elif now_s - self._shown_s < PLAIN_EVERY_S:
            return
        self._shown_s = now_s
        share = "" if is_new or progress.fraction is None else f" {progress.fraction:.0%}"
        print(
            f"[{now_s - self._started_s:6.1f} s] {progress.phase}{share}",
            file=self._stream,
            flush=True,
        )
