"""The store's promise as a suite that any store can be put through."""

from __future__ import annotations

from agent_run_ledger.testing.stores.entries import EntriesContract
from agent_run_ledger.testing.stores.forgetting import ForgettingContract
from agent_run_ledger.testing.stores.looking import LookingContract
from agent_run_ledger.testing.stores.moving import MovingContract
from agent_run_ledger.testing.stores.ownership import OwnershipContract
from agent_run_ledger.testing.stores.queues import QueuesContract
from agent_run_ledger.testing.stores.together import TogetherContract
from agent_run_ledger.testing.stores.workers import WorkersContract


class StoreContract(
    OwnershipContract,
    EntriesContract,
    TogetherContract,
    LookingContract,
    QueuesContract,
    WorkersContract,
    MovingContract,
    ForgettingContract,
):
    """The conformance suite of `contract.Store`: a subclass per store, with pytest fixtures `store` and `clock`.

    `store` is a fresh, empty store that measures leases by `clock`, a `FakeClock`.

        class TestMyStore(StoreContract):
            @pytest.fixture
            def clock(self) -> FakeClock: return FakeClock()

            @pytest.fixture
            def store(self, clock: FakeClock) -> Iterator[Store]: ...
    """
