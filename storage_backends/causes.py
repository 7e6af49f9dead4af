"""What an exception of the kernel or of a storage library means: absent, worth another try, or not.

Libraries wrap each other (botocore in s3fs in fsspec), so the whole chain of causes is asked, outermost first; the
first link that is sure decides. What nobody is sure of is worth another try: a needless retry costs a minute,
at the end of which the error is raised all the same; a needless refusal costs the save.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from storage_backends.base import NotFound, Refused, StorageError, Throttled, Unavailable

# By number rather than by exception class: Python has no class for ENOSPC, EROFS or ESTALE.
REFUSED_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.ENOSPC,
        errno.EROFS,
        errno.EDQUOT,
        errno.EFBIG,
        errno.ENAMETOOLONG,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EXDEV,
        errno.EMSGSIZE,
        errno.ENXIO,
        errno.ENODEV,
    }
)
TRANSIENT_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EPIPE,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.EREMOTEIO,
    }
)

# Error codes of object stores that say more than the exception they arrive in. s3fs turns a missing bucket into the
# FileNotFoundError of a missing object (which would make a mistyped bucket an empty store), and a body damaged on its
# way into EINVAL.
REFUSED_CODES = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerDisabled", "AccountIsDisabled"})
TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "OperationTimedOut",
        "RequestTimeout",
    }
)
# What S3 and its likes, Azure and Google say where they would rather be asked less. "ServiceUnavailable" also comes
# from a server that is not up yet, where asking less often does no harm.
THROTTLED_CODES = frozenset(
    {
        "BandwidthLimitExceeded",
        "EC2ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "ServerBusy",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
# Exceptions that are no OSError and carry no status, by class name: importing their libraries for `isinstance` would
# make every backend a dependency.
REFUSED_NAMES = frozenset(
    {
        "AuthenticationException",
        "BadHostKeyException",
        "ClientAuthenticationError",
        "DefaultCredentialsError",
        "NoCredentialsError",
        "NonRetryableError",
        "ParamValidationError",
        "PartialCredentialsError",
        "PasswordRequiredException",
        "ProfileNotFound",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)

# A wrong option, or a bug here or there: no number of tries changes it.
MISTAKES = (ValueError, TypeError, AttributeError, ImportError, KeyError)

# Connections that broke or were silent: no OSError either, and what they were raised from may look like a bug.
TRANSIENT_NAMES = frozenset(
    {
        "ClientOSError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "EndpointConnectionError",
        "IncompleteReadError",
        "ReadTimeoutError",
        "ResponseStreamingError",
        "ServerDisconnectedError",
        "ServiceRequestError",
        "ServiceResponseError",
    }
)


def meaning(error: BaseException) -> type[StorageError]:
    """`NotFound`, `Unavailable` (`Throttled`, where that is why) or `Refused`, by the first link in the chain of causes
    that is sure."""
    links = list(_chain(error))
    # Codes first, over the whole chain: a translated outer exception knows less than the answer it was made from.
    for link in links:
        code = _code(link)
        if code in REFUSED_CODES:
            return Refused
        if code in THROTTLED_CODES:
            return Throttled
        if code in TRANSIENT_CODES:
            return Unavailable
    for link in links:
        kind = _alone(link)
        if kind is not None:
            return kind
    # Last of all: azure's library trips (TypeError) over a 503 whose body it does not know; the 503 is what counts.
    return Refused if any(isinstance(link, MISTAKES) for link in links) else Unavailable


def telling(error: BaseException) -> BaseException:
    """The link in the chain of causes to show: the outermost that is no mistake made while handling another."""
    return next((link for link in _chain(error) if not isinstance(link, MISTAKES)), error)


def _alone(error: BaseException) -> type[StorageError] | None:
    """What this exception says by itself, or None if it is not sure."""
    match error:
        case StorageError():
            return type(error)
        case FileNotFoundError():
            return NotFound
        case PermissionError() | NotImplementedError():
            return Refused
        case TimeoutError() | ConnectionError() | EOFError():
            return Unavailable
        case OSError(errno=number) if number in REFUSED_ERRNOS:
            return Refused
        case OSError(errno=number) if number in TRANSIENT_ERRNOS:
            return Unavailable
        case OSError(errno=errno.ENOENT):
            return NotFound
        case FileExistsError() | IsADirectoryError() | NotADirectoryError():
            return Refused
    if type(error).__name__ in TRANSIENT_NAMES:
        return Unavailable
    if type(error).__name__ in REFUSED_NAMES:
        return Refused
    status = _status(error)
    if status is not None:
        return _by_status(status)
    return None


def _by_status(status: int) -> type[StorageError] | None:
    """HTTP: gone, overloaded or broken on the other side, or our own fault."""
    match status:
        case 404 | 410:
            return NotFound
        case 429 | 503:
            return Throttled
        case 408 | 409 | 425:
            return Unavailable
        case _ if status >= 500 and status not in (501, 505, 507):
            return Unavailable
        case _ if status >= 400:
            return Refused
    return None


def _code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)  # botocore
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        return code if isinstance(code, str) else None
    code = getattr(error, "error_code", None)  # azure: a str enum
    return str(getattr(code, "value", code)) if code is not None else None


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
        status = getattr(error, name, None)
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, its cause, the cause of that…; a cycle ends it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
