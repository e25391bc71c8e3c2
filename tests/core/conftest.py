import shutil

import pytest

from sdkit_dispatch import reference
from sdkit_dispatch.contract import no_report
from toy_bench import Bench, new_workers
from toy_pipeline import make_toy_pipeline


@pytest.fixture
def null_is_the_reference(monkeypatch):
    """A bare machine has no ONNX Runtime; the null vendor evaluates graphs correctly."""
    monkeypatch.setattr(reference, "VENDOR", "null")
    monkeypatch.setattr(reference, "OPTIONS", {})


@pytest.fixture
def refuge_of_its_own(tmp_path_factory, monkeypatch):
    """A store that retreats finds nobody else's engines in the temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def pipeline(tmp_path):
    return make_toy_pipeline(tmp_path / "pipeline", external=True)


@pytest.fixture(scope="session")
def recorded_bench(tmp_path_factory):
    """Workers for all tests, and a home in which the reference was recorded."""
    folder = tmp_path_factory.mktemp("shared")
    with new_workers(folder / "home") as workers:
        bench = Bench(folder / "home", workers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "VENDOR", "null")
            patch.setattr(reference, "OPTIONS", {})
            toy = make_toy_pipeline(folder / "pipeline", external=True)
            bench.builder().build(bench.want(toy), [bench.plan()], no_report)
        yield bench


@pytest.fixture
def bench(tmp_path, recorded_bench):
    home = tmp_path / "home"
    shutil.copytree(recorded_bench.store.home / "references", home / "references")
    return Bench(home, recorded_bench.workers)
