"""Who may write a store, which layout it has, and the shared stores below it."""

import logging
import os
import shutil
import stat
from dataclasses import replace

import pytest

from sdkit_dispatch.cache import MANIFEST, EngineStore
from sdkit_dispatch.errors import CacheError
from sdkit_dispatch.store_layout import LAYOUT, engines_folder
from sdkit_dispatch.temporary_home import TemporaryHome
from store_examples import REQUEST, look_up, publish, state_of

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
OTHER_USER = 12345


@pytest.fixture
def store(tmp_path):
    return EngineStore(tmp_path / "home")


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@POSIX
def test_a_store_is_for_its_owner_alone_whatever_the_umask(store, open_umask):
    folder = publish(store)
    for place in (store.home, engines_folder(store.home), store.locks):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    for path in (folder, *folder.rglob("*")):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
    assert look_up(store) is not None


@POSIX
def test_folders_that_we_believe_are_closed_to_others_by_the_next_build(store):
    publish(store)
    for name in ("scratch", "references"):
        (store.home / name).chmod(0o777)
    publish(store)
    for name in ("scratch", "references"):
        assert not (store.home / name).stat().st_mode & 0o022


@POSIX
@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("place", [".", "engine.bin", MANIFEST])
def test_an_engine_that_others_can_write_is_not_loaded(store, place, mode):
    folder = publish(store)
    before = (folder / place).stat().st_mode
    (folder / place).chmod(stat.S_IMODE(before) | mode)
    with pytest.raises(CacheError, match="other users") as caught:
        look_up(store)
    assert caught.value.hint == f"chmod -R go-w '{folder}'"
    assert "other users" in store.verify(store.read(REQUEST.key))
    (folder / place).chmod(stat.S_IMODE(before))
    assert look_up(store) is not None


@POSIX
@pytest.mark.parametrize("place", [".", "engine.bin"])
def test_an_engine_of_another_user_is_not_loaded(store, place):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    folder = publish(store)
    os.chown(folder / place, OTHER_USER, -1)
    with pytest.raises(CacheError, match=f"user {OTHER_USER}"):
        look_up(store)


@pytest.mark.parametrize("text", [f"{LAYOUT + 1}", "0", "", "x" * 1000])
def test_a_store_of_another_layout_is_left_alone(store, text):
    publish(store)
    (engines_folder(store.home) / "LAYOUT").write_text(text)
    before = state_of(store.home)
    assert look_up(store) is None
    assert list(store.entries()) == []
    assert store.find(REQUEST.key[:6]) == []
    assert not store.evict(REQUEST.key)
    with pytest.raises(CacheError, match="layout") as caught, store.locked(REQUEST.key):
        pass
    assert caught.value.concerns_store
    assert state_of(store.home) == before


def test_a_store_without_a_layout_file_is_of_the_first_layout(store):
    publish(store)
    (engines_folder(store.home) / "LAYOUT").unlink()
    assert look_up(store) is not None


@pytest.fixture
def system(tmp_path):
    """A store of the system with one engine."""
    system = EngineStore(tmp_path / "system")
    publish(system)
    system.let_go()
    return system


@pytest.fixture
def own(tmp_path, system):
    return EngineStore(tmp_path / "own", shared=[system.home])


def test_an_engine_of_a_shared_store_is_a_hit_and_nothing_is_written_there(own, system):
    before = state_of(system.home)
    engine, _ = look_up(own)
    assert engine.folder == str(system.folder(REQUEST.key))
    (entry,) = own.entries()
    assert entry.is_shared
    assert own.verify(entry) == ""
    assert not own.evict(REQUEST.key)
    publish(own, replace(REQUEST, runtime="null 2"))
    assert {entry.is_shared for entry in own.entries()} == {True, False}
    assert state_of(system.home) == before


@pytest.mark.parametrize("harm", ["damaged", "writable by others", "of another layout"])
def test_a_bad_engine_of_a_shared_store_is_a_miss(own, system, caplog, harm):
    file = system.folder(REQUEST.key) / "engine.bin"
    if harm == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "of another layout":
        (engines_folder(system.home) / "LAYOUT").write_text("77")
    elif os.name == "nt":
        pytest.skip("Windows has no such modes")
    else:
        file.chmod(0o666)
    assert look_up(own) is None
    if harm != "of another layout":
        assert "is not used" in caplog.text
    publish(own)
    assert look_up(own)[0].folder == str(own.folder(REQUEST.key))


def test_a_shared_engine_that_was_refused_is_not_handed_out_again_by_this_process(own, system):
    assert look_up(own) is not None
    assert not own.remove(REQUEST.key)
    assert look_up(own) is None
    assert look_up(EngineStore(own.home, shared=[system.home])) is not None


def test_ones_own_engine_comes_first(own):
    publish(own)
    assert look_up(own)[0].folder == str(own.folder(REQUEST.key))


def test_a_shared_store_that_is_not_there_is_no_error(tmp_path):
    store = EngineStore(tmp_path / "own", shared=[tmp_path / "nowhere"])
    assert look_up(store) is None
    publish(store)
    assert look_up(store) is not None


def test_a_store_that_retreats_hands_out_what_it_had_and_leaves_nothing(
    store, caplog, refuge_of_its_own
):
    publish(store)
    own = engines_folder(store.home)
    before = state_of(own)
    with caplog.at_level(logging.WARNING):
        store.retreat("the disk is full")
    refuge = store.home
    assert "the disk is full" in caplog.text
    assert str(refuge) in caplog.text
    assert store.is_temporary
    assert look_up(store) is not None
    other = replace(REQUEST, runtime="null 2")
    publish(store, other)
    assert look_up(store, other) is not None
    store.close()
    store.close()
    assert not refuge.exists()
    assert state_of(own) == before


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_a_temporary_home_is_shared_and_goes_with_its_last_user(temporary):
    first, second = TemporaryHome(), TemporaryHome()
    assert first.folder == second.folder
    (first.folder / "engine").touch()
    first.close()
    first.close()
    assert (second.folder / "engine").exists()
    second.close()
    assert not second.folder.exists()
    third = TemporaryHome()
    assert list(third.folder.iterdir()) == []
    third.close()


def test_what_a_killed_process_left_is_removed(temporary):
    killed = TemporaryHome()
    (killed.folder / "half an engine").touch()
    killed._membership.release()  # as the operating system does
    living = TemporaryHome()
    assert list(living.folder.iterdir()) == []
    living.close()


@POSIX
@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_that_others_may_open_is_neither_used_nor_swept(temporary, mode):
    usual = TemporaryHome()
    usual.close()
    (trap := usual.folder.parent).chmod(mode)
    (trap / "home").mkdir()
    (trap / "home" / "engine").touch()
    own = TemporaryHome()
    assert not own.folder.is_relative_to(trap)
    own.close()
    assert not own.folder.parent.exists()
    assert (trap / "home" / "engine").exists()


@POSIX
def test_a_link_in_place_of_the_folder_is_not_followed(temporary, tmp_path):
    usual = TemporaryHome()
    usual.close()
    place = usual.folder.parent
    shutil.rmtree(place)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    own = TemporaryHome()
    own.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []
