"""The run on two ranks of the local launcher, with which others are compared."""

from typing import Any

import pytest

from tests.e2e.two_ranks import finished, lasting, started


@pytest.fixture(scope="session")
def local_records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("local")
    finished(folder, started(folder))
    records = lasting(folder)
    assert len(records) == 6
    return records
