import pytest


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run full-size models too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--nightly"):
        return
    skip = pytest.mark.skip(reason="full-size model: run with --nightly")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def home_of_its_own(tmp_path_factory, monkeypatch, request):
    """No test reads or writes the user's own engines and settings."""
    monkeypatch.setenv("SDKIT_DISPATCH_HOME", str(tmp_path_factory.mktemp("home") / "home"))
