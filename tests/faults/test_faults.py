"""The quick form of the fault-injection run; `run.py --full` is the long one."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="builders are forked and found in /proc")
def test_a_quick_run_of_faults_finds_none():
    # In a process of its own: one that has threads cannot be forked.
    script = Path(__file__).with_name("run.py")
    done = subprocess.run(
        [sys.executable, str(script), "--quick"], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults in" in done.stdout
