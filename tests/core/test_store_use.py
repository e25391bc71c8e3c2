"""Which engines are in use: they are never evicted; and when each was used last."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from sdkit_dispatch.build_slots import build_slot
from sdkit_dispatch.cache import MANIFEST, EngineStore, LaterVerdict
from sdkit_dispatch.errors import CacheError
from sdkit_dispatch.store_cleaning import used_at_s
from sdkit_dispatch.store_use import hold_engine, last_use, unused_engine
from store_examples import REQUEST, look_up, publish, state_of

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows: an open file is the lock")


@pytest.fixture
def store(tmp_path):
    return EngineStore(tmp_path / "home")


def test_an_engine_that_was_handed_out_is_not_evicted_until_it_is_let_go(store):
    publish(store)
    store.let_go()
    assert look_up(store) is not None
    assert not EngineStore(store.home).evict(REQUEST.key)
    assert look_up(store) is not None
    store.let_go()
    assert EngineStore(store.home).evict(REQUEST.key)
    assert look_up(store) is None


def test_a_new_engine_is_in_use_by_its_builder(store):
    publish(store)
    assert not store.evict(REQUEST.key)
    store.let_go()
    assert store.evict(REQUEST.key)


HOLDER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from sdkit_dispatch.store_use import hold_engine
    hold = hold_engine(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
    """
)


def test_a_killed_process_uses_nothing(store):
    folder = publish(store)
    store.let_go()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    assert not store.evict(REQUEST.key)
    process.send_signal(signal.SIGKILL if os.name != "nt" else signal.SIGTERM)
    process.communicate()
    assert store.evict(REQUEST.key)


@POSIX
def test_an_engine_that_is_being_evicted_is_a_miss(store):
    folder = publish(store)
    store.let_go()
    with unused_engine(folder) as is_unused:
        assert is_unused
        assert look_up(store) is None
    assert look_up(store) is not None


def test_an_engine_that_is_being_built_is_not_evicted(store):
    publish(store)
    store.let_go()
    with store.locked(REQUEST.key):
        assert not EngineStore(store.home).evict(REQUEST.key)


def test_there_is_nothing_to_hold_in_a_folder_without_a_manifest(tmp_path):
    assert hold_engine(tmp_path) is None


@POSIX
def test_a_pipe_in_place_of_a_manifest_does_not_hang(store):
    folder = publish(store)
    store.let_go()
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    assert "not a plain file" in store.read(REQUEST.key).damage
    with pytest.raises(CacheError, match="not a plain file"):
        look_up(store)
    with unused_engine(folder) as is_unused:  # returns, though nobody writes into the pipe
        assert is_unused


def test_the_last_use_is_known_and_no_entry_is_modified(store):
    folder = publish(store)
    before = state_of(folder)
    os.utime(folder, ns=(before["."][2], before["."][2]))
    assert used_at_s(store, store.read(REQUEST.key)) < 1.8e9  # when it was built
    look_up(store)
    assert last_use(store.memo, REQUEST.key).onnx == "model.onnx"
    assert used_at_s(store, store.read(REQUEST.key)) > (folder / MANIFEST).stat().st_mtime - 60
    assert state_of(folder) == before


def test_a_lost_last_use_only_makes_an_engine_look_older(store):
    publish(store)
    look_up(store)
    for note in (store.memo / "uses").rglob("*.json"):
        note.write_bytes(b"\xff[")
    assert last_use(store.memo, REQUEST.key).onnx == ""
    assert look_up(store) is not None


def test_a_verdict_of_a_removed_engine_is_not_that_of_the_next_one(store):
    publish(store)
    later = LaterVerdict(verdict=look_up(store)[1].verdict, facts={"device": "the first"})
    store.keep_later_verdict(REQUEST.key, "cpu", later)
    assert store.later_verdict(REQUEST.key, "cpu") == later
    store.remove(REQUEST.key)
    publish(store)
    assert store.later_verdict(REQUEST.key, "cpu") is None


def never(occupant):
    raise AssertionError(occupant)


def test_builds_are_serial_and_the_waiting_one_learns_for_whom(tmp_path):
    seen = []

    def look(occupant):
        seen.append(occupant)
        raise InterruptedError

    with (
        build_slot(tmp_path, "unet for null", count=1, while_waiting=never),
        pytest.raises(InterruptedError),
        build_slot(tmp_path, "another", count=1, while_waiting=look),
    ):
        pass
    (occupant,) = seen
    assert (occupant.pid, occupant.what) == (os.getpid(), "unet for null")
    assert "since" in str(occupant)
    with build_slot(tmp_path, "later", count=1, while_waiting=never):
        pass


def test_as_many_builds_as_are_allowed_run_together(tmp_path):
    with (
        build_slot(tmp_path, "one", count=2, while_waiting=never),
        build_slot(tmp_path, "two", count=2, while_waiting=never),
    ):
        pass


def test_a_waiting_build_goes_on_when_the_other_is_done(tmp_path):
    is_waiting, log = threading.Event(), []

    def second():
        with build_slot(tmp_path, "two", count=1, while_waiting=lambda _: is_waiting.set()):
            log.append("two")

    thread = threading.Thread(target=second)
    with build_slot(tmp_path, "one", count=1, while_waiting=never):
        thread.start()
        assert is_waiting.wait(60)
        log.append("one")
    thread.join(60)
    assert log == ["one", "two"]
