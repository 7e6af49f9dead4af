"""The promises of `Store`, as tests. A backend's test class inherits `StoreContract` and says how to open one."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import pytest

from storage_backends.base import NotFound, Refused, Store

BAD_KEYS = ["", "/a", "a/", "a//b", ".a", "a/.b", "..", "a/../b", "./a", "a\\b", "a b", "ä", "a\n", "a\0b", "x" * 513]
Opener = Callable[[], Store]


class StoreContract:
    """Override `opener`: each call of what it returns opens the same, at first empty, place again."""

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("a backend's test class overrides this fixture")

    @pytest.fixture
    def store(self, opener: Opener) -> Store:
        return opener()

    def test_is_a_store_and_names_itself(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    # put, get

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)), b"\0" * 70_000], ids=["empty", "1", "256", "70k"])
    def test_get_gives_back_what_was_put(self, store: Store, data: bytes) -> None:
        store.put("packs/000001-0badcafe/x.safetensors", data)
        got = store.get("packs/000001-0badcafe/x.safetensors")
        assert type(got) is bytes
        assert got == data

    def test_five_megabytes_come_back_whole_and_in_ranges(self, store: Store) -> None:
        data = bytes(i * 7 % 251 for i in range(1000)) * 5243
        store.put("big", data)
        assert store.get("big") == data
        assert store.get_range("big", 3_333_333, 4_444_444) == data[3_333_333:4_444_444]

    def test_any_buffer_can_be_put_and_reused_at_once(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.put("a", buffer)
        store.put("b", memoryview(buffer)[2:])
        buffer[:] = b"behind"
        numbers = array("d", [1.0, -2.5])
        store.put("c", memoryview(numbers))
        assert (store.get("a"), store.get("b"), store.get("c")) == (b"before", b"fore", numbers.tobytes())

    def test_a_put_replaces_the_whole_object_longer_or_shorter(self, store: Store) -> None:
        for data in (b"middle", b"a longer one", b"s", b""):
            store.put("alive/run.json", data)
            assert store.get("alive/run.json") == data
            assert [(e.key, e.size) for e in store.list("")] == [("alive/run.json", len(data))]

    def test_a_reader_sees_an_old_or_a_new_object_and_nothing_between(self, store: Store) -> None:
        versions = [bytes([65 + n]) * (1000 + 5000 * (n % 3)) for n in range(6)]
        store.put("o", versions[0])
        done = threading.Event()
        seen: list[bytes] = []

        def read() -> None:
            while not done.is_set():
                seen.append(store.get("o"))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(3):
            for data in versions:
                store.put("o", data)
        done.set()
        for reader in readers:
            reader.join()
        assert set(seen) <= set(versions)
        assert seen

    def test_an_absent_object_is_not_found(self, store: Store) -> None:
        store.put("here/x", b"1")
        for key in ("absent", "here/y", "no/such/folder/z", "here"):
            with pytest.raises(NotFound) as caught:
                store.get(key)
            assert (caught.value.key, caught.value.store) == (key, store.url)
            assert key in str(caught.value)
            assert store.url in str(caught.value)
            with pytest.raises(NotFound):
                store.get_range(key, 0, 1)
            with pytest.raises(NotFound):
                store.get_range(key, 0, 0)

    # get_range

    def test_ranges_are_exact(self, store: Store) -> None:
        data = bytes(range(200))
        store.put("o", data)
        for start, stop in ((0, 200), (0, 1), (199, 200), (50, 150), (0, 0), (200, 200), (7, 7)):
            got = store.get_range("o", start, stop)
            assert type(got) is bytes
            assert got == data[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 11), (10, 11), (11, 11), (500, 600)])
    def test_a_range_past_the_end_is_refused(self, store: Store, start: int, stop: int) -> None:
        store.put("o", b"0123456789")
        with pytest.raises(Refused, match=r"holds only 10") as caught:
            store.get_range("o", start, stop)
        assert caught.value.key == "o"

    @pytest.mark.parametrize(("start", "stop"), [(-3, 5), (-5, -1), (6, 5)])
    def test_a_range_that_is_none_is_refused(self, store: Store, start: int, stop: int) -> None:
        store.put("o", b"0123456789")
        with pytest.raises(Refused):
            store.get_range("o", start, stop)

    # list

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert list(store.list("")) == []
        assert list(store.list("snapshots/")) == []

    def test_a_listing_is_deep_sorted_and_exact(self, store: Store) -> None:
        keys = ["a", "b/1", "b/2/3/4/5", "b-c/1", "b.c/1", "bb/1", "c.json", "_d/-", "B/1", "b/2/3.x"]
        for n, key in enumerate(keys):
            store.put(key, b"x" * n)
        everything = store.list("")
        assert [e.key for e in everything] == sorted(keys)
        assert {e.key: e.size for e in everything} == {key: n for n, key in enumerate(keys)}
        assert [e.key for e in store.list("b/")] == ["b/1", "b/2/3.x", "b/2/3/4/5"]
        assert [e.key for e in store.list("b/2/3/")] == ["b/2/3/4/5"]
        assert list(store.list("b/2/3/4/5/")) == []

    def test_modification_times_are_seconds_that_do_not_go_back(self, store: Store) -> None:
        times = []
        for _ in range(2):
            store.put("o", b"1")
            times.append(store.list("")[0].mtime)
        if times[0] is not None:
            assert all(type(t) is float and t > 1_600_000_000 for t in times)
            assert times == sorted(times)

    def test_what_another_instance_writes_and_removes_is_seen_at_once(self, opener: Opener) -> None:
        """M4: no listing is remembered, not even one of a folder that was absent or empty."""
        one, other = opener(), opener()
        for folder in ("", "runs/", "runs/1/"):
            assert list(one.list(folder)) == []
        with pytest.raises(NotFound):
            one.get("runs/1/a")
        other.put("runs/1/a", b"1")
        for folder in ("", "runs/", "runs/1/"):
            assert [e.key for e in one.list(folder)] == ["runs/1/a"]
        other.put("runs/1/b", b"22")
        other.put("runs/1/a", b"333")
        assert [(e.key, e.size) for e in one.list("runs/")] == [("runs/1/a", 3), ("runs/1/b", 2)]
        assert one.get("runs/1/a") == b"333"
        assert one.get_range("runs/1/a", 1, 3) == b"33"
        other.delete(["runs/1/a"])
        assert [e.key for e in one.list("")] == ["runs/1/b"]
        with pytest.raises(NotFound):
            one.get("runs/1/a")

    # delete

    def test_delete_removes_these_and_no_others(self, store: Store) -> None:
        keys = [f"packs/{run}/{n}" for run in ("1", "2") for n in range(20)]
        for key in keys:
            store.put(key, b"x")
        store.delete(keys[5:30])
        assert [e.key for e in store.list("")] == sorted(keys[:5] + keys[30:])
        store.delete([e.key for e in store.list("")])
        assert list(store.list("")) == []
        store.put(keys[0], b"again")
        assert store.get(keys[0]) == b"again"

    def test_deleting_the_absent_or_nothing_is_no_error(self, store: Store) -> None:
        store.delete([])
        store.delete(["absent", "no/such/folder"])
        store.put("a/b", b"1")
        store.delete(["a/x", "a/b", "a/b"])
        store.delete(["a/b"])
        assert list(store.list("")) == []

    def test_deleting_the_name_of_a_folder_removes_nothing_below_it(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete(["a"])
        assert store.get("a/b") == b"1"

    # names

    @pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
    def test_a_bad_key_is_refused_by_every_verb(self, store: Store, key: str) -> None:
        store.put("good", b"1")
        for call in (
            lambda: store.put(key, b"1"),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 0),
            lambda: store.delete([key]),
        ):
            with pytest.raises(Refused):
                call()
        assert [e.key for e in store.list("")] == ["good"]

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", ".a/", "a/b"])
    def test_a_bad_prefix_is_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(Refused):
            store.list(prefix)

    def test_names_like_those_of_temporary_or_special_files_are_names(self, store: Store) -> None:
        keys = ["tmp", "x.tmp", "-rf", "_", "a..b", "CON", "lost-found/x", "a.partial", "n" * 200, "d/" * 40 + "deep"]
        for key in keys:
            store.put(key, key.encode())
        assert [e.key for e in store.list("")] == sorted(keys)
        for key in keys:
            assert store.get(key) == key.encode()

    # threads

    def test_many_threads_put_read_list_and_delete_at_once(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(me: int) -> None:
            try:
                for n in range(6):
                    key = f"t/{me % 2}/{me}-{n}"  # two threads to a folder, which deletes keep emptying
                    store.put(key, key.encode() * 50)
                    assert store.get(key) == key.encode() * 50
                    assert store.get_range(key, 1, 4) == key.encode()[1:4]
                    assert key in {e.key for e in store.list("t/")}
                    if n % 2:
                        store.delete([key])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [e.key for e in store.list("")] == sorted(f"t/{me % 2}/{me}-{n}" for me in range(4) for n in (0, 2, 4))
