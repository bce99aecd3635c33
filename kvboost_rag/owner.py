"""Who wrote the files of a cache folder, by a secret that nobody else knows."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvboost_rag.keys import fingerprint_of

__all__ = ["Owner", "tenant_of"]

_SHORTEST = 16


@dataclass(frozen=True)
class Owner:
    """Holder of a secret.

    Parameters
    ----------
    secret
        At least 16 bytes that can not be guessed.

    Raises
    ------
    ValueError
        If the secret is shorter.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse what can be guessed."""
        if len(self.secret) < _SHORTEST:
            raise ValueError(
                f"the secret has {len(self.secret)} bytes; give at least {_SHORTEST} that can not be guessed, as "
                "secrets.token_hex(32) makes them"
            )

    @classmethod
    def of(cls, secret: str | bytes | None) -> Owner | None:
        """Make the owner with this secret; None without one."""
        if secret is None:
            return None
        if not isinstance(secret, (str, bytes)):
            raise ValueError(f"a secret is text or bytes, not {type(secret).__name__}")
        return cls(secret.encode() if isinstance(secret, str) else secret)

    @property
    def name(self) -> str:
        """What tells owners apart and does not give the secret away: 32 hexadecimal digits."""
        return self.mac([b"kvboost_rag owner"])[:32]

    def mac(self, frames: Iterable[bytes | memoryview]) -> str:
        """Return what only the holder of the secret can compute of some bytes: HMAC-SHA256, 64 hexadecimal digits."""
        state = hmac.new(self.secret, digestmod="sha256")
        for frame in frames:
            state.update(frame)
        return state.hexdigest()

    def vouches(self, frames: Iterable[bytes | memoryview], mac: str) -> bool:
        """Whether these bytes were signed with the secret."""
        return hmac.compare_digest(self.mac(frames).encode(), mac.encode("utf-8", "surrogatepass"))


def tenant_of(namespace: str, owner: Owner | None) -> str:
    """Make one text of namespace and owner, whose KV nobody else finds.

    Raises
    ------
    ValueError
        If the namespace is no text.
    """
    if not isinstance(namespace, str):
        raise ValueError(f"namespace is {namespace!r}; give each tenant a text of its own, or '' to all of them")
    return namespace if owner is None else fingerprint_of({"namespace": namespace, "owner": owner.name})
