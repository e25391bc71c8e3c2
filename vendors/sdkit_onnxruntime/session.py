"""A loaded engine of any execution provider."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort

from sdkit_dispatch.contract import Arrays, TensorSpec
from sdkit_dispatch.errors import RunError
from sdkit_dispatch.graph.tensors import check_feeds


class OrtSession:
    """An inference session of ONNX Runtime behind the contract."""

    def __init__(
        self,
        vendor: str,
        session: ort.InferenceSession,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        facts: Mapping[str, str],
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.facts: Mapping[str, str] = MappingProxyType(dict(facts))
        self._vendor = vendor
        self._session: ort.InferenceSession | None = session
        self._names = [spec.name for spec in outputs]

    def run(self, feeds: Arrays) -> dict[str, Any]:
        check_feeds(self.inputs, feeds)
        if self._session is None:
            raise RunError(f"{self._vendor}: the session is closed")
        try:
            # ONNX Runtime allocates the outputs of every run anew.
            arrays = self._session.run(self._names, dict(feeds))
        except Exception as error:  # the bindings raise a dozen classes that share no base
            raise RunError(f"{self._vendor}: {error}") from error
        return dict(zip(self._names, arrays, strict=True))

    def warm_up(self) -> None:
        """Runs once on zeros: kernels are chosen in the first run."""
        self.run({spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.inputs})

    def close(self) -> None:
        self._session = None
