"""Ends a worker when its caller is gone, whatever the worker is doing and however the caller ended.

A worker notices the end of its input by itself, but not while a vendor's library computes with the
interpreter lock held. So the kernel is asked to end it: on Linux through a pipe whose last write
end closes (see `worker`), on Windows through a job object. macOS has nothing of the kind.

The Windows part follows the documentation of job objects and has not been run on Windows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress


class Lifeline:
    """What ties one worker to this process.

    Attributes:
        child_descriptors: To be passed to the worker; closed here by `hold` or `close`.
    """

    def __init__(self) -> None:
        self.child_descriptors: tuple[int, ...] = ()
        self._end: int | None = None
        self._job: int | None = None
        if sys.platform == "linux":
            child_end, self._end = os.pipe()
            self.child_descriptors = (child_end,)

    def hold(self, process: subprocess.Popen[bytes]) -> None:
        """Ties a worker that has just been started."""
        self._close_child_end()
        if sys.platform == "win32":
            with suppress(OSError):  # it still notices the end of its input
                self._job = _job_for(int(process._handle))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Lets go: a worker that still runs is ended. Twice is fine."""
        self._close_child_end()
        if self._end is not None:
            os.close(self._end)
            self._end = None
        if self._job is not None and sys.platform == "win32":
            import ctypes

            ctypes.windll.kernel32.CloseHandle(ctypes.c_void_p(self._job))
            self._job = None

    def _close_child_end(self) -> None:
        for descriptor in self.child_descriptors:
            os.close(descriptor)
        self.child_descriptors = ()


if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    KILL_ON_JOB_CLOSE = 0x2000
    EXTENDED_LIMIT_INFORMATION = 9

    class _BasicLimits(ctypes.Structure):
        """JOBOBJECT_BASIC_LIMIT_INFORMATION."""

        _fields_ = (
            ("per_process_user_time", ctypes.c_int64),
            ("per_job_user_time", ctypes.c_int64),
            ("flags", wintypes.DWORD),
            ("minimum_working_set", ctypes.c_size_t),
            ("maximum_working_set", ctypes.c_size_t),
            ("active_processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            ("priority_class", wintypes.DWORD),
            ("scheduling_class", wintypes.DWORD),
        )

    class _ExtendedLimits(ctypes.Structure):
        """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

        _fields_ = (
            ("basic", _BasicLimits),
            ("io_counters", ctypes.c_uint64 * 6),
            ("process_memory", ctypes.c_size_t),
            ("job_memory", ctypes.c_size_t),
            ("peak_process_memory", ctypes.c_size_t),
            ("peak_job_memory", ctypes.c_size_t),
        )

    def _job_for(process: int) -> int:
        """Returns a job that ends `process` when its last handle, ours, is closed.

        Raises:
            OSError: The kernel refuses.
        """
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = wintypes.HANDLE
        kernel.CreateJobObjectW.argtypes = [ctypes.c_void_p, wintypes.LPCWSTR]
        kernel.SetInformationJobObject.argtypes = [
            wintypes.HANDLE,
            ctypes.c_int,
            ctypes.c_void_p,
            wintypes.DWORD,
        ]
        kernel.AssignProcessToJobObject.argtypes = [wintypes.HANDLE, wintypes.HANDLE]
        job = kernel.CreateJobObjectW(None, None)
        if not job:
            raise ctypes.WinError(ctypes.get_last_error())
        limits = _ExtendedLimits()
        limits.basic.flags = KILL_ON_JOB_CLOSE
        if not (
            kernel.SetInformationJobObject(
                job, EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.sizeof(limits)
            )
            and kernel.AssignProcessToJobObject(job, process)
        ):
            error = ctypes.WinError(ctypes.get_last_error())
            kernel.CloseHandle(job)
            raise error
        return int(job)
