"""A compiled model of OpenVINO with one inference request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sdkit_dispatch.contract import Arrays, TensorSpec
from sdkit_dispatch.errors import RunError
from sdkit_dispatch.graph.tensors import check_feeds
from sdkit_openvino.runtime import ov, words_of


class OpenVinoSession:
    """A loaded engine.

    Inputs and outputs are addressed by position: an imported model may have lost their names
    (OpenVINO 2026.4 calls the input of a text encoder "/m/Reshape_output_0" after an import).
    """

    def __init__(
        self,
        compiled: ov.CompiledModel,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        facts: Mapping[str, str],
        blob: np.memmap[Any, np.dtype[np.uint8]],
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.facts: Mapping[str, str] = MappingProxyType(dict(facts))
        request = compiled.create_infer_request()
        self._request: ov.InferRequest | None = request
        # The request's own memory; asking for it anew takes longer than filling a small one.
        self._fed = [request.get_input_tensor(index).data for index in range(len(inputs))]
        # The compiled model reads its weights from the mapped file for as long as it lives, but
        # does not hold the mapping: without this reference a run is a segfault (2026.4.1).
        self._blob: np.memmap[Any, np.dtype[np.uint8]] | None = blob

    def run(self, feeds: Arrays) -> dict[str, Any]:
        check_feeds(self.inputs, feeds)
        request = self._request
        if request is None:
            raise RunError("openvino: the session is closed")
        try:
            # Copied into the request's own memory: cheaper than wrapping an array of this size
            # in a tensor, and a feed may be read-only or strided.
            for spec, memory in zip(self.inputs, self._fed, strict=True):
                memory[...] = feeds[spec.name]
            results = request.infer()  # copies, which nobody else holds
            return {spec.name: results[index] for index, spec in enumerate(self.outputs)}
        except Exception as error:  # the bindings raise more than RuntimeError
            raise RunError(f"openvino: {words_of(error)}") from error

    def warm_up(self) -> None:
        """Runs once on zeros: kernels are generated and weights repacked in the first run."""
        self.run({spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.inputs})

    def close(self) -> None:
        self._request = None
        self._fed = []
        self._blob = None
