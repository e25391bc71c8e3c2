import os
from pathlib import Path

import pytest

from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.whole_folder import whole_folder

MARK = "mark.json"


def write(place: Path, *names: str, may_replace: bool = False) -> None:
    with whole_folder(place, mark=MARK, may_replace=may_replace) as folder:
        for name in (*names, MARK):
            (folder / name).write_text(name)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_with_all_its_files_and_parents(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", "one")
    assert names_in(tmp_path / "a" / "b") == [MARK, "one"]
    assert names_in(tmp_path / "a") == ["b"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "one")
    assert names_in(tmp_path / "out") == [MARK, "one"]


def fail(place: Path, *, may_replace: bool = False) -> None:
    with whole_folder(place, mark=MARK, may_replace=may_replace) as folder:
        (folder / "one").write_text("half")
        raise KeyError


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fail(tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_failure_leaves_what_was_to_be_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    with pytest.raises(KeyError):
        fail(tmp_path / "out", may_replace=True)
    assert names_in(tmp_path / "out") == [MARK, "one"]
    assert names_in(tmp_path) == ["out"]


def test_an_earlier_result_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    with pytest.raises(ConfigError, match="written before") as caught:
        write(tmp_path / "out", "two")
    assert "--force" in caught.value.hint
    write(tmp_path / "out", "two", may_replace=True)
    assert names_in(tmp_path / "out") == [MARK, "two"]
    assert names_in(tmp_path) == ["out"]


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        write(tmp_path / "out", "one", may_replace=True)
    assert names_in(tmp_path / "out") == ["thesis.txt"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError, match="out"):
        write(tmp_path / "out")
    with pytest.raises(ConfigError, match="out"):
        write(tmp_path / "out" / "below")


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "real") == [MARK, "one"]
