"""API keys: who may ask, and for which namespace."""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from hashlib import sha256

from kvboost_rag.server.errors import ApiError

__all__ = ["OPERATOR", "Keys", "check_host"]

OPERATOR = "*"
"""In the place of a namespace: a key that reads the metrics of all namespaces and nothing else."""

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_KEY = 16


@dataclass(frozen=True)
class Keys:
    """The keys of all namespaces; without any, everybody shares one namespace without a name.

    Parameters
    ----------
    digests
        SHA-256 of each key, and its namespace or `OPERATOR`.
    """

    digests: tuple[tuple[bytes, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Read keys.

        Parameters
        ----------
        text
            ``namespace:key`` entries with white space between them; lines that begin with ``#`` do not count. A
            namespace may have several keys. The namespace ``*`` is for the key that reads the metrics.

        Raises
        ------
        ValueError
            If there are none, or one can not be used.
        """
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        entries = [_entry(number, entry) for number, entry in enumerate(" ".join(lines).split(), 1)]
        if not any(namespace != OPERATOR for _, namespace in entries):
            raise ValueError("there are no API keys; write namespace:key, one a line")
        if len({digest for digest, _ in entries}) < len(entries):
            raise ValueError("an API key comes twice; give each entry its own")
        return cls(tuple(entries))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces, in order; one without a name where there are no keys."""
        return tuple(dict.fromkeys(name for _, name in self.digests if name != OPERATOR)) or ("",)

    def namespace(self, authorization: str | None) -> str:
        """Return the namespace of a request, or `OPERATOR`, from its ``Authorization`` header.

        Every key is compared, in constant time, so that the time tells nothing about any of them.

        Raises
        ------
        ApiError
            401 if the key is missing or wrong.
        """
        if not self.digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        matches = [namespace for digest, namespace in self.digests if hmac.compare_digest(digest, given)]
        if scheme.lower() != "bearer" or not matches:
            what = "wrong" if authorization else "missing"
            raise ApiError(
                401, f"the API key is {what}; send the header 'Authorization: Bearer KEY'", "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return matches[0]


def _entry(number: int, entry: str) -> tuple[bytes, str]:
    namespace, colon, key = entry.partition(":")
    if not colon or (namespace != OPERATOR and not _NAMESPACE.fullmatch(namespace)):
        # The entry itself may be a key and is not shown.
        raise ValueError(
            f"entry {number} of the API keys is not namespace:key; a namespace has up to 64 letters, digits, '.', '_' "
            "and '-'"
        )
    if len(key) < _MIN_KEY or not key.isascii() or not key.isprintable():
        raise ValueError(
            f"the API key of {namespace!r} (entry {number}) has less than {_MIN_KEY} characters or others than "
            'printable ASCII; make one by python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return sha256(key.encode()).digest(), namespace


def check_host(host: str, keys: Keys, *, allow_anyone: bool = False) -> None:
    """Refuse to serve another machine without keys.

    Raises
    ------
    ValueError
        If the host is none of this machine's own, there are no keys, and ``allow_anyone`` is not set.
    """
    if keys.digests or allow_anyone or is_loopback(host):
        return
    raise ValueError(
        f"everybody who reaches {host} could ask and read all documents; give --api-keys, keep --host 127.0.0.1, or "
        "say --allow-anyone"
    )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen from itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
