"""The sharded checkpoints of tests/testdata are what the libraries save, and their shards what PyTorch makes of them."""

import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("make_checkpoint_fixture.py")


def test_fixtures_are_reproduced():
    # A process of its own, as it forks.
    result = subprocess.run([sys.executable, SCRIPT, "--check"], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr
