from pathlib import Path

import pytest

from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.errors import ConfigError
from toy_pipeline import make_toy_pipeline

NULL = Choice(vendor="null", must_check=False)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline")


def test_a_vendor_without_source_code_is_refused_before_anything_is_built(
    pipeline: Path, tmp_path: Path
) -> None:
    with Dispatcher(home=tmp_path / "home") as dispatcher:
        with pytest.raises(ConfigError, match="'null' writes no source code") as caught:
            dispatcher.emit(pipeline, "unet", tmp_path / "out", NULL)
        assert list(dispatcher.store.entries()) == []
    assert "ggml" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_component_that_is_not_there_is_named_with_those_that_are(
    pipeline: Path, tmp_path: Path
) -> None:
    with (
        Dispatcher(home=tmp_path / "home") as dispatcher,
        pytest.raises(ConfigError, match="'vae'.*text_encoder.*unet.*vae_decoder"),
    ):
        dispatcher.emit(pipeline, "vae", tmp_path / "out", NULL)


def test_a_folder_with_files_is_refused_before_anything_is_built(
    pipeline: Path, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with (
        Dispatcher(home=tmp_path / "home") as dispatcher,
        pytest.raises(ConfigError, match="not empty"),
    ):
        dispatcher.emit(pipeline, "unet", tmp_path, NULL, may_replace=True)
