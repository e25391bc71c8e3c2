"""A loaded module with its weights on the processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import iree.runtime as rt
import numpy as np

from sdkit_dispatch.contract import Arrays, TensorSpec
from sdkit_dispatch.errors import RunError
from sdkit_dispatch.graph.tensors import check_feeds
from sdkit_iree.graph_file import ENTRY, SCOPE


class IreeSession:
    """A loaded engine; inputs and outputs are addressed by position, the module names none."""

    def __init__(
        self,
        device: Any,  # Any: a HalDevice
        module: bytes,
        weights: Path,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        facts: Mapping[str, str],
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.facts: Mapping[str, str] = MappingProxyType(dict(facts))
        instance = rt.VmInstance()
        code = rt.VmModule.copy_buffer(instance, module)
        modules = [rt.create_hal_module(instance, device)]
        index = rt.ParameterIndex()
        index.load(str(weights))
        if len(index):
            provider = index.create_provider(scope=SCOPE)
            modules.append(rt.create_io_parameters_module(instance, provider))
        context = rt.VmContext(instance, [*modules, code])
        function = code.lookup_function(ENTRY)
        if function is None:
            raise ValueError(f"the module has no function {ENTRY}: {code.function_names}")
        self._function: Any = rt.FunctionInvoker(context, device, function)

    def run(self, feeds: Arrays) -> dict[str, Any]:
        check_feeds(self.inputs, feeds)
        if self._function is None:
            raise RunError("iree: the session is closed")
        try:
            results = self._function(*(np.require(feeds[s.name], None, "C") for s in self.inputs))
            results = results if isinstance(results, tuple) else (results,)
            # Copied, and the device's own arrays dropped here: one that outlives its device was
            # seen to end the process with SIGSEGV (3.13).
            arrays = [np.array(one.to_host()) for one in results]
        except Exception as error:  # the bindings raise ValueError, RuntimeError and more
            raise RunError(f"iree: {error}") from error
        return {spec.name: array for spec, array in zip(self.outputs, arrays, strict=True)}

    def see_output_sizes(self) -> None:
        """Runs once on zeros, for a graph whose output sizes could not be inferred."""
        outputs = self.run({spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.inputs})
        self.outputs = tuple(
            TensorSpec(name=spec.name, dtype=spec.dtype, shape=outputs[spec.name].shape)
            for spec in self.outputs
        )

    def close(self) -> None:
        self._function = None
