"""What a save and a restore of eight ranks ask of an object store: counted as HTTP requests, at a proxy before it."""

from __future__ import annotations

import queue
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.format.layout import lay_out
from ckpt.format.names import SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.saving.job import Failed, Outcome, SaveJob
from ckpt.saving.writer import Writer, WriterSettings
from tests.support.procs import run_ranks, succeed
from tests.support.servers import Place, Proxy, Request
from tests.support.servers.fixture import Servers
from tests.support.stores import DirectWriter, drifting
from tests.support.worlds import PATIENT, group, quiet

pytestmark = [pytest.mark.e2e, pytest.mark.servers]

WORLD = 8
SAVES = 11
LEARNED = 2
"""Saves after which the ranks know how long a commit takes here."""


def by_rank(requests: Sequence[Request]) -> Mapping[int, Sequence[str]]:
    """ "METHOD folder" of each request of each rank, heartbeats apart."""
    ranks: dict[int, list[str]] = defaultdict(list)
    for request in requests:
        if "/alive/" not in request.path and "rank/" in request.agent:
            folder = re.findall("packs|parts|snapshots|runs|pins|prunes|store.json", request.path)[0]
            ranks[int(request.agent.partition("rank/")[2].split()[0])].append(f"{request.method} {folder}")
    return ranks


def as_rank(place: Place, rank: int) -> Place:
    return place.with_options(config_kwargs={"user_agent_extra": f"rank/{rank}"})


def saves(proxy: Proxy) -> list[Mapping[int, Sequence[str]]]:
    """The requests of each of some saves. The writers of eight ranks in one process: eight processes on two cores
    would mostly wait for each other, and a commit never takes as long as usual."""
    place = proxy.place()
    plain = DirectWriter(place.open(), ranks=WORLD, chunk=4096)
    plain.begin()
    settings = WriterSettings(commit_wait=PATIENT, workers=1)
    writers = [Writer(as_rank(place, rank).open(), SystemClock(), settings) for rank in range(WORLD)]
    found = []
    layouts = []
    for step, state in enumerate(drifting(SAVES), start=1):
        if not layouts:
            leaves = {path: plain._leaf(path, value) for path, value in state.items()}
            layouts = [lay_out(plain._shards(leaves, state, rank), 4096) for rank in range(WORLD)]
        before = len(proxy.requests())
        outcomes: queue.Queue[Outcome] = queue.Queue()
        for rank, writer in enumerate(writers):
            data = plain._fill(layouts[rank], state, rank)
            id_ = SnapshotId(plain.run, step)
            time = 1e9 if rank == 0 else None
            writer.submit(
                SaveJob(id_, rank, WORLD, layouts[rank], data, {}, {}, {}, "0" * 32, None, time), outcomes.put
            )
        for _ in writers:
            outcome = outcomes.get(timeout=PATIENT)
            if isinstance(outcome, Failed):
                raise outcome.error
        assert all(writer.wait(PATIENT) for writer in writers)
        found.append(by_rank(proxy.requests()[before:]))
    assert all(writer.stop(PATIENT) for writer in writers)
    return found


def test_a_save_asks_for_its_packs_and_three_more_and_the_rank_that_commits_for_one_more_per_rank(
    servers: Servers,
) -> None:
    """In the good case, where a commit takes about as long as it usually does. On a machine that does much else not
    every save is one: the best of each rank counts."""
    with servers.proxied(servers("seaweedfs")) as proxy:
        counted = saves(proxy)
    waiting: dict[int, list[int]] = defaultdict(list)
    committing: list[int] = []
    for step, ranks in enumerate(counted, start=1):
        assert set(ranks) == set(range(WORLD))
        for rank, asked in ranks.items() if step > LEARNED else ():
            packs = asked.count("PUT packs")
            assert packs > 0
            (committing if rank == step % WORLD else waiting[rank]).append(len(asked) - packs)
    assert {rank: counts for rank, counts in waiting.items() if min(counts) > 3} == {}
    assert min(committing) <= WORLD + 8, committing


def saves_three(place: Place) -> None:
    with group() as rank:
        state: dict[str, object] = {
            "own": ckpt.PerRank(torch.full((40_000,), 1.0 + rank)),
            "shared": torch.ones(40_000),
        }
        with ckpt.Checkpointer(place.open(), state, keep=ckpt.Keep(last=1), mirror="off", options=quiet()) as saver:
            saver.restore()
            for step in (1, 2, 3):
                saver.save(step).wait(PATIENT)


def restores(place: Place, noted: str) -> None:
    """Marks in the list of requests where the restore begins and ends."""
    with group() as rank:
        own = torch.zeros(40_000)
        state: dict[str, object] = {"own": ckpt.PerRank(own), "shared": torch.zeros(40_000)}
        with ckpt.Checkpointer(as_rank(place, rank).open(), state, mirror="off", options=quiet()) as saver:
            assert saver.restore() == 3
            dist.barrier()
            if rank == 0:
                with open(noted, "a") as file:
                    file.write("END\t\t\t\n")
            dist.barrier()
        assert set(own.tolist()) == {1.0 + rank}


def test_a_restore_asks_for_its_packs_and_its_part_and_the_rank_that_chooses_reads_the_history(
    servers: Servers,
) -> None:
    server = servers("seaweedfs")
    place = server.place()
    succeed(run_ranks(saves_three, WORLD, [place], timeout=240))
    history = read_history(place.open())
    documents = len(history.snapshots) + len(history.runs)
    with servers.proxied(server) as proxy:
        succeed(run_ranks(restores, WORLD, [proxy.place(place), str(proxy.folder / "requests")], timeout=240))
        requests = proxy.requests()
    ranks = by_rank(requests[: [request.method for request in requests].index("END")])
    assert set(ranks) == set(range(WORLD))
    for rank, asked in ranks.items():
        packs = asked.count("GET packs")
        assert packs > 0
        others = len(asked) - packs
        assert others <= 3 if rank else others - documents <= WORLD + 8, (rank, asked)
