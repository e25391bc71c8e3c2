"""Apache TVM: ONNX into Relax, LLVM for this processor, untuned.

Its ONNX frontend wants shapes folded away, so ONNX Runtime folds them first.
"""

from pathlib import Path
from typing import Any

from peer_lines import serve

TRIED = ("text_encoder", "unet", "vae_decoder")


class Peer:
    def __init__(self, job: Any) -> None:
        self.job = job
        self.machines: dict[str, Any] = {}

    def library(self, component: str) -> Path:
        sizes = "-".join(
            "x".join(map(str, shape))
            for shape in self.job["components"][component]["shapes"].values()
        )
        return Path(self.job["work"]) / f"{component}-{sizes}.so"

    def prepare(self) -> dict[str, Any]:
        import tvm

        built, noes = [], []
        was_there = all(self.library(name).is_file() for name in self.job["components"])
        for component in self.job["components"]:
            try:
                if not self.library(component).is_file():
                    self.build(component)
                built.append(component)
            except Exception as error:
                words = " ".join(f"{type(error).__name__}: {error}".split())
                noes.append(f"{component}: {words[-250:]}")
        return {
            "runtime": f"apache-tvm {tvm.__version__}",
            "components": built,
            "images": False,
            "was_there": was_there,
            "bytes": sum(self.library(name).stat().st_size for name in built),
            "note": "; ".join(["Relax, LLVM, untuned", *noes]),
            "failure": "; ".join(noes),
        }

    def build(self, component: str) -> None:
        import onnx
        import onnxruntime as ort
        import tvm
        from tvm import relax
        from tvm.relax.frontend.onnx import from_onnx

        part = self.job["components"][component]
        folded = Path(self.job["work"]) / f"{component}.onnx"
        model = onnx.load(part["onnx"])
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, part["shapes"][value.name], strict=True):
                dim.Clear()
                dim.dim_value = size
        onnx.save(model, folded)
        settings = ort.SessionOptions()
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        settings.optimized_model_filepath = str(folded)
        settings.log_severity_level = 3
        ort.InferenceSession(str(folded), settings, providers=["CPUExecutionProvider"])
        model = onnx.load(folded)
        module = from_onnx(model, shape_dict=part["shapes"], keep_params_in_input=False)
        module = relax.transform.DecomposeOpsForInference()(module)
        target = tvm.target.Target({"kind": "llvm", "mcpu": _processor()})
        module = relax.get_pipeline("zero")(module)
        compiled = tvm.compile(module, target=target)
        compiled.export_library(str(self.library(component)))

    def open(self, use: str) -> dict[str, Any]:
        import tvm
        from tvm import relax

        for component in self.job["components"]:
            if self.library(component).is_file():
                loaded = tvm.runtime.load_module(str(self.library(component)))
                self.machines[component] = relax.VirtualMachine(loaded, tvm.cpu())
        return {name: {"device": "cpu", "precision": "fp32"} for name in self.machines}

    def compute(self, component: str, feeds: dict[str, Any]) -> dict[str, Any]:
        import tvm

        names = self.job["components"][component]["shapes"]
        inputs = [tvm.runtime.tensor(feeds[name]) for name in names]
        result = self.machines[component]["main"](*inputs)
        first = result[0] if not hasattr(result, "numpy") else result
        return {self.first_output(component): first.numpy()}

    def first_output(self, component: str) -> str:
        import onnx

        path = self.job["components"][component]["onnx"]
        return str(onnx.load(path, load_external_data=False).graph.output[0].name)


def _processor() -> str:
    import tvm

    finder = tvm.get_global_func("target.llvm_get_system_cpu", allow_missing=True)
    return str(finder()) if finder is not None else "generic"


if __name__ == "__main__":
    serve(Peer)
