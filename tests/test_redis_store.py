"""The tier that machines share, over a real server that is killed, filled, slowed down and lied to."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time

import pytest
from disk_chunks import DTYPE, IDENTITY, SHAPE, get, make_chunk, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import PATIENT, SlowWay, free_port, opened, running

from kvboost_rag.owner import Owner
from kvboost_rag.store import ChainedStore, DiskStore, MemoryStore, RedisStore, RedisTier, StoreOptions, TieredStore
from kvboost_rag.store.chunk_file import serialise
from kvboost_rag.store.layout import chunk_path
from kvboost_rag.store.redis_client import check_server
from kvboost_rag.store.striping import HEAD_BYTES, STRIPE_BYTES

SMALL, STRIPED = make_chunk(1), make_chunk(2, tokens=9000)


@pytest.fixture(scope="module")
def module_server():
    with running() as server:
        yield server


@pytest.fixture
def server(module_server):
    """A running server without a key."""
    module_server.empty()
    return module_server


def main_key(entry, server) -> str:
    return next(key for key in server.keys() if key.endswith(f":{entry.chunk.key.prefix}"))


def keys_of(entry, server) -> list[str]:
    return [key for key in server.keys() if entry.chunk.key.prefix in key]


def until(condition) -> None:
    """Wait for what has to come; pytest's timeout ends it."""
    while not condition():
        time.sleep(0.05)


# What is kept and found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [SMALL, STRIPED], ids=["small", "striped"])
def test_what_one_store_puts_another_one_gets(server, entry):
    prefix = entry.chunk.key.prefix
    with opened(server.url) as ours, opened(f"redis://127.0.0.1:{server.port}/0") as theirs:
        assert get(theirs, entry) is None
        assert prefix not in theirs
        assert ours.put(entry)
        assert ours.put(entry)
        assert prefix in theirs
        assert same(get(theirs, entry), entry)
        assert same(theirs.find(entry.chunk.key.content, entry.chunk.token_ids), entry)
        assert list(ours) == list(theirs) == [prefix]
        assert len(theirs) == 1
        assert theirs.nbytes == ours.nbytes == len(serialise(entry, IDENTITY))
        assert (ours.shared_hits, theirs.shared_hits) == (0, 2)
        assert theirs.get(prefix, entry.chunk.token_ids + 1) is None


def test_the_bytes_are_those_of_a_file_in_stripes_and_all_expire(server, tmp_path):
    with opened(server.url) as store:
        store.put(STRIPED)
    first, *others = keys_of(STRIPED, server)
    with server.client() as client:
        values = [client.get(first)[HEAD_BYTES:], *(client.get(key) for key in others)]
        assert all(0 < client.ttl(key) <= 600 for key in server.keys())
    assert [len(value) for value in values[:-1]] == [STRIPE_BYTES] * 2
    path = chunk_path(tmp_path, IDENTITY, STRIPED.chunk.key.prefix)
    path.parent.mkdir()
    path.write_bytes(b"".join(values))
    assert same(get(disk(tmp_path), STRIPED), STRIPED)
    assert all(key.startswith(f"kvboost:1.3:{IDENTITY}:") for key in server.keys())


def test_nothing_outlives_its_time(server):
    with opened(server.url, ttl_seconds=1) as store:
        assert store.put(SMALL)
        until(lambda: not server.keys())
        assert get(store, SMALL) is None
        assert SMALL.chunk.key.prefix not in store


def test_other_identities_and_secrets_share_nothing(server, caplog):
    red, blue = (Owner.of(letter * 32) for letter in "rb")
    with opened(server.url, owner=red) as ours, opened(server.url, "1" * 32, owner=red) as other:
        ours.put(SMALL)
        assert same(get(ours, SMALL), SMALL)
        assert get(other, SMALL) is None
        assert other.find(SMALL.chunk.key.content, SMALL.chunk.token_ids) is None
    with opened(server.url, owner=blue, read_only=True) as theirs:
        assert get(theirs, SMALL) is None
    assert "not signed with the owner's secret" in caplog.text


def test_a_chunk_without_a_signature_is_not_served_to_who_has_a_secret(server):
    with opened(server.url) as anybody:
        anybody.put(SMALL)
    with opened(server.url, owner=Owner.of("r" * 32)) as ours:
        assert get(ours, SMALL) is None
        assert ours.put(SMALL)
        assert same(get(ours, SMALL), SMALL)


def test_read_only_changes_nothing(server):
    with opened(server.url, read_only=True) as store:
        assert not store.wants(SMALL.chunk.key.prefix)
        assert not store.put(SMALL)
        assert not server.keys()
        with opened(server.url) as writer:
            writer.put(SMALL)
        with server.client() as client:
            client.setrange(main_key(SMALL, server), HEAD_BYTES + 2000, b"damaged")
        before = server.keys()
        assert get(store, SMALL) is None
        store.delete(SMALL.chunk.key)
        assert server.keys() == before


def test_a_removed_chunk_is_gone_for_all(server):
    with opened(server.url) as ours, opened(server.url) as theirs:
        for entry in (SMALL, STRIPED):
            ours.put(entry)
            assert get(theirs, entry)
            theirs.delete(entry.chunk.key)
            assert get(ours, entry) is None
            assert len(theirs) == 0
        assert not server.keys()


def test_writers_at_once_leave_one_chunk_and_no_stripe_of_another(server):
    done = []

    def write(go):
        with opened(server.url) as store:
            go.wait()
            done.append(store.put(STRIPED) and same(get(store, STRIPED), STRIPED))

    go = threading.Barrier(4)
    threads = [threading.Thread(target=write, args=(go,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4
    assert len(keys_of(STRIPED, server)) == 3


def test_names_that_are_no_part_of_a_key_are_refused(server):
    with pytest.raises(ValueError, match="can not be part of a key"):
        RedisStore(RedisTier(server.url), "a:b", SHAPE, DTYPE, prefill_rate=PATIENT)
    with opened(server.url) as store:
        assert "a:b" not in store
        assert store.get("a:b", SMALL.chunk.token_ids) is None
        assert store.find("a:b", SMALL.chunk.token_ids) is None


# Damage ----------------------------------------------------------------------------------------------------------


def lose_head(client, keys):
    client.delete(keys[0])


def lose_stripe(client, keys):
    client.delete(keys[1])


def cut_stripe(client, keys):
    client.set(keys[2], client.get(keys[2])[:-1])


def cut_head(client, keys):
    client.set(keys[0], client.get(keys[0])[:10])


def cut_first(client, keys):
    client.set(keys[0], client.get(keys[0])[:-5])


def lengthen(client, keys):
    client.append(keys[2], b"x")


def replace(client, keys):
    client.set(keys[0], b"somebody else's value")


def other_type(client, keys):
    client.delete(keys[0])
    client.rpush(keys[0], "a", "b")


def other_type_of_stripe(client, keys):
    client.delete(keys[1])
    client.hset(keys[1], "a", "b")


def flip(client, keys):
    client.setrange(keys[1], 12345, bytes([client.getrange(keys[1], 12345, 12345)[0] ^ 1]))


def huge(client, keys):
    client.setrange(keys[0], 16, (1 << 62).to_bytes(8, "big"))


def swap(client, keys):
    first, second = client.mget(keys[1:3])
    client.mset({keys[1]: second.ljust(STRIPE_BYTES), keys[2]: first[: len(second)]})


DAMAGES = (
    lose_head, lose_stripe, cut_stripe, cut_head, cut_first, lengthen, replace, other_type, other_type_of_stripe, flip,
    huge, swap,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_a_miss_and_is_cleaned_up_and_written_again(server, caplog, damage):
    with opened(server.url) as store:
        store.put(STRIPED)
        with server.client() as client:
            damage(client, keys_of(STRIPED, server))
        assert get(store, STRIPED) is None
        assert damage is lose_head or "treated as a miss" in caplog.text
        assert main_key_count(server) == 0
        assert STRIPED.chunk.key.prefix not in store
        assert store.put(STRIPED)
        assert same(get(store, STRIPED), STRIPED)


def main_key_count(server) -> int:
    return sum(key.endswith(f":{STRIPED.chunk.key.prefix}") for key in server.keys())


@pytest.mark.parametrize("damage", [lose_stripe, cut_stripe, cut_first, replace, other_type])
def test_what_lacks_a_stripe_is_seen_without_reading_it(server, damage):
    with opened(server.url) as store:
        store.put(STRIPED)
        assert STRIPED.chunk.key.prefix in store
        with server.client() as client:
            damage(client, keys_of(STRIPED, server))
        assert STRIPED.chunk.key.prefix not in store
        assert main_key_count(server) == 0


def test_a_pointer_to_something_else_is_a_miss(server):
    content, ids = SMALL.chunk.key.content, SMALL.chunk.token_ids
    with opened(server.url) as store, server.client() as client:
        store.put(SMALL)
        name = next(key for key in server.keys() if ":content:" in key)
        for value in (b"\xff\xfe", b"x" * 1000, b"../..", STRIPED.chunk.key.prefix.encode()):
            client.set(name, value)
            assert store.find(content, ids) is None
        client.delete(name)
        client.rpush(name, "a")
        assert store.find(content, ids) is None
        assert same(get(store, SMALL), SMALL)


@pytest.fixture(scope="module")
def stored(module_server):
    """A chunk's values, and a store over them."""
    entry = make_chunk(3, tokens=4200)
    with opened(module_server.url) as store, module_server.client() as client:
        assert store.put(entry)
        keys = keys_of(entry, module_server)
        assert len(keys) == 2
        yield entry, store, client, dict(zip(keys, client.mget(keys), strict=True))


def edits(length: int):
    """A place, near the beginning as often as anywhere, and what is done there."""
    place = st.one_of(st.integers(0, min(length, 600) - 1), st.integers(0, length - 1))
    return st.tuples(
        place, st.sampled_from(["flip", "cut", "insert", "remove", "end"]), st.binary(min_size=1, max_size=40)
    )


def edited(value: bytes, edit: tuple[int, str, bytes]) -> bytes:
    at, kind, new = edit
    if kind == "flip":
        return value[:at] + bytes([value[at] ^ (new[0] or 1)]) + value[at + 1 :]
    return {
        "cut": value[:at],
        "insert": value[:at] + new + value[at:],
        "remove": value[:at] + value[at + len(new) :],
        "end": value[:at] + new,
    }[kind]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_what_is_stored_is_a_miss_or_the_same_chunk(stored, data):
    entry, store, client, values = stored
    client.mset(values)
    key = data.draw(st.sampled_from(list(values)))
    changed = edited(values[key], data.draw(edits(len(values[key]))))
    client.set(key, changed)
    found = get(store, entry)
    assert found is None or same(found, entry)
    assert found is None or changed == values[key]


# Faults of the server and of the way to it -----------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back_amid_reads_and_writes(caplog):
    entries = [make_chunk(number, tokens=5000) for number in range(6)]
    wrong, served, ended = [], [], threading.Event()

    def work(store, offset):
        number = offset
        while not ended.is_set():
            entry = entries[number % len(entries)]
            store.put(entry)
            found = get(store, entry)
            (served if same(found, entry) else wrong).append(found is not None)
            number += 1

    with running() as server, opened(server.url) as first, opened(f"redis://127.0.0.1:{server.port}") as second:
        threads = [threading.Thread(target=work, args=(store, n)) for n, store in enumerate((first, second, first))]
        for thread in threads:
            thread.start()
        for _ in range(3):
            count = len(served)
            until(lambda count=count: len(served) > count + 5)
            with server.client() as client:
                client.flushall()
            server.kill()
            server.start()
        count = len(served)
        until(lambda: len(served) > count + 5)
        ended.set()
        for thread in threads:
            thread.join()
        assert not any(wrong), "a chunk was served that is not the one that was put"
        assert "can not be reached" in caplog.text
        for store in (first, second):
            # Either may still be within its pause.
            until(lambda store=store: store.put(entries[0]) and get(store, entries[0]) is not None)
            assert same(get(store, entries[0]), entries[0])


def test_a_dead_server_is_not_asked_again_at_once(server, caplog):
    with opened(f"redis://127.0.0.1:{free_port()}") as store:
        for _ in range(50):
            assert get(store, SMALL) is None
            assert SMALL.chunk.key.prefix not in store
            assert not store.put(SMALL)
            store.delete(SMALL.chunk.key)
        assert not store.wants(SMALL.chunk.key.prefix)
    lines = [r for r in caplog.records if r.name.startswith("kvboost_rag")]
    assert 1 <= len(lines) <= 4


def is_torn(entry, server) -> bool:
    """Whether the value that makes an entry's stripes one is there, and one of them is not."""
    names = keys_of(entry, server)
    return len(names) < 3 and any(name.endswith(f":{entry.chunk.key.prefix}") for name in names)


def test_eviction_of_some_stripes_makes_misses(caplog):
    with running("--maxmemory", "14mb", "--maxmemory-policy", "allkeys-random") as server, opened(server.url) as store:
        entries = []
        # The server evicts at random: some twenty keys have room, so a torn entry comes soon, but not in every ten.
        while not any(is_torn(entry, server) for entry in entries):
            entries.append(make_chunk(len(entries), tokens=9000))
            store.put(entries[-1])
        # Replies that wait to be sent count as memory, too: a read would evict what was just seen to be there.
        server.configure(maxmemory=0)
        for entry in entries:
            is_whole = entry.chunk.key.prefix in store
            assert same(get(store, entry), entry) == is_whole
            # What lacked a stripe was cleaned up.
            assert is_whole or not any(key.endswith(entry.chunk.key.prefix) for key in server.keys())
        assert "stripe is missing" in caplog.text


def test_a_full_server_takes_nothing_and_nothing_is_left_there(caplog):
    with running("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server, opened(server.url) as store:
        big = make_chunk(7, tokens=30_000)
        assert not store.put(big)
        assert not keys_of(big, server)
        assert "refuses (OutOfMemoryError)" in caplog.text
        assert not store.wants("a" * 32)
        assert get(store, big) is None
        server.configure(maxmemory=0)
        until(lambda: store.put(big))
        assert same(get(store, big), big)


def test_a_read_that_takes_longer_than_computing_is_given_up(server, caplog):
    way = SlowWay(server.port)
    try:
        with opened(server.url) as writer:
            writer.put(STRIPED)
        size = len(serialise(STRIPED, IDENTITY))
        # 0.3 s to compute; never silent for long, and minutes for all of it.
        with opened(f"redis://127.0.0.1:{way.port}", prefill_rate=9000 / 0.25) as store:
            way.pause, way.drop_bytes = 0.02, 200
            for _ in range(3):
                assert get(store, STRIPED) is None
            assert "did not answer within 0.3 s: treated as a miss" in caplog.text
            asked = way.asked
            for _ in range(20):
                assert get(store, STRIPED) is None
            assert way.asked == asked, "a server that failed three times was asked again at once"
            assert way.passed < size
            way.pause, way.drop_bytes = 0.0, 1 << 16
            store._rate = PATIENT
            until(lambda: get(store, STRIPED) is not None)
            assert same(get(store, STRIPED), STRIPED)
    finally:
        way.close()


@pytest.fixture
def way(server):
    slow = SlowWay(server.port)
    yield slow
    slow.close()


@pytest.mark.parametrize("losses", [1, 2])
def test_a_write_whose_answer_is_lost_has_been_carried_out_and_is_not_taken_back(server, way, losses):
    with opened(server.url) as theirs, opened(f"redis://127.0.0.1:{way.port}") as ours:
        way.lose, way.losses = b"\r\nNX\r\n", losses
        assert ours.put(STRIPED) == (losses == 1)
        assert not way.losses
        assert same(get(theirs, STRIPED), STRIPED)
        until(lambda: ours.put(SMALL))
        assert same(get(theirs, STRIPED), STRIPED)


def test_stripes_of_a_write_that_was_broken_off_are_removed_by_the_next_one(server, way):
    for close_at_once in (False, True):
        with opened(f"redis://127.0.0.1:{way.port}") as store:
            # The first two stripes are there, and neither the first nor the second try gets further.
            way.lose, way.losses = b":2\r\n", 2
            assert not store.put(STRIPED)
            assert len(keys_of(STRIPED, server)) == 2
            until(lambda store=store: not store._writing.is_open)
            assert close_at_once or store.put(SMALL)
        assert not keys_of(STRIPED, server)
        assert close_at_once or same(get_again(server, SMALL), SMALL)


def get_again(server, entry):
    with opened(server.url) as store:
        return get(store, entry)


def test_a_wrong_password_is_told_at_once_and_shown_nowhere(caplog):
    with running("--requirepass", "s3cr3t-of-mine") as server:
        for user, password in (("", "wrong-one"), ("nobody", "s3cr3t-of-mine"), ("", "")):
            login = f"{user}:{password}@" if password else ""
            tier = RedisTier(f"redis://{login}127.0.0.1:{server.port}/0")
            with pytest.raises(ValueError, match="refuses.*see the URL's user, password") as error:
                StoreOptions(shared=tier).check_shared()
            shown = f"{error.value} {tier!r} {tier} {StoreOptions(shared=tier)!r}"
            assert not any(word in shown for word in (user, password) if word)
        StoreOptions(shared=RedisTier(f"redis://:s3cr3t-of-mine@127.0.0.1:{server.port}")).check_shared()
        with opened(f"unix://{server.socket}?password=s3cr3t-of-mine") as store:
            assert store.put(SMALL)
            with server.client(password="s3cr3t-of-mine") as client:
                client.config_set("requirepass", "another")
                client.client_kill_filter(_type="normal", skipme=True)
            assert get(store, SMALL) is None
        assert "refuses (AuthenticationError): treated as a miss" in caplog.text
        assert "s3cr3t" not in caplog.text


def test_a_user_who_may_not_write_reads(caplog):
    with running() as server, opened(server.url) as writer:
        writer.put(SMALL)
        with server.client() as client:
            client.acl_setuser(
                "reader", enabled=True, passwords=["+pw"], keys=["kvboost:*"],
                commands=["+ping", "+getrange", "+strlen"],
            )  # fmt: skip
        with opened(f"redis://reader:pw@127.0.0.1:{server.port}") as store:
            assert same(get(store, SMALL), SMALL)
            assert not store.put(STRIPED)
            assert "refuses (NoPermissionError): KV was not written" in caplog.text
            assert same(get(store, SMALL), SMALL)


def test_the_commands_that_the_documentation_names_are_enough():
    with running() as server:
        with server.client() as client:
            client.acl_setuser(
                "engine", enabled=True, passwords=["+pw"], keys=["kvboost:*"],
                commands=["+ping", "+getrange", "+strlen", "+set", "+unlink"],
            )  # fmt: skip
        url = f"redis://engine:pw@127.0.0.1:{server.port}"
        assert check_server(RedisTier(url)) == ""
        with opened(url) as store:
            assert store.put(STRIPED)
            assert same(get(store, STRIPED), STRIPED)
            store.delete(STRIPED.chunk.key)
        assert not server.keys()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A certificate of an own authority for 127.0.0.1, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=authority -days 2",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=server",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def test_tls_with_an_own_authority(certificates):
    port, paths = free_port(), [str(certificates / name) for name in ("ca.crt", "server.crt", "server.key")]
    options = [
        "--tls-port", str(port), "--tls-ca-cert-file", paths[0], "--tls-cert-file", paths[1], "--tls-key-file",
        paths[2], "--tls-auth-clients", "no",
    ]  # fmt: skip
    try:
        with running(*options):
            pass
    except AssertionError as error:
        pytest.skip(f"this server was built without TLS: {error}")
    with running(*options):
        url = f"rediss://127.0.0.1:{port}/0"
        assert check_server(RedisTier(f"{url}?ssl_ca_certs={paths[0]}")) == ""
        with opened(f"{url}?ssl_ca_certs={paths[0]}") as store:
            assert store.put(STRIPED)
            assert same(get(store, STRIPED), STRIPED)
        with pytest.raises(ValueError, match="certificate of rediss://127.0.0.1.* is not trusted"):
            check_server(RedisTier(url))
        # The certificate is for the address, not for the name.
        with pytest.raises(ValueError, match="is not trusted"):
            check_server(RedisTier(f"rediss://localhost:{port}/0?ssl_ca_certs={paths[0]}"))


# Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memcached://host", "no URL of a Redis server"),
        ("redis:/host", "no URL of a Redis server"),
        ("", "no URL of a Redis server"),
        ("redis://:pass/word@host", "percent-encode"),
        ("redis://host:70000", "percent-encode"),
        ("redis://host/keys", "number of a database"),
        ("unix://", "names no socket"),
        ("redis://host?decode_responses=true", "unknown options: decode_responses"),
    ],
)
def test_bad_urls_are_refused_and_not_shown(url, message):
    with pytest.raises(ValueError, match=message) as error:
        RedisTier(url)
    assert "pass/word" not in str(error.value)


@pytest.mark.parametrize("options", [{"ttl_seconds": 0}, {"ttl_seconds": 1.5}, {"prefill_rate": 0}])
def test_bad_numbers_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RedisTier("redis://host", **options)


def test_no_such_database_is_told_at_once(server):
    with pytest.raises(ValueError, match="refuses"):
        StoreOptions(shared=RedisTier(f"redis://127.0.0.1:{server.port}/9999")).check_shared()


def test_messages_name_the_server_and_nobody_who_logs_in():
    assert str(RedisTier("redis://me:pw@host/3?client_name=x")) == "redis://host:6379/3"
    assert str(RedisTier("rediss://me:pw@[::1]:7000")) == "rediss://[::1]:7000"
    assert str(RedisTier("unix://me@/run/redis.sock?password=pw")) == "unix:///run/redis.sock"
    assert "pw" not in repr(RedisTier("redis://me:pw@host"))


def test_without_the_client_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ImportError, match=r"pip install 'kvboost-rag\[redis\]'"):
        StoreOptions(shared=RedisTier("redis://host")).check_shared()


# Tiers -----------------------------------------------------------------------------------------------------------


def disk(folder) -> DiskStore:
    return DiskStore(folder, IDENTITY, SHAPE, DTYPE)


def chained(server, folder) -> ChainedStore:
    return ChainedStore(disk(folder), RedisStore(RedisTier(server.url), IDENTITY, SHAPE, DTYPE, prefill_rate=PATIENT))


def test_what_is_put_is_in_the_folder_and_on_the_server_when_the_store_is_closed(server, tmp_path):
    entries = [make_chunk(number) for number in range(20)]
    store = TieredStore(MemoryStore(), chained(server, tmp_path))
    for entry in entries:
        store.put(entry)
    store.close()
    with opened(server.url) as shared:
        assert all(same(get(shared, entry), entry) for entry in entries)
    assert all(same(get(disk(tmp_path), entry), entry) for entry in entries)


def test_what_comes_from_the_server_is_copied_to_the_folder_and_read_there(server, tmp_path):
    with opened(server.url) as shared:
        shared.put(SMALL)
    store = chained(server, tmp_path)
    assert SMALL.chunk.key.prefix in store
    assert same(get(store, SMALL), SMALL)
    assert same(store.find(SMALL.chunk.key.content, SMALL.chunk.token_ids), SMALL)
    store.flush()
    assert store.disk_bytes > 0
    hits = store.shared_hits
    assert same(get(store, SMALL), SMALL)
    assert store.shared_hits == hits
    assert list(store) == [SMALL.chunk.key.prefix]
    store.delete(SMALL.chunk.key)
    assert SMALL.chunk.key.prefix not in store
    assert not server.keys()
    store.close()


def test_a_removed_chunk_does_not_come_back_by_a_copy(server, tmp_path):
    with opened(server.url) as shared:
        shared.put(SMALL)
    store = chained(server, tmp_path)
    with store._order:
        # The copy waits for its turn, and so does the removal.
        assert same(get(store, SMALL), SMALL)
        removal = threading.Thread(target=store.delete, args=(SMALL.chunk.key,))
        removal.start()
    removal.join()
    store.flush()
    assert SMALL.chunk.key.prefix not in store._first
    store.close()


def test_without_a_server_the_folder_goes_on(tmp_path, caplog):
    store = TieredStore(MemoryStore(), ChainedStore(
        disk(tmp_path),
        RedisStore(RedisTier(f"redis://127.0.0.1:{free_port()}"), IDENTITY, SHAPE, DTYPE, prefill_rate=PATIENT),
    ))  # fmt: skip
    assert store.put(SMALL)
    store.flush()
    assert same(get(store, SMALL), SMALL)
    assert SMALL.chunk.key.prefix in store
    store.delete(SMALL.chunk.key)
    assert get(store, SMALL) is None
    store.close()
    assert "KV was not written to the shared tier" in caplog.text


def test_a_closed_store_misses(server):
    store = RedisStore(RedisTier(server.url), IDENTITY, SHAPE, DTYPE, prefill_rate=PATIENT)
    store.put(SMALL)
    store.close()
    store.close()
    assert get(store, SMALL) is None
    assert not store.put(STRIPED)
