from __future__ import annotations

import pytest

from ckpt.errors import FormatTooNew, NoSnapshot
from ckpt.format.manifest import FORMAT, PinDoc, RunDoc, Snapshot, digest128, seal
from ckpt.format.names import RUNS, SNAPSHOTS, PartName, RunId, SnapshotId, SnapshotName, run_key
from ckpt.history.catalog import MAX_DOCUMENT, find, read_history
from storage_backends.base import Entry, Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import NEXT, RUN, put_keyframes, put_line, put_pin, put_run, put_step
from tests.support.faulty import FaultyStore, LaggingStore


def two_lines() -> MemoryStore:
    """10, 20, 30; back to 10; 20 again."""
    store = MemoryStore()
    put_run(store, RUN)
    put_line(store, RUN, [10, 20, 30])
    put_run(store, NEXT, SnapshotId(RUN, 10))
    put_keyframes(store, NEXT, [20])
    return store


def test_an_empty_store_has_an_empty_history() -> None:
    history = read_history(MemoryStore())
    assert (history.newest, history.live, history.abandoned, history.problems) == (None, frozenset(), frozenset(), ())


def test_the_live_line_follows_what_runs_resumed_from_and_the_rest_is_abandoned() -> None:
    """E4"""
    history = read_history(two_lines())
    assert history.newest == SnapshotId(NEXT, 20)
    assert history.live == {SnapshotId(NEXT, 20), SnapshotId(RUN, 10)}
    assert history.abandoned == {SnapshotId(RUN, 20), SnapshotId(RUN, 30)}


def test_order_is_by_run_and_step_and_not_by_time() -> None:
    """D1: mtimes reversed and in the future, the clock set back between saves."""
    times = iter([9e9, 50.0, 7e9, 40.0, 1.0, 30.0, 2.0, 20.0, 3.0, 10.0, 0.0])
    store = MemoryStore(wall=lambda: next(times))
    put_run(store, NEXT)
    put_keyframes(store, NEXT, [5])
    put_run(store, RUN, started=9e9)
    put_keyframes(store, RUN, [700, 600])
    assert read_history(store).newest == SnapshotId(NEXT, 5)
    assert sorted(read_history(store).snapshots) == [SnapshotId(RUN, 600), SnapshotId(RUN, 700), SnapshotId(NEXT, 5)]


def test_the_live_line_goes_through_a_snapshot_that_was_removed() -> None:
    store = two_lines()
    put_run(store, RunId(3, "cccccccc"), SnapshotId(NEXT, 20))
    put_keyframes(store, RunId(3, "cccccccc"), [30])
    store.delete([SnapshotName(SnapshotId(NEXT, 20)).key])
    assert read_history(store).live == {SnapshotId(RunId(3, "cccccccc"), 30), SnapshotId(RUN, 10)}


def test_a_run_without_a_commit_changes_nothing() -> None:
    store = two_lines()
    before = read_history(store)
    put_run(store, RunId(3, "cccccccc"), SnapshotId(RUN, 30))
    after = read_history(store)
    assert (after.newest, after.live) == (before.newest, before.live)


def test_runs_that_claim_to_resume_from_each_other_make_no_circle() -> None:
    store = MemoryStore()
    put_run(store, RUN, SnapshotId(NEXT, 5))
    put_run(store, NEXT, SnapshotId(RUN, 5))
    put_keyframes(store, RUN, [5])
    put_keyframes(store, NEXT, [5])
    assert read_history(store).live == {SnapshotId(RUN, 5), SnapshotId(NEXT, 5)}


def test_debris_is_skipped_with_one_problem_each_and_the_newest_complete_step_is_used() -> None:
    """C7: half a part, zero-byte and cut documents, foreign files."""
    store = MemoryStore()
    put_run(store, RUN)
    good, lost = put_keyframes(store, RUN, [10, 20])
    whole = store.get(SnapshotName(good).key)
    store.delete([PartName(lost, 0).key])
    cut, zero, copied = (SnapshotName(SnapshotId(RUN, step)).key for step in (30, 40, 50))
    store.put(cut, whole[:-20])
    store.put(zero, b"")
    store.put(copied, whole)
    store.put("snapshots/notes.txt", b"mine")
    store.put("parts/000001-aaaaaaaa/000000000060/00000.json", b"half a name")
    store.put("pins/torn.json", b"{")
    history = read_history(store)
    assert history.newest == good
    assert {p.key: p.kind for p in history.problems} == {
        SnapshotName(lost).key: "incomplete",
        cut: "unreadable",
        zero: "unreadable",
        copied: "unreadable",
        "snapshots/notes.txt": "foreign",
        "parts/000001-aaaaaaaa/000000000060/00000.json": "foreign",
        "pins/torn.json": "unreadable",
    }
    assert all(p.key in p.text for p in history.problems)


def test_a_document_too_large_to_be_one_is_not_read() -> None:
    inner = MemoryStore()
    put_run(inner, RUN)
    put_keyframes(inner, RUN, [10])

    class Huge(MemoryStore):
        def list(self, prefix: str) -> list[Entry]:
            return [Entry(e.key, MAX_DOCUMENT + 1, e.mtime) for e in inner.list(prefix)]

        def get(self, key: str) -> bytes:
            raise AssertionError(f"{key} was read")

    assert {p.kind for p in read_history(Huge()).problems} == {"unreadable"}


def test_a_newer_format_is_refused_and_not_skipped() -> None:
    store = two_lines()
    body = b'{"format":' + str(FORMAT + 1).encode() + b"}\n"
    store.put(SnapshotName(SnapshotId(NEXT, 30)).key, body + digest128(body).encode() + b"\n")
    with pytest.raises(FormatTooNew):
        read_history(store)


def test_the_highest_readable_revision_counts() -> None:
    store = MemoryStore()
    put_run(store, RUN)
    id_ = SnapshotId(RUN, 10)
    first = put_step(store, id_)
    assert first is not None

    def revised(revision: int) -> bytes:
        return seal(
            Snapshot(first.format, first.run, 10, 1, revision, first.parts, None, first.packs, first.totals, None, None)
        )

    for revision in (1, 2, 10):
        store.put(SnapshotName(id_, revision).key, revised(revision))
    assert read_history(store).keys[id_] == SnapshotName(id_, 10).key
    store.put(SnapshotName(id_, 10).key, b"cut")
    history = read_history(store)
    assert (history.keys[id_], history.snapshots[id_].revision) == (SnapshotName(id_, 2).key, 2)
    assert len(history.documents) == 3


def test_a_listing_that_lags_hides_no_part_of_a_listed_snapshot() -> None:
    """C5: the snapshot is listed, its part not yet: reads say that the part is there."""
    store = two_lines()
    part = PartName(SnapshotId(NEXT, 20), 0).key
    lagging = LaggingStore(store, lag=1.0, now=lambda: 100.0)
    lagging.put(part, store.get(part))
    assert part not in {e.key for e in lagging.list("parts/")}
    assert lagging.hidden
    assert read_history(lagging).newest == SnapshotId(NEXT, 20)


def test_a_run_document_that_is_not_listed_yet_is_read_by_its_name() -> None:
    store = two_lines()
    lagging = LaggingStore(store, lag=1.0, now=lambda: 100.0)
    lagging.put(run_key(NEXT), store.get(run_key(NEXT)))
    assert read_history(lagging).live == {SnapshotId(NEXT, 20), SnapshotId(RUN, 10)}


def test_a_snapshot_pruned_between_two_listings_is_no_problem() -> None:
    store = two_lines()

    class Pruned(MemoryStore):
        def list(self, prefix: str) -> list[Entry]:
            listed = list(store.list(prefix))
            if prefix == "snapshots/":  # listed for the last time: the prune goes on before the documents are read
                gone = SnapshotId(RUN, 30)
                store.delete([SnapshotName(gone).key, PartName(gone, 0).key])
            return listed

        def get(self, key: str) -> bytes:
            return store.get(key)

        def get_range(self, key: str, start: int, stop: int) -> bytes:
            return store.get_range(key, start, stop)

    history = read_history(Pruned())
    assert SnapshotId(RUN, 30) not in history.snapshots
    assert history.problems == ()


def test_a_history_of_which_all_that_was_listed_has_gone_is_that_of_what_came_instead() -> None:
    """D4: a new job has saved and pruned between our listing and our reading; else the store would seem empty."""
    inner = MemoryStore()
    put_run(inner, RUN)
    put_keyframes(inner, RUN, [10, 20])

    class Moving(FaultyStore):
        def get(self, key: str) -> bytes:
            if key.startswith(SNAPSHOTS) and not any(run_key(NEXT) == entry.key for entry in inner.list(RUNS)):
                inner.delete([entry.key for entry in inner.list("") if not entry.key.startswith("runs/")])
                put_run(inner, NEXT, resumed_from=SnapshotId(RUN, 20))
                put_keyframes(inner, NEXT, [30])
            return super().get(key)

    history = read_history(Moving(inner), threads=1)
    assert history.newest == SnapshotId(NEXT, 30)
    assert sorted(history.snapshots) == [SnapshotId(NEXT, 30)]
    assert history.runs[NEXT].resumed_from == str(SnapshotId(RUN, 20))
    assert history.problems == ()


def test_a_missing_run_document_is_told_because_it_cuts_the_line() -> None:
    store = two_lines()
    store.delete([run_key(NEXT)])
    history = read_history(store)
    assert [(p.key, p.kind) for p in history.problems] == [(run_key(NEXT), "unreadable")]
    assert history.newest == SnapshotId(NEXT, 20)


def test_a_store_that_cannot_list_is_an_error_and_never_empty() -> None:
    """M3"""
    for prefix in ("runs/", "parts/", "snapshots/", "pins/"):
        store = FaultyStore(two_lines(), fail_at=1, verbs=frozenset({"list"}), where=prefix.__eq__, for_ever=True)
        with pytest.raises(Unavailable):
            read_history(store)
        assert store.fired


def test_known_documents_are_not_read_again() -> None:
    """M11: `list` reads each document once, and never a pack."""
    store = FaultyStore(two_lines())
    first = read_history(store)
    gets = store.count("get")
    assert gets == len(first.runs) + len(first.snapshots)
    assert read_history(store, known=first) == first
    assert store.count("get", "get_range") == gets
    assert not any(key.startswith("packs/") for _, key in store.calls)


def test_a_pin_protects_by_name_and_must_hold_its_own_name() -> None:
    store = two_lines()
    put_pin(store, "best", SnapshotId(RUN, 30))
    store.put("pins/other.json", seal(PinDoc(FORMAT, "best", str(SnapshotId(RUN, 10)))))
    history = read_history(store)
    assert history.pins == {"best": SnapshotId(RUN, 30)}
    assert [p.key for p in history.problems] == ["pins/other.json"]


def test_a_run_document_must_hold_its_own_name() -> None:
    store = two_lines()
    other = f"{RUNS}000009-99999999.json"
    store.put(other, store.get(run_key(RUN)))
    assert [p.key for p in read_history(store).problems] == [other]
    assert all(isinstance(doc, RunDoc) for doc in read_history(store).runs.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latest", SnapshotId(NEXT, 20)),
        (10, SnapshotId(RUN, 10)),
        ("30", SnapshotId(RUN, 30)),
        ("1/20", SnapshotId(RUN, 20)),
        ("2/20", SnapshotId(NEXT, 20)),
        (str(SnapshotId(RUN, 20)), SnapshotId(RUN, 20)),
        ("best", SnapshotId(RUN, 30)),
    ],
)
def test_a_snapshot_is_found_by_every_name_it_has(name: int | str, expected: SnapshotId) -> None:
    store = two_lines()
    put_pin(store, "best", SnapshotId(RUN, 30))
    assert find(read_history(store), name) == expected


def test_an_ambiguous_step_is_refused_and_the_choices_are_named() -> None:
    """E4: nothing is re-based silently."""
    with pytest.raises(NoSnapshot, match=r"2 snapshots .*1/20 \(abandoned\), 2/20 \(live\)"):
        find(read_history(two_lines()), 20)


def test_two_runs_of_one_generation_are_named_in_full() -> None:
    store = MemoryStore()
    for nonce in ("aaaaaaaa", "bbbbbbbb"):
        put_run(store, RunId(1, nonce))
        put_keyframes(store, RunId(1, nonce), [5])
    with pytest.raises(NoSnapshot, match="000001-aaaaaaaa-000000000005"):
        find(read_history(store), "1/5")


@pytest.mark.parametrize("name", [11, "latest2", "3/10", "000001-aaaaaaaa-000000000011", "²", "no such pin"])
def test_what_is_not_there_is_no_snapshot_and_the_message_lists_what_is(name: int | str) -> None:
    with pytest.raises(NoSnapshot, match="there are 4: 1/10, 1/20, 1/30, 2/20"):
        find(read_history(two_lines()), name)


def test_latest_of_an_empty_store_is_no_snapshot() -> None:
    with pytest.raises(NoSnapshot, match="holds none"):
        find(read_history(MemoryStore()), "latest")
