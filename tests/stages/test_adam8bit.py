"""8-bit Adam is an extra that lies apart from this environment; its tests run in a pytest of their own with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import UserError
from tests.stages.chain import Chain

CASES = Path(__file__).with_name("apart_adam8bit.py")


@pytest.mark.slow
def test_with_the_extra() -> None:
    path = os.pathsep.join([f"{sys.prefix}/apart", os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "pytest", "-q", "-W", "default", str(CASES)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("4 passed")


def test_without_it_the_message_names_the_extra(sd3_folder: Path, tmp_path: Path) -> None:
    chain = Chain(str(sd3_folder), str(tmp_path))
    drawn = chain.sample(chain.context("sample", 0)).trajectory
    judged = chain.advantages(drawn, chain.context("advantage", 0))
    config = chain.update_config(optimizer={"kind": "adamw_8bit"})
    with pytest.raises(UserError, match=r"pip install 'rewardflow\[adam8bit\]'"):
        chain.update_once(drawn, judged, chain.context("update", 0), config=config)
