"""`meaning`: exceptions of the kernel, fsspec, botocore, azure, gcsfs and paramiko, as they were seen."""

from __future__ import annotations

import errno

import pytest

from storage_backends.base import NotFound, Refused, StorageError, Throttled, Unavailable
from storage_backends.causes import REFUSED_ERRNOS, TRANSIENT_ERRNOS, meaning, telling


class ClientError(Exception):
    """botocore's, as far as it is looked at."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpResponseError(Exception):
    """azure's."""

    def __init__(self, status: int, code: str | None = None) -> None:
        super().__init__(str(status))
        self.status_code = status
        self.error_code = code


class HttpError(Exception):
    """gcsfs's: its code may be a text."""

    def __init__(self, code: int | str) -> None:
        super().__init__(str(code))
        self.code = code


class NoCredentialsError(Exception):
    """botocore's: no status, no response."""


class SSHException(Exception):  # noqa: N818 - its own name
    """paramiko's."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(errno.ENOENT, "no"), NotFound),
        (OSError(errno.EIO, "io"), Unavailable),
        (OSError(errno.ESTALE, "stale"), Unavailable),
        (TimeoutError(), Unavailable),
        (ConnectionResetError(), Unavailable),
        (EOFError(), Unavailable),
        (OSError(errno.ENOSPC, "full"), Refused),
        (OSError(errno.EROFS, "read-only"), Refused),
        (PermissionError("no errno"), Refused),
        (NotImplementedError(), Refused),
        (TypeError("unexpected keyword"), Refused),
        (FileExistsError(), Refused),
        (SSHException("channel closed"), Unavailable),
        (RuntimeError("who knows"), Unavailable),
        (ClientError("SlowDown", 503), Throttled),
        (ClientError("InternalError", 500), Unavailable),
        (ClientError("NoSuchKey", 404), NotFound),
        (ClientError("AccessDenied", 403), Refused),
        (HttpResponseError(429), Throttled),
        (HttpResponseError(503, "ServerBusy"), Throttled),
        (HttpResponseError(500), Unavailable),
        (HttpResponseError(416), Refused),
        (HttpResponseError(501), Refused),
        (HttpResponseError(404, "BlobNotFound"), NotFound),
        (HttpResponseError(404, "ContainerNotFound"), Refused),
        (HttpError("503"), Throttled),
        (HttpError(401), Refused),
        (NoCredentialsError(), Refused),
    ],
    ids=repr,
)
def test_one_exception_by_itself(error: Exception, kind: type[StorageError]) -> None:
    assert meaning(error) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # s3fs makes a missing bucket look like a missing object: a mistyped bucket must not be an empty store.
        (caused(FileNotFoundError("bucket"), ClientError("NoSuchBucket", 404)), Refused),
        # … and a body damaged on its way like a wrong argument.
        (caused(OSError(errno.EINVAL, "digest"), ClientError("BadDigest", 400)), Unavailable),
        (caused(OSError(errno.EINVAL, "range"), ClientError("InvalidRange", 416)), Refused),
        (caused(OSError(errno.EBUSY, "slow"), ClientError("SlowDown", 503)), Throttled),
        # adlfs wraps what went wrong in a RuntimeError.
        (caused(RuntimeError("Failed to remove"), HttpResponseError(403)), Refused),
        (caused(RuntimeError("Failed to remove"), HttpResponseError(503)), Throttled),
        (caused(RuntimeError("outer"), caused(RuntimeError("inner"), PermissionError())), Refused),
        (caused(NotFound("x", store="s", key="k"), ConnectionError()), NotFound),
        # azure's library trips over an error whose body it does not know.
        (caused(TypeError("unsupported operand"), HttpResponseError(503)), Throttled),
        (caused(TypeError("unsupported operand"), HttpResponseError(403)), Refused),
        (caused(RuntimeError("outer"), ValueError("wrong option")), Refused),
    ],
    ids=repr,
)
def test_wrapped_causes_are_asked(error: Exception, kind: type[StorageError]) -> None:
    assert meaning(error) is kind


def test_an_exception_raised_while_handling_another_is_asked_and_a_cycle_ends() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert meaning(one) is Unavailable
    late = RuntimeError("late")
    late.__context__ = OSError(errno.EACCES, "denied")
    assert meaning(late) is Refused
    late.__suppress_context__ = True
    assert meaning(late) is Unavailable


def test_what_is_told_is_the_fault_and_not_the_mistake_made_in_handling_it() -> None:
    fault = HttpResponseError(503)
    assert telling(caused(TypeError("unsupported operand"), fault)) is fault
    alone = TypeError("unexpected keyword")
    assert telling(alone) is alone


def test_no_error_number_is_both() -> None:
    assert not REFUSED_ERRNOS & TRANSIENT_ERRNOS
    assert errno.ENOENT not in REFUSED_ERRNOS | TRANSIENT_ERRNOS
