from __future__ import annotations

import os
import select
import shutil
import sys
from pathlib import Path

import pytest

from sdkit_dispatch.contract import Progress
from sdkit_dispatch.env.install_plan import InstallPlan, PlannedPackage
from sdkit_dispatch.env.progress import install_progress
from sdkit_dispatch.env.room import check_room, existing_folder, size_in_words
from sdkit_dispatch.env.tools import (
    DiskFullError,
    Tool,
    clean_environment,
    find_tool,
    newer_pip,
    run_tool,
)
from sdkit_dispatch.errors import CancelledByUser, VendorEnvError


def ignore(progress: Progress) -> None:
    pass


def phase(line: str) -> Progress:
    return Progress(phase=line or "silent")


def run(code: str, tmp_path: Path, **options: object) -> None:
    settings = {"environment": os.environ, "folder": tmp_path, "report": ignore, "progress": phase}
    run_tool([sys.executable, "-c", code], **{**settings, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "HTTPS_PROXY",
        "SSL_CERT_FILE",
        "PATH",
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_CERT",
        "PIP_CONFIG_FILE",
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "UV_INDEX_COMPANY_PASSWORD",
        "UV_CACHE_DIR",
    ],
)
def test_what_leads_to_the_index_reaches_the_installer(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "kept")
    assert clean_environment(tmp_path)[name] == "kept"


@pytest.mark.parametrize(
    "name",
    [
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_CONSTRAINT",
        "PIP_NO_BINARY",
        "PIP_PRE",
        "UV_SYSTEM_PYTHON",
        "UV_PRERELEASE",
        "UV_OVERRIDE",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ],
)
def test_what_changes_the_result_does_not_reach_the_installer(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "removed")
    assert "removed" not in clean_environment(tmp_path).values()


def test_temporary_files_go_beside_the_environment(tmp_path: Path) -> None:
    variables = clean_environment(tmp_path)
    assert {variables[name] for name in ("TMPDIR", "TEMP", "TMP")} == {str(tmp_path)}


def test_offline_installer_hears_of_no_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "index")
    monkeypatch.setenv("UV_FIND_LINKS", "index")
    variables = clean_environment(tmp_path, is_offline=True)
    assert "index" not in variables.values()
    assert variables["PIP_CONFIG_FILE"] == os.devnull


def test_pip_is_used_where_only_pip_knows_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))
    try:
        find_tool("uv"), find_tool("pip")
    except VendorEnvError as error:
        pytest.skip(f"needs both uv and pip: {error.message}")
    assert find_tool().name == "uv"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = file:///mirror\n", "utf-8")
    assert find_tool().name == "pip"
    assert find_tool(is_offline=True).name == "uv"
    (tmp_path / "uv.toml").write_text('[[index]]\nurl = "file:///mirror"\n', "utf-8")
    assert find_tool().name == "uv"
    (tmp_path / "uv.toml").unlink()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///mirror")
    assert find_tool().name == "pip"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "file:///mirror")
    assert find_tool().name == "uv"


def test_old_pip_is_replaced_before_it_downloads_everything_to_know_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # An installer that only pretends to be an old pip: it "fetches" an empty wheel.
    script = tmp_path / "fake_pip.py"
    script.write_text(
        "import sys, pathlib\n"
        "folder = sys.argv[sys.argv.index('-d') + 1]\n"
        "assert sys.argv[-1] == 'pip>=23.3', sys.argv\n"
        "(pathlib.Path(folder) / 'pip-30.1-py3-none-any.whl').touch()\n",
        "utf-8",
    )
    old = Tool(name="pip", command=(sys.executable, str(script)), version=(23, 2))
    new = newer_pip(old, tmp_path, environment=os.environ, report=ignore)
    assert new.version == (30, 1)
    assert new.wheel == tmp_path / "pip-30.1-py3-none-any.whl"
    assert newer_pip(new, tmp_path, environment=os.environ, report=ignore) is new


def test_lines_of_the_installer_are_reported_as_they_come(tmp_path: Path) -> None:
    seen: list[str] = []
    run("print('one'); print('two é')", tmp_path, report=lambda p: seen.append(p.phase))
    assert [line for line in seen if line != "silent"][0] == "one"


def test_failing_installer_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(VendorEnvError, match="(?s)ended with code 3:.*no such package") as caught:
        run("import sys; print('no such package', file=sys.stderr); sys.exit(3)", tmp_path)
    assert not isinstance(caught.value, DiskFullError)
    with pytest.raises(VendorEnvError, match="cannot be started"):
        run_tool(
            [str(tmp_path / "none")],
            environment={},
            folder=tmp_path,
            report=ignore,
            progress=phase,
        )


@pytest.mark.parametrize(
    "words",
    [
        "OSError: [Errno 28] No space left on device",
        "failed to write to file: No space left on device (os error 28)",
        "There is not enough space on the disk. (os error 112)",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
)
def test_full_disk_is_recognised_in_the_words_of_the_installer(tmp_path: Path, words: str) -> None:
    with pytest.raises(DiskFullError):
        run(f"print({words!r}); raise SystemExit(1)", tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in a folder")
def test_cancelled_installer_is_ended_with_its_children(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held_by_child = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def cancel(progress: Progress) -> None:
        if progress.phase == "ready":
            raise CancelledByUser

    child = (
        f"import signal; f = open({str(fifo)!r}, 'w'); print('ready', flush=True); signal.pause()"
    )
    with pytest.raises(CancelledByUser):
        run(
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
            tmp_path,
            report=cancel,
        )
    # The end of the file: the child, which would wait for ever, holds it open no more.
    assert select.select([held_by_child], [], [], 30)[0]
    assert os.read(held_by_child, 1) == b""
    os.close(held_by_child)


def package(name: str, size: int) -> PlannedPackage:
    return PlannedPackage(
        name=name,
        version="1",
        url="",
        download_bytes=size,
        disk_bytes=None if not size else 3 * size,
    )


def plan_of(tool: str, folder: Path) -> InstallPlan:
    return InstallPlan(
        vendor="fake",
        folder=folder,
        tool=tool,  # type: ignore[arg-type]  # uv or pip
        packages=(package("Big.One", 900), package("small", 100)),
        cache=folder / "cache",
    )


def test_progress_of_pip_grows_with_the_wheels_it_has_fetched(tmp_path: Path) -> None:
    progress = install_progress(plan_of("pip", tmp_path), temporary=tmp_path, cache=None)
    assert progress("") == Progress(phase="download fake", fraction=0.0)
    (tmp_path / "pip-unpack-x").mkdir()
    (tmp_path / "pip-unpack-x" / "Big_One-1-py3-none-any.whl").write_bytes(bytes(450))
    assert progress("Collecting Big.One==1") == Progress(phase="download big-one", fraction=0.45)
    assert progress("  Downloading Big_One-1-py3-none-any.whl (1 kB)").phase == "download big-one"
    (tmp_path / "pip-unpack-x" / "small-1-py3-none-any.whl").write_bytes(bytes(5000))
    assert progress("Collecting small==1") == Progress(phase="download small", fraction=1.0)
    assert progress("Installing collected packages: a, b") == Progress(phase="unpack fake")


def test_progress_of_uv_grows_with_what_it_has_unpacked(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / ".tmpabc").mkdir(parents=True)
    progress = install_progress(plan_of("uv", tmp_path), temporary=tmp_path, cache=cache)
    assert progress("Downloading Big.One (900B)") == Progress(
        phase="download big-one", fraction=0.0
    )
    assert progress(" Downloaded Big.One") == Progress(phase="download big-one", fraction=0.9)
    (cache / ".tmpabc" / "part").write_bytes(bytes(10))
    assert progress("").fraction == 1.0
    assert progress("Prepared 2 packages in 1s") == Progress(phase="unpack fake")


def test_plan_says_what_it_does_not_know(tmp_path: Path) -> None:
    plan = InstallPlan(
        vendor="fake",
        folder=tmp_path,
        tool="pip",
        packages=(
            package("known", 61_000_000),
            PlannedPackage(
                name="mystery", version="1", url="", download_bytes=None, disk_bytes=None
            ),
        ),
    )
    assert plan.summary == (
        f"fake: 2 packages, about 61 MB to download, about 183 MB on disk in {tmp_path}, "
        "not counting mystery"
    )


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (61_400_000, "61 MB"), (2_350_000_000, "2.4 GB")],
)
def test_sizes_are_said_as_disks_are_sold(size_bytes: int, words: str) -> None:
    assert size_in_words(size_bytes) == words


def test_all_that_is_wanted_of_one_disk_is_added_up(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    half = free * 2 // 3
    check_room([(tmp_path / "a" / "b", half)], what="it")
    with pytest.raises(VendorEnvError, match="not enough room for it: about"):
        check_room([(tmp_path / "a" / "b", half), (tmp_path, half)], what="it")
    assert existing_folder(tmp_path / "a" / "b") == tmp_path
