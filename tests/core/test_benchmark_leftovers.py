"""`bench clean`: what benchmarks leave goes, engines and vendors stay, a running one is spared."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sdkit_dispatch.benchmark.leftovers import (
    benchmark_files_in_use,
    leftovers,
    remove_leftovers,
)
from sdkit_dispatch.cli import app
from sdkit_dispatch.contract import no_report
from sdkit_dispatch.errors import ConfigError

LEFT = {
    "suites/sd15/unet/model.onnx.data": 4000,
    "suites/sd15-1.safetensors": 2000,
    "suites/sd15.lock": 0,
    "suites/.sdxl-killed/unet/model.onnx.data": 500,
    "scratch/peers/openvino-genai/0123/ir/model.bin": 3000,
    "env/peer-openvino-genai/3/lib/library.so": 1000,
}
OTHERS = {
    "env/openvino/1/lib/library.so": 700,
    "engines/ab/abcd/manifest.json": 2,
    "scratch/digests/one.json": 2,
    "references/one.npz": 9,
}
HOLDING = """
import sys
from pathlib import Path
from sdkit_dispatch.benchmark.leftovers import benchmark_files_in_use
with benchmark_files_in_use(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def full_home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    for name, size_bytes in {**LEFT, **OTHERS}.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_bytes))
    return home


def names_of(rows) -> list[tuple[str, str, int]]:
    return [(row.what, row.name, row.size_bytes) for row in rows]


def invoke(home: Path, *args: str):
    return CliRunner().invoke(app, ["--home", str(home), "bench", "clean", *args])


def test_what_there_is_is_listed_the_largest_first(full_home):
    assert names_of(leftovers(full_home, environments=True)) == [
        ("suite", "sd15", 4000),
        ("peer", "openvino-genai", 3000),
        ("suite", "sd15-1.safetensors", 2000),
        ("environment", "peer-openvino-genai", 1000),
        ("suite", ".sdxl-killed", 500),
    ]
    assert "environment" not in {row.what for row in leftovers(full_home, environments=False)}


def test_a_home_without_any_is_empty(tmp_path):
    assert leftovers(tmp_path / "none", environments=True) == []
    assert remove_leftovers(tmp_path / "none", [], report=no_report) == []
    assert not (tmp_path / "none").exists()


def test_they_go_and_nothing_else_does(full_home):
    done = remove_leftovers(full_home, leftovers(full_home, environments=True), report=no_report)
    assert not [row for row in done if row.kept]
    assert leftovers(full_home, environments=True) == []
    for name, size_bytes in OTHERS.items():
        assert (full_home / name).stat().st_size == size_bytes


def test_a_link_goes_and_what_it_points_to_stays(full_home, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.onnx").write_bytes(b"theirs")
    (full_home / "suites" / "linked").symlink_to(tmp_path / "elsewhere")
    remove_leftovers(full_home, leftovers(full_home, environments=False), report=no_report)
    assert not (full_home / "suites" / "linked").is_symlink()
    assert (tmp_path / "elsewhere" / "model.onnx").read_bytes() == b"theirs"


def test_nothing_goes_while_a_benchmark_runs(full_home):
    command = [sys.executable, "-c", HOLDING, str(full_home)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        refused = invoke(full_home)
        assert isinstance(refused.exception, ConfigError)
        assert "a benchmark is running" in refused.exception.message
        assert (full_home / "suites" / "sd15").is_dir()
        process.kill()  # the operating system lets go
    assert invoke(full_home).exit_code == 0
    assert not (full_home / "suites" / "sd15").exists()


def test_two_benchmarks_may_run_at_once(full_home):
    rows = leftovers(full_home, environments=True)
    with (
        benchmark_files_in_use(full_home),
        benchmark_files_in_use(full_home),
        pytest.raises(ConfigError),
    ):
        remove_leftovers(full_home, rows, report=no_report)
    assert remove_leftovers(full_home, rows, report=no_report) == rows


@pytest.mark.skipif(os.name == "nt", reason="what is open there cannot be removed")
def test_no_benchmark_starts_during_a_removal(full_home, monkeypatch):
    rows = leftovers(full_home, environments=False)
    refused = []

    def start_one_meanwhile(path: Path, **settings) -> None:
        with (
            pytest.raises(ConfigError, match="are being removed"),
            benchmark_files_in_use(full_home),
        ):
            pass
        refused.append(path)

    monkeypatch.setattr("shutil.rmtree", start_one_meanwhile)
    remove_leftovers(full_home, rows, report=no_report)
    assert refused


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_a_file_system_without_locks_is_not_a_running_benchmark(full_home, monkeypatch):
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with benchmark_files_in_use(full_home):
        pass
    rows = leftovers(full_home, environments=False)
    with pytest.raises(ConfigError, match="has no locks") as found:
        remove_leftovers(full_home, rows, report=no_report)
    assert "by hand" in found.value.hint
    assert (full_home / "suites" / "sd15").is_dir()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with benchmark_files_in_use(tmp_path / "file"):
        pass


def test_what_cannot_be_removed_says_why(full_home, monkeypatch):
    def refuse(path: Path, **settings) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    answer = invoke(full_home)
    assert answer.exit_code == 4
    assert "sd15; it stays: Permission denied" in answer.stdout
    # The one that is a file went.
    assert "0.0 MB  freed" in answer.stdout
    assert not (full_home / "suites" / "sd15-1.safetensors").exists()


@pytest.mark.parametrize("name", ["suites/sd15", "scratch/peers/openvino-genai"])
def test_half_of_one_is_not_taken_for_it(name, full_home, monkeypatch):
    """A mock of a kill: the second file of a folder is not reached."""
    (full_home / name / "second").write_bytes(b"2")
    real = shutil.rmtree

    def killed(path: Path, **settings) -> None:
        next(file for file in path.rglob("*") if file.is_file()).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    rows = [row for row in leftovers(full_home, environments=False) if row.path.endswith(name)]
    with pytest.raises(KeyboardInterrupt):
        remove_leftovers(full_home, rows, report=no_report)
    assert not (full_home / name).exists()
    monkeypatch.setattr("shutil.rmtree", real)
    remove_leftovers(full_home, leftovers(full_home, environments=False), report=no_report)
    assert leftovers(full_home, environments=False) == []


def test_a_dry_run_removes_nothing(full_home):
    document = json.loads(invoke(full_home, "--dry-run", "--environments", "--json").stdout)
    assert document["dry_run"]
    assert document["freed_bytes"] == sum(LEFT.values())
    assert {row["what"] for row in document["files"]} == {"suite", "peer", "environment"}
    for name in LEFT:
        assert (full_home / name).exists()


def test_what_suites_take_is_in_du(full_home):
    answer = CliRunner().invoke(app, ["--home", str(full_home), "cache", "du", "--json"])
    assert json.loads(answer.stdout)["other_bytes"]["suites"] == 6500
