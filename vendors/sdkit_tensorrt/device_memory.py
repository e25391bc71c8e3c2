"""Memory, streams and copies of one card, through the CUDA driver's C interface.

Not run on hardware yet: tests/device does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from sdkit_dispatch.errors import RunError
from sdkit_tensorrt import driver
from sdkit_tensorrt.driver import CudaLibrary

_OUT_OF_MEMORY = 2


class CardMemory:
    """The primary context of a card, one stream, and the buffers that were taken in it."""

    def __init__(self, ordinal: int, *, library: CudaLibrary | None = None) -> None:
        """Makes the card's context current in this thread.

        Raises:
            RunError: The card gives no context.
        """
        self._cuda: CudaLibrary = driver.load_cuda() if library is None else library
        self._ordinal = ctypes.c_int(ordinal)
        self._buffers: list[ctypes.c_uint64] = []
        self._context: ctypes.c_void_p | None = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._ordinal)
        try:
            self.make_current()
            self._call("cuStreamCreate", ctypes.byref(self._stream), 1)  # CU_STREAM_NON_BLOCKING
        except RunError:
            self.close()
            raise

    @property
    def stream(self) -> int:
        """Handle of the stream."""
        return self._stream.value or 0

    def make_current(self) -> None:
        """Makes the context the one of this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def take(self, size_bytes: int) -> int:
        """Returns the address of new memory on the card.

        Raises:
            RunError: There is not enough.
        """
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size_bytes, 1)))
        self._buffers.append(address)
        return address.value

    def free_bytes(self) -> int:
        """Returns how much memory of the card is free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def put(self, address: int, array: Any) -> None:  # Any: numpy.ndarray, C-contiguous
        """Queues a copy to the card; the caller keeps `array` until `wait`."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            self._stream,
        )

    def get(self, address: int, shape: tuple[int, ...], dtype: str) -> Any:  # Any: numpy.ndarray
        """Queues a copy from the card into a new array, which is complete after `wait`."""
        array = np.empty(shape, dtype)
        self._call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_uint64(address),
            ctypes.c_size_t(array.nbytes),
            self._stream,
        )
        return array

    def wait(self) -> None:
        """Waits for all that was queued."""
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Gives everything back; a second call does nothing."""
        if self._context is None:
            return
        self._cuda.cuCtxSetCurrent(self._context)
        for address in self._buffers:
            self._cuda.cuMemFree_v2(address)
        if self._stream.value:
            self._cuda.cuStreamDestroy_v2(self._stream)
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._ordinal)
        self._buffers.clear()
        self._context = None

    def _call(self, name: str, *arguments: Any) -> None:  # Any: of ctypes
        code = getattr(self._cuda, name)(*arguments)
        if code == 0:
            return
        if code == _OUT_OF_MEMORY:
            raise RunError(
                "the card has not enough free memory",
                hint="close other programs, or ask for a smaller image",
            )
        raise RunError(f"{name} failed: CUDA error {code}")
