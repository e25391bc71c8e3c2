"""Stubs of NVIDIA's libraries, for machines without a card: they are none of NVIDIA's code.

`StubCuda` has the functions of the driver that we call, over memory of this process. `stub_runtime`
makes a module of the shape of `tensorrt` 11 or `tensorrt_rtx` 1.7 whose engines run in the
reference evaluator of the `onnx` package, through the addresses that a session gave.
"""

from __future__ import annotations

import ctypes
import enum
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_model
from onnx.reference import ReferenceEvaluator

DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}

REFITTABLE = "stub, refittable"
"""Whom the plan of an engine that takes other weights names as its producer."""


class StubCuda:
    """The driver of a machine with one card."""

    def __init__(
        self,
        *,
        arch: tuple[int, int] = (8, 9),
        cuda: int = 13000,
        name: str = "NVIDIA Stub 4090",
        processors: int = 128,
        init: int = 0,
        address: str = "0000:01:00.0",
        memory_bytes: int = 1 << 30,
    ) -> None:
        self.buffers: dict[int, Any] = {}
        self.is_retained = False
        self.calls: list[str] = []
        self._arch, self._cuda, self._name = arch, cuda, name
        self._processors, self._init, self._address = processors, init, address
        self._memory_bytes = memory_bytes

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)

    def cuInit(self, flags: int) -> int:  # noqa: N802 - as the driver names it, as below
        return self._init

    def cuDriverGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._cuda
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:  # noqa: N802
        out._obj.value = 0
        return 0

    def cuDeviceGetByPCIBusId(self, out: Any, address: bytes) -> int:  # noqa: N802
        out._obj.value = 0
        return 0 if address.decode() == self._address else 101

    def cuDeviceGetAttribute(self, out: Any, attribute: int, ordinal: int) -> int:  # noqa: N802
        values = {75: self._arch[0], 76: self._arch[1], 16: self._processors}
        out._obj.value = values[attribute]
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, ordinal: int) -> int:  # noqa: N802
        buffer.value = self._name.encode()
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, ordinal: Any) -> int:  # noqa: N802
        out._obj.value, self.is_retained = 77, True
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, ordinal: Any) -> int:  # noqa: N802
        self.is_retained = False
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        return 0

    def cuStreamCreate(self, out: Any, flags: int) -> int:  # noqa: N802
        out._obj.value = 5
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:  # noqa: N802
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        taken = sum(len(one) for one in self.buffers.values())
        free._obj.value, total._obj.value = self._memory_bytes - taken, self._memory_bytes
        return 0

    def cuMemAlloc_v2(self, out: Any, size: Any) -> int:  # noqa: N802
        if size.value + sum(len(one) for one in self.buffers.values()) > self._memory_bytes:
            return 2
        buffer = ctypes.create_string_buffer(size.value)
        out._obj.value = ctypes.addressof(buffer)
        self.buffers[out._obj.value] = buffer
        return 0

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        del self.buffers[address.value]
        return 0

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        ctypes.memmove(to.value, source.value, size.value)
        return 0

    def cuMemcpyDtoHAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        ctypes.memmove(to.value, source.value, size.value)
        return 0


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class StubLogger:
    INTERNAL_ERROR, ERROR, WARNING = Severity.INTERNAL_ERROR, Severity.ERROR, Severity.WARNING

    def __init__(self) -> None:
        pass


def stub_runtime(*, is_rtx: bool, version: str, magic: bytes = b"") -> types.ModuleType:
    """Returns the module; `module.seen` collects what was set on builders and contexts."""
    module: Any = types.ModuleType("stub of tensorrt_rtx" if is_rtx else "stub of tensorrt")
    seen: dict[str, Any] = {"timings": [], "profiles": [], "caches": []}

    class Location(enum.Enum):
        DEVICE = 0
        HOST = 1

    class DataType(enum.Enum):
        FLOAT = 0
        HALF = 1
        INT32 = 2
        INT64 = 3
        BOOL = 4

    class Flags(enum.IntEnum):
        STRONGLY_TYPED = 0

    class BuilderFlag(enum.IntEnum):
        WEIGHT_STREAMING = 3
        REFIT = 4

    class Levels(enum.IntEnum):
        NONE = 0
        AMPERE_PLUS = 1
        SAME_COMPUTE_CAPABILITY = 2

    class Tensor:
        def __init__(self, value: onnx.ValueInfoProto) -> None:
            tensor = value.type.tensor_type
            self.name = value.name
            self.shape = tuple(dim.dim_value or -1 for dim in tensor.shape.dim)

    class Network:
        model: onnx.ModelProto

        @property
        def num_inputs(self) -> int:
            return len(self.model.graph.input)

        @property
        def num_outputs(self) -> int:
            return len(self.model.graph.output)

        def get_input(self, index: int) -> Tensor:
            return Tensor(self.model.graph.input[index])

        def get_output(self, index: int) -> Tensor:
            inferred = onnx.shape_inference.infer_shapes(self.model).graph
            return Tensor(inferred.output[index])

    class Cache:
        def __init__(self, data: bytes) -> None:
            self.data = data
            seen["timings"].append(data)

        def serialize(self) -> bytes:
            return b"timings"

    class Config:
        progress_monitor: Any = None
        hardware_compatibility_level: Any = None
        builder_optimization_level = 3

        def __init__(self) -> None:
            self.flags: list[Any] = []

        def set_flag(self, flag: Any) -> None:
            self.flags.append(flag)

        def create_timing_cache(self, data: bytes) -> Cache:
            return Cache(data)

        def set_timing_cache(self, cache: Cache, ignore: bool) -> bool:
            return cache.data in (b"", b"timings")

        def add_optimization_profile(self, profile: Any) -> int:
            seen["profiles"].append(profile.shapes)
            return len(seen["profiles"]) - 1

    class Profile:
        def __init__(self) -> None:
            self.shapes: dict[str, Any] = {}

        def set_shape(self, name: str, least: Any, usual: Any, largest: Any) -> None:
            self.shapes[name] = (least, usual, largest)

    class Parser:
        num_errors = 0

        def __init__(self, network: Network, log: Any) -> None:
            self._network = network

        def supports_operator(self, name: str) -> bool:
            return name not in ("Frobnicate", "Wibble")

        def parse(self, graph: bytes, path: str) -> bool:
            model = onnx.load_model_from_string(graph)
            load_external_data_for_model(model, str(Path(path).parent))
            self._network.model = model
            return True

    class Builder:
        def __init__(self, log: Any) -> None:
            self._log = log

        def create_network(self, flags: int) -> Network:
            return Network()

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
            seen["config"] = config
            monitor = config.progress_monitor
            monitor.phase_start("Building", None, 2)
            is_wanted = monitor.step_complete("Building", 0) and monitor.step_complete(
                "Building", 1
            )
            monitor.phase_finish("Building")
            if not is_wanted:
                self._log.log(Severity.ERROR, "Error Code 7: BuildCanceled")
                return None
            is_refittable = BuilderFlag.REFIT in config.flags
            return magic + _stub_plan(network.model, is_refittable=is_refittable)

    class Context:
        def __init__(self, engine: Any) -> None:
            self.engine = engine
            self._addresses: dict[str, int] = {}
            self._shapes: dict[str, tuple[int, ...]] = {}

        def set_optimization_profile_async(self, index: int, stream: int) -> bool:
            seen["profile"] = index
            return True

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            self._shapes[name] = tuple(shape)
            return True

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            zeros = {n: np.zeros(s, self.engine.dtypes[n]) for n, s in self._shapes.items()}
            names = [value.name for value in self.engine.model.graph.output]
            arrays = _evaluated(self.engine.evaluator, zeros)
            return tuple(arrays[names.index(name)].shape)

        def set_tensor_address(self, name: str, address: int) -> bool:
            self._addresses[name] = address
            return True

        def execute_async_v3(self, stream: int) -> bool:
            feeds = {
                name: _array_at(self._addresses[name], shape, self.engine.dtypes[name]).copy()
                for name, shape in self._shapes.items()
            }
            arrays = _evaluated(self.engine.evaluator, feeds)
            for value, array in zip(self.engine.model.graph.output, arrays, strict=True):
                address = self._addresses[value.name]
                _array_at(address, array.shape, array.dtype.name)[...] = array
            return True

    class Engine:
        streamable_weights_size = 0
        device_memory_size_v2 = 0

        def __init__(self, model: onnx.ModelProto) -> None:
            self.model = model
            self.refittable = model.producer_name == REFITTABLE
            self.evaluator = ReferenceEvaluator(model)
            self.dtypes = {
                value.name: onnx.helper.tensor_dtype_to_np_dtype(
                    value.type.tensor_type.elem_type
                ).name
                for value in (*model.graph.input, *model.graph.output)
            }

        def get_tensor_dtype(self, name: str) -> DataType:
            return DataType[DTYPES[self.dtypes[name]]]

        def get_tensor_location(self, name: str) -> Location:
            return Location.DEVICE

        def create_execution_context(self, config: Any = None) -> Context:
            seen["runtime_config"] = config
            return Context(self)

        def serialize(self) -> bytes:
            seen["refits"] = seen.get("refits", 0) + 1
            graph = self.model.SerializeToString()
            # Where the plans of TensorRT-RTX have their size.
            size = (len(magic) + len(graph)).to_bytes(8, "little")
            return magic[:0x10] + size * bool(magic) + magic[0x18:] + graph

        def create_runtime_config(self) -> Any:
            return types.SimpleNamespace(
                create_runtime_cache=lambda: RuntimeCache(),
                set_runtime_cache=lambda cache: True,
                cuda_graph_strategy=None,
            )

    class Refitter:
        """Takes weights for each initializer of the engine."""

        def __init__(self, engine: Engine, log: Any) -> None:
            self.engine = engine
            self.given: dict[str, onnx.TensorProto] = {}

        def get_missing_weights(self) -> list[str]:
            wanted = {tensor.name for tensor in self.engine.model.graph.initializer}
            return sorted(wanted - set(self.given))

        def refit_cuda_engine(self) -> bool:
            for tensor in self.engine.model.graph.initializer:
                tensor.CopyFrom(self.given[tensor.name])
            return True

    class ParserRefitter:
        num_errors = 1

        def __init__(self, refitter: Refitter, log: Any) -> None:
            self._refitter = refitter

        def get_error(self, index: int) -> Any:
            return types.SimpleNamespace(desc=lambda: "stub: weights of another size")

        def refit_from_bytes(self, graph: bytes, path: str) -> bool:
            model = onnx.load_model_from_string(graph)
            load_external_data_for_model(model, str(Path(path).parent))
            sizes = {
                one.name: list(one.dims) for one in self._refitter.engine.model.graph.initializer
            }
            self._refitter.given = {one.name: one for one in model.graph.initializer}
            return all(sizes.get(one.name) == list(one.dims) for one in model.graph.initializer)

    class RuntimeCache:
        def deserialize(self, data: bytes) -> bool:
            seen["caches"].append(data)
            return data == b"kernels"

        def serialize(self) -> bytes:
            return b"kernels"

    class Runtime:
        def __init__(self, log: Any) -> None:
            self._log = log

        def deserialize_cuda_engine(self, data: Any) -> Engine | None:
            content = bytes(data)
            try:
                if not content.startswith(magic):
                    raise ValueError("no magic")
                return Engine(onnx.load_model_from_string(content[len(magic) :]))
            except Exception as error:  # as the runtime does, it says so in its log
                self._log.log(Severity.ERROR, f"stub: {error}")
                return None

        def get_engine_validity(self, data: Any) -> tuple[str, int]:
            return "invalid", seen.get("diagnosis", 0)

    class Diagnostics(enum.IntEnum):
        VERSION_MISMATCH = 1
        UNSUPPORTED_CC = 2
        OLD_CUDA_DRIVER = 4
        OLD_CUDA_RUNTIME = 8
        INSUFFICIENT_GPU_MEMORY = 16
        MALFORMED_ENGINE = 32
        CUDA_ERROR = 64

    class Graphs(enum.IntEnum):
        DISABLED = 0
        WHOLE_GRAPH_CAPTURE = 1

    module.__version__ = version
    module.seen = seen
    module.ILogger = StubLogger
    module.IProgressMonitor = type("StubMonitor", (), {"__init__": lambda self: None})
    module.Builder, module.OnnxParser, module.Runtime = Builder, Parser, Runtime
    module.Refitter, module.OnnxParserRefitter = Refitter, ParserRefitter
    module.NetworkDefinitionCreationFlag, module.BuilderFlag = Flags, BuilderFlag
    module.TensorLocation = Location
    if is_rtx:
        module.EngineInvalidityDiagnostics, module.CudaGraphStrategy = Diagnostics, Graphs
    else:
        module.HardwareCompatibilityLevel = Levels
    return module  # type: ignore[no-any-return]


def _stub_plan(model: onnx.ModelProto, *, is_refittable: bool) -> bytes:
    kept = onnx.ModelProto()
    kept.CopyFrom(model)
    kept.producer_name = REFITTABLE if is_refittable else "stub"
    return kept.SerializeToString()


def _evaluated(evaluator: ReferenceEvaluator, feeds: dict[str, Any]) -> list[Any]:
    with np.errstate(all="ignore"):  # a sigmoid of a large half overflows on its way
        return list(evaluator.run(None, feeds))


def _array_at(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
