from dataclasses import dataclass
from typing import Literal

import pytest

from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.graph.vendor_options import options_from_mapping


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    level: Literal["all", "none"] = "all"
    workspace_mb: int = 64


def test_options_left_out_take_their_defaults() -> None:
    assert options_from_mapping(SampleOptions, "sample", {"workspace_mb": 8}) == SampleOptions(
        workspace_mb=8
    )


def test_an_unknown_option_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r'options\.sample.*"levle".*level, workspace_mb'
    ) as caught:
        options_from_mapping(SampleOptions, "sample", {"levle": "all"})
    assert 'write "level"' in caught.value.hint


@pytest.mark.parametrize(
    ("given", "words"),
    [({"level": "some"}, r"'some'.*\$\.level"), ({"workspace_mb": "8"}, r"\$\.workspace_mb")],
)
def test_a_wrong_value_is_named_with_its_key(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"options\.sample.*{words}"):
        options_from_mapping(SampleOptions, "sample", given)
