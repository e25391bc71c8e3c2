"""XLA through JAX: the only public way from ONNX is jaxonnxruntime, an experiment of Google's."""

from typing import Any

from peer_lines import serve


class Peer:
    def __init__(self, job: Any) -> None:
        self.job = job
        self.functions: dict[str, Any] = {}

    def prepare(self) -> dict[str, Any]:
        from importlib.metadata import version

        import jax

        built, noes = [], []
        for component in self.job["components"]:
            try:
                self.build(component)
                built.append(component)
            except Exception as error:
                words = " ".join(f"{type(error).__name__}: {error}".split())
                noes.append(f"{component}: {words[-250:]}")
        versions = f"jax {jax.__version__}, jaxonnxruntime {version('jaxonnxruntime')}"
        return {
            "runtime": versions,
            "components": built,
            "images": False,
            "note": "; ".join(noes),
            "failure": f"{versions} cannot take the model: {'; '.join(noes)}",
        }

    def build(self, component: str) -> None:
        import jax
        import numpy as np
        import onnx
        from jaxonnxruntime import config
        from jaxonnxruntime.call_onnx import call_onnx_model

        config.update("jaxort_only_allow_initializers_as_static_args", False)
        part = self.job["components"][component]
        model = onnx.load(part["onnx"])
        with np.load(part["feeds"], allow_pickle=False) as arrays:
            feeds = dict(arrays)
        function, weights = call_onnx_model(model, feeds)
        compiled = jax.jit(function)
        compiled(weights, feeds)
        names = [output.name for output in model.graph.output]
        self.functions[component] = (compiled, weights, names)

    def open(self, use: str) -> dict[str, Any]:
        for component in self.job["components"]:
            self.build(component)
        return {name: {"device": "cpu", "precision": "fp32"} for name in self.functions}

    def compute(self, component: str, feeds: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        compiled, weights, names = self.functions[component]
        outputs = compiled(weights, feeds)
        return {name: np.asarray(value) for name, value in zip(names, outputs, strict=True)}


if __name__ == "__main__":
    serve(Peer)
