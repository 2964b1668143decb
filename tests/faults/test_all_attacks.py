"""A short run of the attacks that connections have to withstand, all at once."""

import pytest

from tests.faults.all_attacks import OF_CONNECTIONS, run


@pytest.mark.long
def test_clients_that_behave_lose_nothing() -> None:
    assert run(10, list(OF_CONNECTIONS)).problems() == []
