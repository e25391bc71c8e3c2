import json
import subprocess
import sys

import jsonschema
import pytest

from plan_examples import MACHINES, SCHEMA, documents, example
from sdkit_dispatch.contract import record_from_json, record_to_json
from sdkit_dispatch.plan_report import PlanReport

WRITE_ANEW = "run `python tests/core/plan_examples.py`"


@pytest.fixture(scope="module")
def schema():
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_the_file_in_the_package_is_what_the_code_says(path):
    assert path.read_text(encoding="utf-8") == documents()[path], WRITE_ANEW


@pytest.mark.parametrize("platform", MACHINES)
def test_an_example_validates_and_reads_back(platform, schema):
    report = example(platform)
    data = json.loads(json.dumps(record_to_json(report)))
    jsonschema.validate(data, schema)
    assert record_from_json(PlanReport, data) == report


def test_a_document_of_another_form_does_not_validate(schema):
    data = json.loads(json.dumps(record_to_json(example("linux"))))
    data["devices"][0]["kind"] = "gpu"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_what_this_machine_says_validates(schema):
    done = subprocess.run(
        [sys.executable, "-m", "sdkit_dispatch", "plan", "--json", "--no-install"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema)
    assert {pair["vendor"] for pair in document["decision"]["rejections"]} >= {"null"}


def test_an_installer_learns_what_how_big_and_why():
    report = example("windows")
    best = report.decision.plans[0]
    (install,) = [one for one in report.installs if one.vendor == best.vendor]
    assert best.vendor == "openvino"
    assert "B580" in best.device.name
    assert best.reasons
    assert install.command == "sdkit-dispatch vendors install openvino"
    assert install.download_bytes > 50e6
    assert not install.is_installed
