"""A loaded engine: the host's integers in numpy, everything else on the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sdkit_dispatch.contract import Arrays, TensorSpec
from sdkit_dispatch.errors import RunError
from sdkit_dispatch.graph.tensors import check_feeds
from sdkit_ggml.compiler.evaluate import EVALUATE
from sdkit_ggml.program import Program
from sdkit_ggml.runtime.executor import Executor


class GgmlSession:
    """A loaded engine."""

    def __init__(self, program: Program, executor: Executor, facts: Mapping[str, str]) -> None:
        self.inputs: tuple[TensorSpec, ...] = program.inputs
        self.outputs: tuple[TensorSpec, ...] = program.outputs
        self.facts: Mapping[str, str] = MappingProxyType(dict(facts))
        self._program = program
        self._executor: Executor | None = executor
        self._constants = {
            name: np.array(one.values, one.dtype).reshape(one.shape)
            for name, one in program.constants.items()
        }

    def run(self, feeds: Arrays) -> dict[str, Any]:
        check_feeds(self.inputs, feeds)
        executor = self._executor
        if executor is None:
            raise RunError("ggml: the session is closed")
        values = self._host(feeds)
        computed = executor.run(values)
        results = {}
        for spec in self.outputs:
            array = computed[spec.name] if spec.name in computed else values[spec.name]
            results[spec.name] = np.array(array, spec.dtype).reshape(spec.shape)
        return results

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def _host(self, feeds: Arrays) -> dict[str, Any]:
        values = {**self._constants, **feeds}
        for step in self._program.host:
            inputs = [values[name] if name else None for name in step.inputs]
            try:
                result = EVALUATE[step.op_type](*inputs, **step.attributes)
            except ValueError as error:
                raise RunError(f"ggml: {step.op_type} of {list(step.inputs)}: {error}") from error
            outputs = result if isinstance(result, tuple) else (result,)
            values.update(zip(step.outputs, outputs, strict=False))
        return values
