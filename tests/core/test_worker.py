"""A worker process is asked, cancelled, crashed and outlived, with the null vendor."""

import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest

from sdkit_dispatch.contract import (
    BuildRequest,
    Device,
    Engine,
    Progress,
    Rejection,
    no_report,
)
from sdkit_dispatch.errors import (
    CancelledByUser,
    CompileError,
    ConfigError,
    RunError,
    UnsupportedOpError,
    WorkerError,
)
from sdkit_dispatch.wire import Frame, read_frame
from sdkit_dispatch.worker import _Channel
from sdkit_dispatch.worker_client import WorkerClient
from sdkit_dispatch.worker_process import WorkerSettings
from sdkit_null import SPEC

CPU = Device(id="cpu", kind="cpu", maker="unknown", name="a processor")
OPTIONS = {
    "fault": "none",
    "only_component": "",
    "only_precision": "",
    "compile_steps": 3,
    "target": "",
}


@pytest.fixture
def client():
    with WorkerClient(SPEC) as running:
        yield running


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])
    node = onnx.helper.make_node("Mul", ["x", "x"], ["y"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "square", [value], [result]),
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=9,
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return path


def request_with(client: WorkerClient, **options: object) -> BuildRequest:
    plan = client.plan(CPU, None, {**OPTIONS, **options})
    assert not isinstance(plan, Rejection)
    return BuildRequest(
        vendor="null",
        revision=SPEC.revision,
        runtime=plan.runtime,
        target=plan.target,
        component="unet",
        graph_digest="",
        weights_digest="",
        precision=plan.precision,
        shapes={"x": (2, 3)},
        options=plan.options,
    )


def compiled(client: WorkerClient, graph: Path, out: Path, **options: object) -> Engine:
    request = request_with(client, **options)
    out.mkdir()
    client.compile(request, graph, out, device=CPU, report=no_report)
    return Engine(key=request.key, request=request, folder=str(out), onnx=str(graph))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_component_is_compiled_loaded_and_run_in_the_worker(client, graph, tmp_path):
    engine = compiled(client, graph, tmp_path / "out")
    session = client.load(engine, CPU)
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    assert [(spec.name, spec.dtype, spec.shape) for spec in session.inputs] == [
        ("x", "float32", (2, 3))
    ]
    np.testing.assert_allclose(session.run({"x": x})["y"], x * x)
    session.close()
    session.close()
    with pytest.raises(RunError, match="not open"):
        session.run({"x": x})


def test_what_a_library_prints_on_stdout_does_not_reach_the_wire(client, graph, tmp_path):
    engine = compiled(client, graph, tmp_path / "out", fault="print_to_stdout")
    session = client.load(engine, CPU)
    assert session.run({"x": np.ones((2, 3), np.float32)})["y"].sum() == 6


def test_errors_come_back_as_the_same_class(client, graph, tmp_path):
    with pytest.raises(UnsupportedOpError, match="Frobnicate, Wibble"):
        compiled(client, graph, tmp_path / "a", fault="unsupported_op")
    with pytest.raises(CompileError, match="refuses this graph"):
        compiled(client, graph, tmp_path / "b", fault="compile_error")
    with pytest.raises(ConfigError, match="falt"):
        client.plan(CPU, None, {"falt": "none"})
    compiled(client, graph, tmp_path / "c")  # the worker still serves


def test_a_crash_is_a_worker_error_with_the_end_of_the_log(client, graph, tmp_path):
    with pytest.raises(WorkerError, match=r"(?s)died in 'compile'.*crashing in compile of unet"):
        compiled(client, graph, tmp_path / "out", fault="crash_on_compile")
    with pytest.raises(WorkerError, match="died"):
        client.probe(CPU)


def test_a_hang_is_killed_after_its_timeout(graph, tmp_path):
    settings = WorkerSettings(timeouts_s={"compile": 0.3})
    with WorkerClient(SPEC, settings=settings) as client:
        with pytest.raises(WorkerError, match=r"'compile' took longer than 0.3 s"):
            compiled(client, graph, tmp_path / "out", fault="hang_on_compile")
        assert not is_alive(client.pid)


def test_cancelling_stops_the_work_and_keeps_the_worker(client, graph, tmp_path):
    phases = []

    def cancel_at_third(progress: Progress) -> None:
        phases.append(progress.phase)
        if len(phases) == 3:
            raise CancelledByUser

    request = request_with(client, fault="wait_for_cancel")
    with pytest.raises(CancelledByUser):
        client.compile(request, graph, tmp_path, device=CPU, report=cancel_at_third)
    compiled(client, graph, tmp_path / "out")


def test_quick_steps_of_an_image_do_not_cost_the_caller_a_frame_each():
    steps = 1000

    class MockDesk:
        def __init__(self) -> None:
            self.methods = {"generate": self.work, "compile": self.work}

        def work(self, params, arrays, report):
            for phase in ("denoise", "decode"):
                for index in range(steps + 1):
                    report(Progress(phase=phase, fraction=index / steps))
            return {}, {}

    def frames_of(method: str) -> list[tuple[str, float]]:
        sent = io.BytesIO()
        channel = _Channel(io.BytesIO(), sent)
        channel.answer(Frame(header={"id": 1, "method": method, "params": {}}), MockDesk())
        sent.seek(0)
        told = [frame.header for frame in iter(lambda: read_frame(sent), None)]
        assert "result" in told[-1]
        return [(one["progress"]["phase"], one["progress"]["fraction"]) for one in told[:-1]]

    frames = frames_of("generate")
    assert len(frames) < steps
    for phase in ("denoise", "decode"):
        fractions = [fraction for name, fraction in frames if name == phase]
        assert (fractions[0], fractions[-1]) == (0, 1)
    assert len(frames_of("compile")) == 2 * (steps + 1)


INTERRUPTED = """
import signal, sys
from pathlib import Path
from sdkit_dispatch import worker_process
from sdkit_dispatch.contract import no_report
from sdkit_dispatch.worker_client import WorkerClient
from test_worker import CPU, SPEC, request_with

worker_process.CANCEL_GRACE_S = 0.3
signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C, in time
with WorkerClient(SPEC) as client:
    request = request_with(client, fault="hang_on_compile")
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        client.compile(request, Path(sys.argv[1]), Path(sys.argv[2]), device=CPU, report=no_report)
    except KeyboardInterrupt:
        print("interrupted", client.pid)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a POSIX timer as the user")
def test_ctrl_c_kills_a_worker_that_does_not_listen(graph, tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(graph), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    words = done.stdout.split()
    assert words[:1] == ["interrupted"], done.stderr
    assert not is_alive(int(words[1]))


@pytest.mark.parametrize("sin", ["sleep in Python", "compute with the interpreter lock held"])
def test_a_worker_dies_with_its_caller(sin, tmp_path):
    """The caller is killed, so it can run no clean-up."""
    if sin.startswith("compute") and sys.platform != "linux":
        pytest.skip("only Linux can end a process that holds the interpreter lock")
    package = tmp_path / "sdkit_sinner"
    package.mkdir()
    wait = (
        "ctypes.PyDLL(None).sleep(600)" if sin.startswith("compute") else "threading.Event().wait()"
    )
    (package / "__init__.py").write_text("")
    (package / "adapter.py").write_text(
        textwrap.dedent(
            f"""
            import ctypes, sys, threading
            class Adapter:
                def probe(self, device):
                    print("PROBING", file=sys.stderr, flush=True)
                    {wait}
            """
        )
    )
    caller = textwrap.dedent(
        """
        import logging, sys
        from dataclasses import replace
        from sdkit_dispatch.contract import Device
        from sdkit_dispatch.worker_client import WorkerClient
        from sdkit_null import SPEC
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
        client = WorkerClient(replace(SPEC, adapter="sdkit_sinner.adapter:Adapter"))
        print("pid", client.pid, flush=True)
        client.probe(Device(id="cpu", kind="cpu", maker="x", name="x"))
        """
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", caller],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    pid = int(process.stdout.readline().split()[1])
    assert any("PROBING" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout.read() == ""  # the worker held the caller's stdout? then this waits
    process.stdout.close()
    for _ in range(200):
        if not is_alive(pid):
            break
        subprocess.run([sys.executable, "-c", ""], check=True)  # passes time without sleeping
    assert not is_alive(pid)


def test_an_isolated_worker_sees_our_packages_and_nothing_else_of_the_caller(tmp_path):
    """`typer` is installed beside us here; a bare interpreter must not find it."""
    probe = tmp_path / "sdkit_prober"
    probe.mkdir()
    (probe / "__init__.py").write_text("")
    (probe / "adapter.py").write_text(
        textwrap.dedent(
            """
            import importlib.util
            class Adapter:
                def probe(self, device):
                    names = ("sdkit_dispatch", "sdkit_prober", "sdkit_null", "typer")
                    return " ".join(n for n in names if importlib.util.find_spec(n))
            """
        )
    )
    caller = textwrap.dedent(
        """
        import sys
        from dataclasses import replace
        from pathlib import Path
        from sdkit_dispatch.contract import Device
        from sdkit_dispatch.worker_client import WorkerClient
        from sdkit_null import SPEC
        spec = replace(SPEC, adapter="sdkit_prober.adapter:Adapter")
        with WorkerClient(spec, python=Path(sys.argv[1]), is_isolated=True) as client:
            print(client.probe(Device(id="cpu", kind="cpu", maker="x", name="x")))
        """
    )
    bare = tmp_path / "bare environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = bare / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    # The one package that our worker side needs before any tensor is sent.
    import msgspec

    site = next(bare.rglob("site-packages"))
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", caller, str(python)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.stdout.split() == ["sdkit_dispatch", "sdkit_prober"], done.stderr


def test_a_python_that_does_not_exist_is_a_worker_error(tmp_path):
    with pytest.raises(WorkerError, match="cannot be started"):
        WorkerClient(SPEC, python=tmp_path / "no python")
