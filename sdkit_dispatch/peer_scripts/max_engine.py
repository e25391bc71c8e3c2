"""MAX, Modular's engine: asked to load the exported graph, as its older releases could."""

from typing import Any

from peer_lines import serve


class Peer:
    def __init__(self, job: Any) -> None:
        self.job = job
        self.models: dict[str, Any] = {}

    def prepare(self) -> dict[str, Any]:
        from importlib.metadata import version

        from max import engine
        from max.driver import CPU

        session = engine.InferenceSession(devices=[CPU()])
        built, noes = [], []
        for component, part in self.job["components"].items():
            try:
                self.models[component] = session.load(part["onnx"])
                built.append(component)
            except Exception as error:
                words = " ".join(f"{type(error).__name__}: {error}".split())
                noes.append(f"{component}: {words[:250]}")
        runtime = f"modular {version('modular')}"
        return {
            "runtime": runtime,
            "components": built,
            "images": False,
            "note": "; ".join(noes),
            "failure": f"{runtime} cannot take the model: {'; '.join(noes)}",
        }

    def open(self, use: str) -> dict[str, Any]:
        self.prepare()
        return {name: {"device": "cpu", "precision": "fp32"} for name in self.models}

    def compute(self, component: str, feeds: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        outputs = self.models[component].execute(*feeds.values())
        return {f"output{index}": np.asarray(one) for index, one in enumerate(outputs)}


if __name__ == "__main__":
    serve(Peer)
