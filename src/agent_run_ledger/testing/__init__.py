"""For tests: a clock that moves when told, the store's promise as a suite, and crashes at every durable boundary of a flow.

Names are resolved when they are first used: a suite that crashes nothing loads nothing of it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_run_ledger.stores.memory import MemoryStore as MemoryStore
    from agent_run_ledger.testing.clock import FakeClock as FakeClock
    from agent_run_ledger.testing.crashes import crashtest as crashtest
    from agent_run_ledger.testing.report import Report as Report
    from agent_run_ledger.testing.report import Trouble as Trouble
    from agent_run_ledger.testing.stores import StoreContract as StoreContract
    from agent_run_ledger.testing.stores.words import a_row as a_row
else:
    _HOMES = {
        "MemoryStore": "stores.memory",
        "FakeClock": "testing.clock",
        "crashtest": "testing.crashes",
        "Report": "testing.report",
        "Trouble": "testing.report",
        "StoreContract": "testing.stores",
        "a_row": "testing.stores.words",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"agent_run_ledger.{home}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *_HOMES})


__all__ = ["FakeClock", "MemoryStore", "Report", "StoreContract", "Trouble", "a_row", "crashtest"]
