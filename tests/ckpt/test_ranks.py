from __future__ import annotations

import signal
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ckpt.errors import CheckpointError
from ckpt.ranks import Ranks, open_ranks, torchrun_job
from tests.support.procs import Job, free_port, run_ranks, show, succeed, torchrun


def test_one_process_alone_answers_every_call_by_itself() -> None:
    ranks = open_ranks()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.vote([3, -3]) == [3, -3]
    assert ranks.vote_async([7]).result() == [7]
    assert ranks.gather(b"abc") == [b"abc"]
    assert ranks.broadcast(b"") == b""
    assert ranks.exchange({}, {}) == {}
    with pytest.raises(ValueError, match="takes data there and None elsewhere"):
        ranks.broadcast(None)
    ranks.close()


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(CheckpointError, match=r"rank 1 of 3: .*init_process_group"):
        open_ranks()


def test_the_default_run_id_of_torchrun_names_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun_job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert torchrun_job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-3")
    assert torchrun_job() == "night-3"


def speak() -> None:
    dist.init_process_group("gloo")
    ranks = open_ranks(timeout=30)
    r = ranks.rank
    assert ranks.vote([r, -r, 2**62 + r, -(2**62) - r]) == [2, 0, 2**62 + 2, -(2**62)]
    assert ranks.gather(b"x" * (r * 1000)) == [b"", b"x" * 1000, b"x" * 2000]
    assert ranks.gather(b"") == [b"", b"", b""]
    every_byte = bytes(range(256))
    assert ranks.broadcast(every_byte if r == 1 else None, src=1) == every_byte
    assert ranks.broadcast(b"" if r == 0 else None) == b""
    # Any pairs at once, each way, large and small; some ranks have nothing to say.
    out = {0: {1: b"a" * 3_000_000, 2: b"b"}, 1: {0: b"c" * 5}, 2: {}}
    sizes = {src: len(sent[r]) for src, sent in out.items() if r in sent}
    for _ in range(2):
        got = ranks.exchange({dst: np.frombuffer(data, np.uint8).copy() for dst, data in out[r].items()}, sizes)
        assert {src: data.tobytes() for src, data in got.items()} == {s: out[s][r] for s in sizes}
    for step in range(5):  # begun at one step, read at the next
        pending = ranks.vote_async([int(step == 3 and r == 2)])
        tensor = torch.ones(4)
        dist.all_reduce(tensor)  # training's own collectives run in between
        assert pending.result() == pending.result() == [int(step == 3)]
    if r == 0:
        with pytest.raises(ValueError, match="rank 0: broadcast from rank 1"):
            ranks.broadcast(b"x", src=1)
    dist.destroy_process_group()  # people close theirs before ours
    assert ranks.vote([1]) == [1]
    ranks.close()
    ranks.close()
    with pytest.raises(CheckpointError, match=r"rank \d of 3: .* closed"):
        ranks._guarded(lambda: None)
    print("spoken")


def test_votes_gathers_and_broadcasts_reach_every_rank() -> None:
    assert all("spoken" in out for out in succeed(run_ranks(speak, 3)))


def skip_one_call() -> None:
    dist.init_process_group("gloo")
    ranks = open_ranks(timeout=1.0)
    ranks.vote([0])
    if ranks.rank == 1:
        print("waiting")
        sys.stdin.readline()
    for _ in range(2):  # a group that failed once is never used again
        try:
            ranks.vote([1])
        except CheckpointError as error:
            print("refused:", error)
    ranks.close()
    print("left")


def test_a_call_that_one_rank_does_not_make_is_an_error_that_says_so() -> None:
    with Job(skip_one_call, 2) as job:
        job.until(0, "left")
        job.tell(1)
        first, late = succeed(job.wait())
    assert first.count("save()/restore() was not called on every rank") == 2, first
    assert "rank 0 of 2" in first and "group_timeout" in first
    assert "gave up waiting for this one" in late and "left" in late


def outlive_a_peer() -> None:
    dist.init_process_group("gloo")
    ranks = open_ranks(timeout=60)
    ranks.vote([0])
    print("ready")
    if ranks.rank == 1:
        sys.stdin.readline()  # never comes
    with pytest.raises(CheckpointError, match="another rank is gone"):
        ranks.vote([1])
    ranks.close()
    print("survived")


def test_a_dead_peer_is_an_error_at_once_and_not_a_hang() -> None:
    with Job(outlive_a_peer, 2) as job:
        job.until(1, "ready")
        job.kill(1)
        survivor, dead = job.wait()
    assert dead.code == -signal.SIGKILL
    assert survivor.code == 0 and "survived" in survivor.out, show([survivor, dead])


LEAVE_ALONE = """
    import sys
    import torch.distributed as dist
    from ckpt.ranks import open_ranks
    dist.init_process_group("gloo")
    ranks = open_ranks(timeout=1000)
    ranks.vote([0])
    if ranks.rank == 1:
        sys.stdin.readline()
        sys.exit(0)
    ranks.vote_async([0])
    ranks.close(grace=0.01)
    sys.exit(7)
"""


@pytest.mark.e2e
def test_a_rank_that_leaves_with_a_vote_on_its_way_does_not_wait_for_the_others() -> None:
    """Its training raised while the others, alive, wait for it: gloo's destructor would sit there for the timeout."""
    with Job(LEAVE_ALONE, 2) as job:
        assert job.ended(0) == 7
        job.tell(1)
        job.wait()


def report_timeout(seconds: float | None) -> None:
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    ranks = open_ranks(seconds)
    group = ranks._group
    assert group is not None
    print("limit", group._get_backend(torch.device("cpu")).options._timeout)  # type: ignore[attr-defined]
    ranks.vote([1])
    ranks.close()


def test_the_timeout_is_the_default_groups_unless_told_otherwise() -> None:
    assert "limit 0:01:17" in succeed(run_ranks(report_timeout, 2, [None]))[0]
    assert "limit 0:00:05" in succeed(run_ranks(report_timeout, 2, [5.0]))[0]


@pytest.mark.e2e
def test_ranks_find_each_other_under_torchrun() -> None:
    source = """
        import os
        import torch.distributed as dist
        from ckpt.ranks import open_ranks, torchrun_job
        dist.init_process_group("gloo")
        ranks = open_ranks()
        # One write for the whole line: the ranks share a pipe.
        os.write(1, f"job {torchrun_job()} max {ranks.vote([ranks.rank])}\\n".encode())
        ranks.close()
        dist.destroy_process_group()
    """
    with torchrun(source, 2, run_id="night") as job:
        (result,) = job.wait()
    assert result.code == 0 and result.out.count("job night max [1]") == 2, result.out


def test_a_world_of_one_needs_no_group() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        ranks = open_ranks()
        assert isinstance(ranks, Ranks) and ranks.world_size == 1 and ranks.vote([4]) == [4]
        ranks.close()
    finally:
        dist.destroy_process_group()
