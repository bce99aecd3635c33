"""Which Redis server machines share KV by, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

__all__ = ["RedisTier", "redis_tier"]

_SCHEMES = ("redis", "rediss", "unix")
# What may stand in the URL's query besides ssl_...; other arguments of a connection would change what values are.
_QUERY = (
    "client_name", "db", "health_check_interval", "max_connections", "password", "socket_connect_timeout",
    "socket_keepalive", "username",
)  # fmt: skip


@dataclass(frozen=True)
class RedisTier:
    """A Redis server behind memory and folder, which several machines share.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` (TLS) or ``unix://``, with user, password and database as the client ``redis``
        takes them; ``?ssl_ca_certs=FILE`` names the certificate of an own authority. Never printed or logged.
    ttl_seconds
        How long a chunk stays at most, counted from its writing.
    prefill_rate
        Tokens a second that this machine computes, which limits how long a read may take: the time to compute the
        chunk, and 0.05 s. None measures it when the engine is made, by one forward of 128 tokens.

    Raises
    ------
    ValueError
        If the URL is none of these, or a number is not above 0.
    """

    url: str = field(repr=False)
    ttl_seconds: int = 7 * 24 * 3600
    prefill_rate: float | None = None

    def __post_init__(self) -> None:
        """Check everything that needs no server; no message shows the URL, which may hold a password."""
        if not isinstance(self.url, str) or _scheme(self.url) not in _SCHEMES:
            raise ValueError("store is no URL of a Redis server; give redis://, rediss:// or unix://")
        _check_parts(self.url)
        if not isinstance(self.ttl_seconds, int) or self.ttl_seconds < 1:
            raise ValueError(f"ttl_seconds is {self.ttl_seconds!r}; give whole seconds, 1 or more")
        if self.prefill_rate is not None and not self.prefill_rate > 0:
            raise ValueError(f"prefill_rate is {self.prefill_rate!r}; give tokens a second above 0, or None")

    @property
    def where(self) -> str:
        """The server without user, password and options, for messages."""
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        host = parts.hostname or "localhost"
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or 6379}{parts.path}"

    def __str__(self) -> str:
        """Return where the server is."""
        return self.where


def redis_tier(store: str | RedisTier | None) -> RedisTier | None:
    """Make a tier of an engine's ``store``: a URL, or a tier as it is."""
    return store if store is None or isinstance(store, RedisTier) else RedisTier(store)


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _check_parts(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port, parts.hostname
    except ValueError:
        # The message would hold a part of the URL.
        raise ValueError(
            "the URL of the Redis server has no valid host and port; percent-encode / ? # @ in user and password"
        ) from None
    unknown = sorted({name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - set(_QUERY))
    unknown = [name for name in unknown if not name.startswith("ssl_")]
    if unknown:
        raise ValueError(
            f"the URL of the Redis server has unknown options: {', '.join(unknown)}; it takes {', '.join(_QUERY)} "
            "and ssl_..., and RedisTier takes the rest"
        )
    if parts.scheme == "unix" and not parts.path:
        raise ValueError("the URL of the Redis server names no socket; give unix:///path/of/the/socket")
    database = parts.path.removeprefix("/")
    if parts.scheme != "unix" and database and not database.isdigit():
        raise ValueError("the path of a Redis server's URL is the number of a database, as in redis://host:6379/0")
