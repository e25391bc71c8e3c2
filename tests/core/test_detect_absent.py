import pytest

from sdkit_dispatch.detect.absent import absent_device
from sdkit_dispatch.errors import ConfigError


@pytest.mark.parametrize(
    ("arch", "maker"), [("sm_89", "nvidia"), ("gfx1201", "amd"), ("apple-m2", "apple")]
)
def test_a_device_elsewhere_is_made_from_the_table(arch, maker):
    device = absent_device(arch)
    assert (device.maker, device.arch, device.is_absent) == (maker, arch, True)


@pytest.mark.parametrize("arch", ["sm_8", "sm89", "gfx", "", "xe2", "x86_64", "sm_89 ", "apple-m0"])
def test_an_unknown_architecture_is_refused(arch):
    with pytest.raises(ConfigError):
        absent_device(arch)


def test_the_nearest_architecture_is_named():
    with pytest.raises(ConfigError) as caught:
        absent_device("sm89")
    assert "sm_89" in caught.value.hint
