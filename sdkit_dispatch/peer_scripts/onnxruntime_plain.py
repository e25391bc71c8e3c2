"""ONNX Runtime as it comes: the exported graph, sizes free, every optimisation on."""

from typing import Any

from peer_lines import serve


class Peer:
    def __init__(self, job: Any) -> None:
        self.job = job
        self.sessions: dict[str, Any] = {}

    def prepare(self) -> dict[str, Any]:
        import onnxruntime as ort

        return {
            "runtime": f"onnxruntime {ort.__version__}",
            "components": list(self.job["components"]),
            "images": False,
            "note": "the exported graph, CPUExecutionProvider",
        }

    def open(self, use: str) -> dict[str, Any]:
        import onnxruntime as ort

        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        if self.job["threads"]:
            settings.intra_op_num_threads = self.job["threads"]
        for name, part in self.job["components"].items():
            self.sessions[name] = ort.InferenceSession(
                part["onnx"], settings, providers=["CPUExecutionProvider"]
            )
        device = {"device": "cpu", "precision": "fp32"}
        return dict.fromkeys(self.sessions, device)

    def compute(self, component: str, feeds: dict[str, Any]) -> dict[str, Any]:
        session = self.sessions[component]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, feeds), strict=True))


if __name__ == "__main__":
    serve(Peer)
