"""Cases of CASES.md (Storage, Publishing) on a real server, where it makes a difference that it is one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.cli import main
from ckpt.errors import NoSnapshot, Refused, SaveFailed, Unavailable
from ckpt.history.catalog import read_history
from ckpt.history.retention import plan_prune
from storage_backends import RetryingStore, Store
from storage_backends.base import Buffer
from tests.servers.job import findings
from tests.support.faulty import _Watched
from tests.support.procs import Job, run_ranks, succeed
from tests.support.servers import Place, Proxy
from tests.support.servers.fixture import Servers
from tests.support.worlds import PATIENT, group, quiet

pytestmark = [pytest.mark.e2e, pytest.mark.servers]


@pytest.fixture
def place(servers: Servers) -> Place:
    return servers("seaweedfs").place()


@pytest.fixture
def proxy(servers: Servers) -> Iterator[Proxy]:
    with servers.proxied(servers("seaweedfs")) as proxy:
        yield proxy


def saved(store: Store, *steps: int, size: int = 5000) -> None:
    """Steps whose tensor is full of their number."""
    tensor = torch.zeros(size)
    with ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=quiet()) as saver:
        saver.restore()
        for step in steps:
            tensor.fill_(step)
            saver.save(step).wait(PATIENT)


def holds(store: Store, step: int) -> None:
    assert read_history(store).newest is not None
    assert set(ckpt.load(store)["t"].tolist()) == {float(step)}


class Turning(_Watched):
    """Puts of packs go to another store from `turned` on."""

    def __init__(self, inner: Store, other: Store) -> None:
        self._inner = inner
        self._other = other
        self.turned = False

    def _before(self, verb: str, key: str) -> None:
        return

    def put(self, key: str, data: Buffer) -> None:
        (self._other if self.turned and key.startswith("packs/") else self._inner).put(key, data)


def one_has_a_wrong_password(place: Place) -> None:
    with group() as rank:
        tensor = torch.zeros(40_000)
        store = Turning(place.open(), place.with_options(secret="wrong").open())
        saver = ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=quiet(chunk=4096, commit_wait=600))
        saver.restore()
        tensor.fill_(1)
        saver.save(1).wait(PATIENT)
        tensor.fill_(2)
        store.turned = rank == 2
        ticket = saver.save(2)
        if rank == 2:
            with pytest.raises(SaveFailed, match=r"SignatureDoesNotMatch|signature") as told:
                ticket.wait(PATIENT)
            assert isinstance(told.value.__cause__, Refused)
        store.turned = False
        dist.barrier()
        tensor.fill_(3)
        with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            saver.save(3).wait(PATIENT)
        assert isinstance(ticket.error, SaveFailed), "nobody waits ten minutes for a commit that cannot come"
        saver.close()


def test_four_ranks_of_which_one_is_denied_publish_nothing_and_all_learn_of_it(place: Place) -> None:
    """C2, with the server's own 403: the step before is still the newest until the next one."""
    succeed(run_ranks(one_has_a_wrong_password, 4, [place]))
    store = place.open()
    assert [id_.step for id_ in sorted(read_history(store).snapshots)] == [1, 3]
    holds(store, 3)
    with pytest.raises(NoSnapshot):
        ckpt.load(store, 2)


def trains(place: Place) -> None:
    tensor = torch.zeros(200_000)
    with ckpt.Checkpointer(place.open(), {"t": tensor}, every=1, mirror="off", options=quiet()) as saver:
        start = saver.restore()
        assert set(tensor.tolist()) == {float(start)}, start
        print(f"restored {start}.")
        for step in range(start + 1, 10_000):
            tensor.fill_(step)
            saver.step(step)
            print(f"captured {step}.")


def test_killed_over_and_over_the_newest_published_step_loads_and_verifies(place: Place) -> None:
    """C1, in small: that it is a server changes what a kill leaves half-sent."""
    store = place.open()
    newest = 0
    for _ in range(6):
        with Job(trains, 1, [place]) as job:
            job.until(0, f"restored {newest}.")
            job.until(0, f"captured {newest + 2}.")
            job.kill(0, signal.SIGKILL)
            job.wait()
        found = read_history(store).newest
        assert found is not None and found.step >= newest + 1
        newest = found.step
        holds(store, newest)
    assert findings(store) == []


def test_what_lies_between_is_passed_over(place: Place) -> None:
    """C7: foreign files, zero-byte and cut documents."""
    store = place.open()
    saved(store, 1, 2)
    history = read_history(store)
    newest = history.newest
    assert newest is not None
    document = store.get(history.keys[newest])
    later = history.keys[newest].replace("000000000002", "000000000003")
    store.put(later, document[: len(document) // 2])
    store.put(later.replace("000000000003", "000000000004"), b"")
    store.put("snapshots/readme.txt", b"hello")
    store.put("parts/half", b"\0" * 10)
    saved(store, 5)
    holds(store, 5)
    assert len(read_history(store).problems) >= 3


def test_objects_that_are_not_what_was_put_are_found(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """M2: a body cut short, and one of full size whose middle is gone."""
    store = place.open()
    tensor = torch.randn(20_000)
    with ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=quiet()) as saver:
        saver.restore()
        saver.save(1).wait(PATIENT)
    pack = next(entry for entry in store.list("packs/"))
    data = store.get(pack.key)
    middle = len(data) // 2
    for damaged in (data[:-7], data[: middle - 20] + bytes(40) + data[middle + 20 :]):
        assert damaged != data
        store.put(pack.key, damaged)
        assert main(["verify", place.url, "--deep", *place.flags()]) == 1
        assert pack.key in capsys.readouterr().out
        with pytest.raises(ckpt.DamagedError):
            ckpt.load(store)
    store.put(pack.key, data)
    assert torch.equal(ckpt.load(store)["t"], tensor)


def test_what_cannot_be_listed_is_never_empty_and_nothing_is_pruned(proxy: Proxy, place: Place) -> None:
    """M3: throttled for ever; and for a while, which nobody notices."""
    saved(place.open(), 1, 2, 3)
    behind = proxy.place(place)
    impatient = RetryingStore(behind.bare(), deadline=1.0)
    proxy.set(fail=1.0, methods="GET")
    with pytest.raises(Unavailable):
        read_history(impatient)
    with pytest.raises(Unavailable):
        plan_prune(impatient, ckpt.Keep(last=1), grace=0.0)
    tensor = torch.zeros(5000)
    saver = ckpt.Checkpointer(impatient, {"t": tensor}, mirror="off", options=quiet())
    with pytest.raises(Unavailable):
        saver.restore()
    saver.close()
    assert "DELETE" not in {request.method for request in proxy.requests()}
    proxy.set(fail=0.3)
    assert len(read_history(behind.open()).snapshots) == 3


def test_a_fault_now_and_then_at_any_request_is_retried_and_nothing_comes_of_it(proxy: Proxy) -> None:
    """M5: one request in five is answered with 503, one in twenty reset."""
    proxy.set(fail=0.2, reset=0.05)
    store = proxy.place().open()
    saved(store, *range(1, 6))
    fates = {request.fate for request in proxy.requests()}
    assert fates == {"pass", "fail", "reset"}
    proxy.set()
    assert len(read_history(store).snapshots) == 5
    holds(store, 5)
    assert findings(store) == []


def test_requests_do_not_depend_on_the_number_of_tensors(proxy: Proxy) -> None:
    """M11, as HTTP requests of a save and of a load."""
    counts = []
    for tensors in (10, 3000):
        store = proxy.place().open()
        state = {"many": torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(8)) for _ in range(tensors))}
        with ckpt.Checkpointer(store, dict(state), mirror="off", options=quiet(heartbeat=60)) as saver:
            saver.restore()
            saver.save(1).wait(PATIENT)
            before = len(proxy.requests())
            with torch.no_grad():
                state["many"][3].fill_(1.0)
            saver.save(2).wait(PATIENT)
            after = len(proxy.requests())
        loading = len(proxy.requests())
        assert len(ckpt.load(store, names="many.*")) == tensors
        counts.append((after - before, len(proxy.requests()) - loading))
    assert counts[0] == counts[1], counts
    assert max(counts[0]) <= 12, counts


def test_a_full_temporary_folder_does_not_matter(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """M6: nothing is staged on this machine on its way to a server."""
    monkeypatch.setenv("TMPDIR", os.devnull)
    for kind in ("seaweedfs", "sftp"):
        store = servers(kind).place().open()
        saved(store, 1, size=300_000)
        holds(store, 1)
