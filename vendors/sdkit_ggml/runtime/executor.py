"""Runs a program on a device: builds ggml's graph once, then feeds, computes and reads back.

Everything is placed by the program, so there is no allocator: each result gets its address in the
arena, and an operand is a tensor of ggml's at an address, with the strides that the program gives.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sdkit_dispatch.errors import RunError
from sdkit_ggml.instructions import INTO, ProgramError, check
from sdkit_ggml.program import TYPES, Op, Operand, Program, Variant, dense_nb, extent_bytes
from sdkit_ggml.runtime.binding import SET_THREADS, InitParams, Library, TensorHead
from sdkit_ggml.runtime.devices import OfferedDevice

Array = np.ndarray[Any, np.dtype[Any]]  # Any: of every type that a program has

BYTES_TYPE = 24
"""`GGML_TYPE_I8`: for tensors that are nothing but memory."""
USAGE_WEIGHTS, USAGE_COMPUTE = 1, 2
PRECISE = 10
"""`GGML_PREC_F32`."""
FLAG_OUTPUT = 2
"""`GGML_TENSOR_FLAG_OUTPUT`: a backend must not fuse the operation with its user."""
UPLOAD_BYTES = 64 << 20
GUARD_BYTES = 4096
"""Behind the arena: products by overlapping rows read a few elements past their last one."""

Call = Callable[[Library, int, Sequence[int], Sequence[Any]], int]  # Any: a number of C

PLAIN = (
    *("add", "sub", "mul", "div"),
    *("sqr", "sqrt", "log", "sin", "cos", "sum_rows", "mean", "cont"),
)
"""Operations without parameters that are named as in C."""


def _plain(name: str) -> Call:
    return lambda g, c, t, p: int(getattr(g, f"ggml_{name}")(c, *t))


CALLS: dict[str, Call] = {
    "unary": lambda g, c, t, p: g.ggml_unary(c, t[0], int(p[0])),
    "glu": lambda g, c, t, p: g.ggml_glu_split(c, t[0], t[1], int(p[0])),
    "leaky_relu": lambda g, c, t, p: g.ggml_leaky_relu(c, t[0], p[0], False),
    "clamp": lambda g, c, t, p: g.ggml_clamp(c, t[0], p[0], p[1]),
    "scale": lambda g, c, t, p: g.ggml_scale_bias(c, t[0], p[0], p[1]),
    "norm": lambda g, c, t, p: g.ggml_norm(c, t[0], p[0]),
    "rms_norm": lambda g, c, t, p: g.ggml_rms_norm(c, t[0], p[0]),
    "group_norm": lambda g, c, t, p: g.ggml_group_norm(c, t[0], int(p[0]), p[1]),
    "soft_max": lambda g, c, t, p: g.ggml_soft_max_ext(
        c, t[0], t[1] if len(t) > 1 else None, p[0], 0.0
    ),
    "flash": lambda g, c, t, p: g.ggml_flash_attn_ext(c, t[0], t[1], t[2], None, p[0], 0.0, 0.0),
    "repeat": lambda g, c, t, p: g.ggml_repeat_4d(c, t[0], *map(int, p)),
    "im2col": lambda g, c, t, p: g.ggml_im2col(
        c, t[0], t[1], *map(int, p[:6]), True, TYPES["f16" if p[6] else "f32"][0]
    ),
    "pool_2d": lambda g, c, t, p: g.ggml_pool_2d(
        c, t[0], *map(int, p[:5]), float(p[5]), float(p[6])
    ),
    "upscale": lambda g, c, t, p: g.ggml_upscale(c, t[0], int(p[0]), 0),
    "pad": lambda g, c, t, p: g.ggml_pad_ext(c, t[0], *map(int, p)),
    "add_into": lambda g, c, t, p: g.ggml_add_inplace(c, t[0], t[1]),
    "get_rows": lambda g, c, t, p: g.ggml_get_rows(c, t[0], t[1]),
    "mul_mat": lambda g, c, t, p: g.ggml_mul_mat(c, t[0], t[1]),
    "cpy": lambda g, c, t, p: g.ggml_cpy(c, t[0], t[1]),
    **{name: _plain(name) for name in PLAIN},
}
"""Operation -> the call of ggml that makes it."""


def suited(program: Program, device: OfferedDevice) -> tuple[Variant, ...]:
    """Returns the variants that are meant for a device, best first."""
    kind = "cpu" if device.kind == "cpu" else "gpu"
    return tuple(one for one in program.variants if one.device == kind)


def check_variant(variant: Variant, weights_bytes: int) -> None:
    """Checks a program before ggml sees it.

    Raises:
        ProgramError: An operation would make ggml assert, or an operand lies outside its memory.
    """
    room = {"w": weights_bytes, "a": variant.arena_bytes + GUARD_BYTES}
    for one in variant.operands:
        if one.type not in TYPES or len(one.ne) != 4 or len(one.nb) != 4 or min(one.ne) < 1:
            raise ProgramError(f"there is no operand {one}")
        if min(one.nb) < 0 or one.offset < 0 or one.offset % 2:
            raise ProgramError(f"operand {one} lies at no address")
        if one.ne[0] % TYPES[one.type][1] or one.offset + extent_bytes(one) > room[one.space]:
            raise ProgramError(f"operand {one} lies outside of its {room[one.space]} bytes")
    count = len(variant.operands)
    for op in variant.ops:
        if not all(0 <= index < count for index in (*op.inputs, op.output)):
            raise ProgramError(f"{op.name} has operands that are not there")
        result = variant.operands[op.output]
        kind, ne = check(op.name, [variant.operands[index] for index in op.inputs], op.params)
        if result.space != "a":
            raise ProgramError(f"{op.name} writes into the weights")
        if op.name in INTO:
            if op.output != op.inputs[INTO[op.name]]:
                raise ProgramError(f"{op.name} writes elsewhere than it says")
        elif (kind, ne) != (result.type, result.ne) or result.nb != dense_nb(kind, ne):
            raise ProgramError(f"{op.name} gives {kind}{list(ne)}, the program says {result}")
    for index in [
        *(feed.operand for feed in variant.feeds),
        *(one.operand for one in variant.outputs if one.operand is not None),
    ]:
        if not 0 <= index < count or variant.operands[index].space != "a":
            raise ProgramError("a feed or an output is not in the arena")


class Executor:
    """A variant of a program, ready on a device."""

    def __init__(
        self,
        library: Library,
        device: OfferedDevice,
        program: Program,
        weights: Sequence[memoryview],
        *,
        threads: int,
    ) -> None:
        """Builds the graph of the first variant that the device supports.

        Args:
            library: The loaded ggml.
            device: Of that library.
            program: Checked (`check_variant`).
            weights: The data sections of the weights files, mapped; kept for as long as they are
                used. Operands address them as if they lay one behind the other.
            threads: On a processor.

        Raises:
            RunError: No variant is supported, or there is not enough memory.
        """
        self._g = library
        self._device = device
        self._weights = weights
        self._buffers: list[int] = []
        self._context: int | None = None
        self._backend = library.ggml_backend_dev_init(device.handle, None)
        if not self._backend:
            raise RunError(f"ggml: {device.name} ({device.description}) does not open")
        try:
            if device.kind == "cpu":
                self._set_threads(threads)
            self._parts = list(self._loaded(weights))
            refusals = []
            for variant in suited(program, device):
                refused = self._build(variant)
                if not refused:
                    self.variant = variant
                    return
                refusals.append(f"{variant.name}: {', '.join(refused)}")
            raise RunError(
                f"ggml: {device.name} ({device.description}) lacks operations: "
                f"{'; '.join(refusals)}"
            )
        except BaseException:
            self.close()
            raise

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Computes all outputs that the device computes, flat; `feeds` by `Feed.name`.

        Raises:
            RunError: The device failed, or an index is out of range.
        """
        g = self._g
        for feed, tensor, kind in self._feeds:
            array = _fed(feed.name, feeds[feed.name], kind, feed.limit)
            g.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        status = g.ggml_backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise RunError(f"ggml: {self._device.name} failed with status {status}")
        g.ggml_backend_synchronize(self._backend)
        found = {}
        for name, tensor, size in self._outputs:
            array = np.empty(size, np.float32)
            g.ggml_backend_tensor_get(tensor, array.ctypes.data, 0, array.nbytes)
            found[name] = array
        return found

    def close(self) -> None:
        """Frees the device's memory; twice is fine."""
        for buffer in self._buffers:
            self._g.ggml_backend_buffer_free(buffer)
        self._buffers = []
        if self._context is not None:
            self._g.ggml_free(self._context)
            self._context = None
        if self._backend:
            self._g.ggml_backend_free(self._backend)
            self._backend = None

    def _set_threads(self, threads: int) -> None:
        registry = self._g.ggml_backend_dev_backend_reg(self._device.handle)
        address = self._g.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        if address:
            SET_THREADS(address)(self._backend, threads)

    def _buffer(self, size: int, usage: int) -> int:
        """Returns the start of new device memory; it is freed with the executor."""
        g = self._g
        kind = g.ggml_backend_dev_buffer_type(self._device.handle)
        limit = g.ggml_backend_buft_get_max_size(kind)
        if size > limit:
            raise RunError(
                f"ggml: {self._device.name} gives {limit} bytes at a time, {size} are needed",
                hint="ask for a smaller picture, or for weights of fewer bits",
            )
        buffer = g.ggml_backend_buft_alloc_buffer(kind, size)
        if not buffer:
            raise RunError(
                f"ggml: {self._device.name} has no {size} bytes left of "
                f"{self._device.memory_bytes}",
                hint="close what uses its memory, or ask for weights of fewer bits",
            )
        self._buffers.append(buffer)
        g.ggml_backend_buffer_set_usage(buffer, usage)
        return int(buffer)

    def _loaded(self, weights: Sequence[memoryview]) -> Iterator[tuple[int, int]]:
        """Yields where each file's weights begin for the program, and their buffer."""
        start = 0
        for part in weights:
            yield start, self._load(part)
            start += len(part)

    def _load(self, weights: memoryview) -> int:
        g, size = self._g, len(weights)
        address = ctypes.addressof(ctypes.c_char.from_buffer(weights))
        if self._device.kind == "cpu" and self._device.has_host_memory and address % 64 == 0:
            # Mapped, not copied: the page cache holds the one copy of all processes.
            buffer = g.ggml_backend_dev_buffer_from_host_ptr(
                self._device.handle, address, size, size
            )
            if buffer:
                self._buffers.append(buffer)
                g.ggml_backend_buffer_set_usage(buffer, USAGE_WEIGHTS)
                return int(buffer)
        target = self._buffer(size, USAGE_WEIGHTS)
        context = g.ggml_init(InitParams(2 * g.ggml_tensor_overhead() + 1024, None, True))
        whole = g.ggml_new_tensor_4d(context, BYTES_TYPE, size, 1, 1, 1)
        base = g.ggml_backend_buffer_get_base(target)
        g.ggml_backend_tensor_alloc(target, whole, base)
        for at in range(0, size, UPLOAD_BYTES):
            part = min(UPLOAD_BYTES, size - at)
            g.ggml_backend_tensor_set(whole, address + at, at, part)
        g.ggml_free(context)
        return target

    def _build(self, variant: Variant) -> list[str]:
        """Builds the graph; returns what the device does not support, then having built nothing."""
        g = self._g
        nodes = len(variant.ops) + len(variant.operands) + 16
        size = nodes * 2 * g.ggml_tensor_overhead() + g.ggml_graph_overhead_custom(2 * nodes, False)
        context = g.ggml_init(InitParams(size + (1 << 20), None, True))
        if not context:
            raise RunError(f"ggml: no {size} bytes for a graph of {nodes} nodes")
        arena = self._buffer(variant.arena_bytes + GUARD_BYTES, USAGE_COMPUTE)
        builder = _Builder(g, context, variant, self._parts, arena)
        graph = g.ggml_new_graph_custom(context, 2 * nodes, False)
        refused = []
        exposed = read_in_part(variant)
        for step, op in enumerate(variant.ops):
            tensor = builder.add(op, is_exposed=step in exposed)
            if not g.ggml_backend_dev_supports_op(self._device.handle, tensor):
                refused.append(op.name)
            g.ggml_build_forward_expand(graph, tensor)
        if refused:
            self._buffers.remove(arena)
            g.ggml_backend_buffer_free(arena)
            g.ggml_free(context)
            return sorted(set(refused))
        self._context, self._graph = context, graph
        self._feeds = [
            (feed, builder.leaf(feed.operand), variant.operands[feed.operand].type)
            for feed in variant.feeds
        ]
        self._outputs = [
            (one.name, builder.leaf(one.operand), _count(variant.operands[one.operand]))
            for one in variant.outputs
            if one.operand is not None
        ]
        return []


class _Builder:
    """Makes tensors of ggml for the operands of a variant."""

    def __init__(
        self,
        library: Library,
        context: int,
        variant: Variant,
        weights: Sequence[tuple[int, int]],
        arena: int,
    ) -> None:
        self._g = library
        self._context = context
        self._variant = variant
        self._places = {"w": weights, "a": [(0, arena)]}
        self._results: dict[int, int] = {}
        self._leaves: dict[int, int] = {}

    def add(self, op: Op, *, is_exposed: bool) -> int:
        """Returns the tensor of an operation, placed."""
        g = self._g
        inputs = [self._results.get(index) or self.leaf(index) for index in op.inputs]
        into = INTO.get(op.name)
        if into is not None:
            # A view of a view would start at the first one's source.
            inputs[into] = self.leaf(op.inputs[into])
        tensor = CALLS[op.name](g, self._context, inputs, op.params)
        operand = self._variant.operands[op.output]
        head = TensorHead.from_address(tensor)
        if (head.type, tuple(head.ne)) != (TYPES[operand.type][0], operand.ne):
            # Reading the struct wrongly looks the same: then this ggml has another layout.
            raise RunError(
                f"ggml: {op.name} gives type {head.type}{list(head.ne)}, not "
                f"{operand.type}{list(operand.ne)}: this build does not fit the program"
            )
        if op.name == "mul_mat":
            g.ggml_mul_mat_set_prec(tensor, PRECISE)
        if op.name == "flash":
            g.ggml_flash_attn_ext_set_prec(tensor, PRECISE)
        if into is not None:
            g.ggml_backend_view_init(tensor)
            self._results.pop(op.output, None)
        else:
            self._place(tensor, operand)
            if is_exposed:
                g.ggml_set_output(tensor)
            self._results[op.output] = tensor
        return int(tensor)

    def leaf(self, index: int) -> int:
        """Returns a tensor at the address of an operand, whatever was computed there."""
        if index not in self._leaves:
            operand = self._variant.operands[index]
            tensor = self._g.ggml_new_tensor_4d(self._context, TYPES[operand.type][0], *operand.ne)
            head = TensorHead.from_address(tensor)
            for axis, stride in enumerate(operand.nb):
                head.nb[axis] = stride
            self._place(tensor, operand)
            self._leaves[index] = int(tensor)
        return self._leaves[index]

    def _place(self, tensor: int, operand: Operand) -> None:
        start, buffer = next(
            one for one in reversed(self._places[operand.space]) if one[0] <= operand.offset
        )
        base = self._g.ggml_backend_buffer_get_base(buffer)
        self._g.ggml_backend_tensor_alloc(buffer, tensor, base + operand.offset - start)


def read_in_part(variant: Variant) -> set[int]:
    """Returns the steps whose results are read by another operand than they were written as.

    A backend that fuses operations counts the uses of a tensor; these it cannot see. Some steps
    too many are named: a later tenant of the same memory is not told apart.
    """
    operands = variant.operands
    spans = [(one.offset, one.offset + extent_bytes(one)) for one in operands]
    written: set[int] = set()
    reads: list[tuple[int, int, int]] = []
    for step, op in enumerate(variant.ops):
        reads += [
            (*spans[index], step)
            for index in op.inputs
            if operands[index].space == "a" and index not in written
        ]
        if op.name in INTO:
            written.discard(op.output)
        else:
            written.add(op.output)
    end = len(variant.ops)
    reads += [(*spans[one.operand], end) for one in variant.outputs if one.operand is not None]
    starts, ends, steps = np.array(reads, np.int64).reshape(-1, 3).T
    return {
        step
        for step, op in enumerate(variant.ops)
        if bool(
            np.any((starts < spans[op.output][1]) & (ends > spans[op.output][0]) & (steps > step))
        )
    }


def _count(operand: Operand) -> int:
    return int(np.prod(operand.ne, dtype=np.int64))


def _fed(name: str, array: Array, kind: str, limit: int) -> Array:
    if kind == "i32":
        found = array.astype(np.int64, copy=False)
        if limit:
            found = np.where(found < 0, found + limit, found)
            if ((found < 0) | (found >= limit)).any():
                raise RunError(
                    f'"{name}" holds indices from {array.min()} to {array.max()}; there are '
                    f"{limit} rows"
                )
        return np.ascontiguousarray(found, np.int32)
    return np.ascontiguousarray(array, np.float32)


def thread_count(asked: int | None) -> int:
    """Returns how many threads to use: as asked, else one for each processor that is ours."""
    if asked is not None:
        return max(1, asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
