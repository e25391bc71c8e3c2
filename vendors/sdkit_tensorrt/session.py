"""A loaded engine of either runtime.

Not run on hardware yet: tests/device does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sdkit_dispatch.contract import Arrays, TensorSpec
from sdkit_dispatch.errors import CacheError, RunError
from sdkit_dispatch.graph.tensors import check_feeds
from sdkit_tensorrt.builder_log import Lines, Runtime
from sdkit_tensorrt.device_memory import CardMemory

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""The runtime's DataType -> numpy's name."""


class TensorRtSession:
    """An execution context with its own buffers on the card; static shapes."""

    def __init__(
        self,
        trt: Runtime,
        context: Any,  # Any: an IExecutionContext
        memory: CardMemory,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        profile: int,
        facts: Mapping[str, str],
        lines: Lines,
        on_close: Callable[[], None],
        keep_alive: tuple[Any, ...],  # Any: of the bindings, the engine and its runtime
    ) -> None:
        """Takes over `memory` and everything of the runtime.

        Args:
            trt: The module of the runtime.
            context: For the whole life of the session.
            memory: With the card's context current.
            inputs: Of the size that the session serves.
            outputs: Sizes of -1 are asked of the context.
            profile: Optimization profile that holds that size.
            facts: What runs.
            lines: Where the runtime's log goes.
            on_close: Called once, before anything is given back.
            keep_alive: Released after the context.

        Raises:
            CacheError: The engine has other inputs or outputs.
            RunError: The card's memory is short, or the runtime refuses the size.
        """
        self.inputs = inputs
        self.facts: Mapping[str, str] = MappingProxyType(dict(facts))
        self._trt = trt
        self._context = context
        self._memory: CardMemory | None = memory
        self._lines = lines
        self._on_close = on_close
        self._keep_alive = keep_alive
        self._addresses: dict[str, int] = {}
        self._on_host: dict[str, Any] = {}  # Any: numpy.ndarray
        self._choose_sizes(profile)
        self.outputs = tuple(self._measured(spec) for spec in outputs)
        self._take_buffers()

    def run(self, feeds: Arrays) -> dict[str, Any]:
        check_feeds(self.inputs, feeds)
        memory = self._memory
        if memory is None:
            raise RunError("tensorrt: the session is closed")
        memory.make_current()
        kept = [self._feed(memory, spec.name, feeds[spec.name]) for spec in self.inputs]
        if not self._context.execute_async_v3(memory.stream):
            memory.wait()
            raise RunError(f"tensorrt: the engine failed: {self._lines.words}")
        arrays = {
            spec.name: memory.get(self._addresses[spec.name], spec.shape, spec.dtype)
            for spec in self.outputs
        }
        memory.wait()
        del kept
        return arrays

    def warm_up(self) -> None:
        """Runs once on zeros: kernels are compiled, and a CUDA graph is captured."""
        self.run({spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.inputs})

    def close(self) -> None:
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        memory.make_current()
        self._on_close()
        # The context first: it points into the engine, and both into the card's memory.
        self._context = None
        self._keep_alive = ()
        memory.close()

    def _choose_sizes(self, profile: int) -> None:
        assert self._memory is not None
        if profile and not self._context.set_optimization_profile_async(
            profile, self._memory.stream
        ):
            raise RunError(f"tensorrt: profile {profile} is refused: {self._lines.words}")
        self._memory.wait()
        for spec in self.inputs:
            self._check(spec)
            if not self._context.set_input_shape(spec.name, spec.shape):
                raise RunError(
                    f'tensorrt: "{spec.name}" {list(spec.shape)} is refused: {self._lines.words}'
                )

    def _measured(self, spec: TensorSpec) -> TensorSpec:
        self._check(spec)
        shape = tuple(int(size) for size in self._context.get_tensor_shape(spec.name))
        if -1 in shape or (-1 not in spec.shape and shape != spec.shape):
            raise CacheError(
                f'tensorrt: the output "{spec.name}" is {list(shape)}, noted is {list(spec.shape)}'
            )
        return TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)

    def _check(self, spec: TensorSpec) -> None:
        engine = self._context.engine
        kind = _DTYPES.get(engine.get_tensor_dtype(spec.name).name)
        if kind != spec.dtype:
            raise CacheError(f'tensorrt: "{spec.name}" is {kind}, noted is {spec.dtype}')

    def _take_buffers(self) -> None:
        assert self._memory is not None
        host = self._trt.TensorLocation.HOST
        for spec in (*self.inputs, *self.outputs):
            size_bytes = int(np.prod(spec.shape, dtype=np.int64)) * np.dtype(spec.dtype).itemsize
            if self._context.engine.get_tensor_location(spec.name) == host:
                self._on_host[spec.name] = np.zeros(spec.shape, spec.dtype)
                address = self._on_host[spec.name].ctypes.data
            else:
                address = self._memory.take(size_bytes)
            self._addresses[spec.name] = address
            if not self._context.set_tensor_address(spec.name, address):
                raise RunError(f'tensorrt: no buffer for "{spec.name}": {self._lines.words}')

    def _feed(self, memory: CardMemory, name: str, array: Any) -> Any:  # Any: numpy.ndarray
        if name in self._on_host:
            self._on_host[name][...] = array
            return array
        whole = np.ascontiguousarray(array)
        memory.put(self._addresses[name], whole)
        return whole
