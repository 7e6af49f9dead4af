from __future__ import annotations

from ckpt.format.manifest import FORMAT, RunDoc, seal
from ckpt.format.names import RunId, alive_key, run_key
from ckpt.history.failures import Lives, observed
from ckpt.history.runs import put_alive
from storage_backends.memory import MemoryStore


def run(store: MemoryStore, generation: int) -> RunId:
    found = RunId(generation, f"{generation:08x}")
    doc = RunDoc(FORMAT, str(found), 1, "host", 1, "1", "boot", "space", None, 0.0, None, {})
    store.put(run_key(found), seal(doc))
    return found


def test_runs_before_the_newest_are_counted_by_what_their_heartbeats_left() -> None:
    store = MemoryStore()
    assert observed(store) == Lives()
    put_alive(store, run(store, 1), 360, ended=False, interval=10.0)
    put_alive(store, run(store, 2), 30, ended=True, interval=20.0)
    assert observed(store) == Lives(failures=1, seconds=3600.0), "the newest is the one that asks"
    run(store, 3)  # died before its first beat
    store.put(alive_key(run(store, 4)), b"rotten")
    put_alive(store, run(store, 5), 1, ended=False, interval=10.0)
    assert observed(store) == Lives(failures=1, seconds=4200.0)
    run(store, 6)
    assert observed(store) == Lives(failures=2, seconds=4210.0)


def test_only_recent_runs_count() -> None:
    store = MemoryStore()
    for generation in range(1, 10):
        put_alive(store, run(store, generation), 1, ended=False, interval=1.0)
    assert observed(store, recent=3) == Lives(failures=3, seconds=3.0)
