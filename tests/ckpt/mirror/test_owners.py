"""Whose a mirror is: the process tells where its id means something, else the lock, else nobody."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from ckpt.mirror import owners
from ckpt.mirror.owners import judge, owner_of
from tests.ckpt.mirror.making import ELSEWHERE, ME

MINE = owner_of(ME, 5.0)
GONE = dataclasses.replace(ME, pid_started="1")


@pytest.mark.parametrize(
    ("owner", "unlocked", "verdict"),
    [
        (MINE, False, "live"),
        (MINE, True, "live"),  # a lock may be lost; a process is a process
        (owner_of(GONE, 5.0), True, "dead"),  # another process has its id now
        (owner_of(GONE, 5.0), False, "dead"),  # its DataLoader workers hold the lock a little longer
        (owner_of(dataclasses.replace(ME, boot="before"), 5.0), False, "dead"),
        (owner_of(dataclasses.replace(ME, boot="other", host="other"), 5.0), True, "unknown"),  # a shared disk
        (owner_of(ELSEWHERE, 5.0), False, "unknown"),  # another container, and somebody has it open
        (owner_of(ELSEWHERE, 5.0), True, "dead"),
        (None, True, "unknown"),
        (None, False, "unknown"),
    ],
)
def test_verdicts(owner: owners.Owner | None, unlocked: bool, verdict: str) -> None:
    assert judge(owner, ME, unlocked=unlocked) == verdict


def test_nobody_is_judged_where_there_is_no_proc() -> None:
    nowhere = dataclasses.replace(ME, boot="", pid_space="", pid_started="random")
    assert judge(owner_of(dataclasses.replace(nowhere, pid_started="x"), 5.0), nowhere, unlocked=False) == "unknown"


def test_this_process_is_told_from_a_later_one_with_its_number() -> None:
    assert owners.is_me(MINE, ME) and not owners.is_me(owner_of(GONE, 5.0), ME) and not owners.is_me(None, ME)


def test_a_lock_is_one_holders(tmp_path: Path) -> None:
    path = tmp_path / "x"
    one = os.open(path, os.O_RDWR | os.O_CREAT)
    two = os.open(path, os.O_RDWR)
    assert owners.lock(one) and not owners.lock(two)
    owners.unlock(one)
    assert owners.lock(two, wait=True)
    os.close(one)
    os.close(two)
