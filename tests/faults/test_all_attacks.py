"""A short run of the attacks that connections have to withstand, all at once."""

from tests.faults.all_attacks import OF_CONNECTIONS, run


def test_clients_that_behave_lose_nothing() -> None:
    assert run(10, list(OF_CONNECTIONS)).problems() == []
