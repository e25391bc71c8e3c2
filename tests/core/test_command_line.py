"""What the program does at its edges: closed streams, full devices, odd folders, Ctrl-C."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sdkit_dispatch.__main__ import guarded
from sdkit_dispatch.errors import ConfigError
from toy_pipeline import make_toy_pipeline

COMMAND = [sys.executable, "-m", "sdkit_dispatch"]
POSIX = pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline")


def run(*arguments: object, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, **settings
    )


def build(pipeline: Path) -> list[str]:
    return ["build", str(pipeline), "--vendor", "null", "--no-check", "-q"]


@POSIX
@pytest.mark.parametrize(
    ("streams", "code"), [("<&-", 0), ("2>&-", 0), (">&-", 0), ("> /dev/full", 4)]
)
def test_closed_and_full_streams_are_no_bugs(pipeline, streams, code):
    if "/dev/full" in streams and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    script = '"$0" "$@" ' + streams
    command = ["sh", "-c", script, *COMMAND, *build(pipeline)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "bug" not in done.stderr


@POSIX
def test_a_reader_that_stops_reading_is_no_bug():
    script = '"$0" "$@"; echo "code $?" >&2'
    command = ["sh", "-c", f"({script}) | true", *COMMAND, "plan", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.stderr.split()[-1] in ("0", "141")


def test_a_terminal_that_cannot_show_a_path_is_no_bug(pipeline, tmp_path):
    done = run(
        *("generate", "a fox", "-p", pipeline, "--vendor", "null", "--no-check", "--steps", 1),
        *("-q", "-o", tmp_path / "картина.png"),
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "картина.png").is_file()


@pytest.mark.parametrize("home", ["a file", "below a file"])
def test_a_home_that_is_no_folder_is_named_once(pipeline, tmp_path, home):
    (tmp_path / "file").write_text("x")
    place = tmp_path / "file" if home == "a file" else tmp_path / "file" / "home"
    done = run("--home", place, *build(pipeline))
    assert done.returncode in (2, 4), done.stderr
    assert str(place) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


@pytest.mark.parametrize("name", ["~nosuch/x", "a" * 300, "no\nsuch"])
def test_a_pipeline_path_that_cannot_exist_is_an_error_of_ours(name):
    done = run("build", name)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


@POSIX
def test_a_pipe_in_place_of_a_file_does_not_hang(pipeline, tmp_path):
    folder = make_toy_pipeline(tmp_path / "pipeline")
    (folder / "unet" / "config.json").unlink()
    os.mkfifo(folder / "unet" / "config.json")
    done = run("build", folder, timeout=60)
    assert done.returncode == 2
    assert "not a plain file" in done.stderr


def test_a_prompt_that_is_no_text_is_named(pipeline):
    if os.name == "nt":
        pytest.skip("Windows has no such arguments")
    done = subprocess.run(
        [*COMMAND, "generate", b"a\xffb", "-p", str(pipeline), "--vendor", "null"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "prompt" in done.stderr


def test_a_vendor_that_is_misspelt_in_a_profile_is_named(pipeline, tmp_path):
    profile = tmp_path / "mine.yaml"
    profile.write_text("options: {openvion: {map_weights: true}}\n")
    done = run(*build(pipeline), "--profile", profile)
    assert done.returncode == 2
    assert "openvino" in done.stderr


def heed_signals() -> None:
    """A shell's background job ignores one, nohup another, and so would what is started here."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@POSIX
@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_being_stopped_says_so_and_leaves_nothing(stop, pipeline, tmp_path):
    profile = tmp_path / "slow.yaml"
    profile.write_text("options: {null: {fault: wait_for_cancel}}\n")
    home = tmp_path / "home"
    arguments = ["build", str(pipeline), "--vendor", "null", "--profile", str(profile)]
    process = subprocess.Popen(
        [*COMMAND, "--home", str(home), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    for line in process.stderr:
        if "compile text_encoder" in line:
            break
    if stop == "SIGINT":  # of a terminal, to all that runs in it
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(getattr(signal, stop))
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130
    assert rest.endswith("cancelled; nothing half-built is left\n")
    assert not list((home / "tmp").iterdir())


TIDYING = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from sdkit_dispatch.__main__ import end_as_on_ctrl_c
end_as_on_ctrl_c()
try:
    os.kill(os.getpid(), signal.SIGHUP)
except KeyboardInterrupt:
    for again in (signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), again)
    print("tidied up")
"""


@POSIX
def test_being_stopped_twice_does_not_cut_the_tidying_up():
    done = subprocess.run(
        [sys.executable, "-c", TIDYING], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("tidied up\n", 0), done.stderr


@POSIX
def test_a_closed_terminal_may_be_survived():
    code = TIDYING.partition("try:")[0].replace("SIG_DFL", "SIG_IGN")
    code += "os.kill(os.getpid(), signal.SIGHUP)\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("went on\n", 0), done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (ConfigError("no"), 2), (OSError(5, "no"), 4), (KeyError(), 70)],
    ids=["stopped", "ours", "system", "bug"],
)
def test_a_terminal_that_is_gone_changes_no_exit_code(error, code, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    def fail() -> int:
        raise error

    monkeypatch.setattr("sys.stderr", Gone())
    monkeypatch.setattr("sdkit_dispatch.__main__._forget_output", lambda: None)
    assert guarded(fail) == code


def test_explaining_a_build_shows_what_its_vendor_says_and_a_dash_for_the_rest(pipeline, tmp_path):
    command = ["--home", tmp_path / "home", *build(pipeline), "--explain"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    heads = [index for index, line in enumerate(lines) if "compute buffer" in line]
    assert len(heads) == 1
    assert lines[heads[0] + 2].split() == ["unet", "-", "-", "-", "-"]
    rows = json.loads(run(*command, "--json").stdout)["build"]["components"]
    assert [row["explained"]["nodes"] for row in rows] == [None, None, None]
