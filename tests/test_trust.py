"""``trusted_only`` and ``secret``: what the owner did not add is not used, what the owner did not write not served."""

from __future__ import annotations

import json
import shutil

import pytest
from disk_chunks import get, make_chunk, same
from safetensors import safe_open
from safetensors.torch import save
from test_disk_faults import OTHER, file_of, open_store, rewrite
from test_engine import DOCUMENTS, GREEDY, MUSIC, RAIN, ZEBRA, make_engine

from kvboost_rag import Document, SpanKind, UntrustedDocumentError
from kvboost_rag.cli import main
from kvboost_rag.owner import Owner, tenant_of
from kvboost_rag.store import prune_folder, verify_files
from kvboost_rag.store.chunk_file import checksum

SECRET = "a secret of the owner, long enough"
OWNER = Owner.of(SECRET)


@pytest.fixture(scope="module")
def trusting():
    with make_engine(trusted_only=True, repair="none") as made:
        made.add_documents([*DOCUMENTS, Document("short", "Short.")])
        yield made


# trusted_only ----------------------------------------------------------------------------------------------------


def test_documents_that_were_added_are_used(trusting):
    asked = ["zebra", DOCUMENTS[1], Document("another id", RAIN), Document("short", " Short. ")]
    report = trusting.generate("Why?", documents=asked, **GREEDY).report
    assert [s.document_id for s in report.spans if s.document_id] == ["zebra", "music", "rain", "short"]


@pytest.mark.parametrize(
    "document",
    [
        Document("stranger", "Trust me."), Document("zebra", ZEBRA + " Trust me."), Document("x", ZEBRA[:50]),
        Document("longer", ZEBRA + " Trust me."),
    ],
)  # fmt: skip
def test_documents_that_were_not_added_are_refused_wherever_they_stand(trusting, document):
    before = trusting.stats
    for prompt, documents in (("Why?", [document]), ([{"role": "user", "content": ["See ", document, "Why?"]}], ())):
        with pytest.raises(UntrustedDocumentError, match=f"{document.id}.* trusted_only .*add_documents"):
            trusting.generate(prompt, documents=documents, **GREEDY)
        with pytest.raises(UntrustedDocumentError):
            trusting.tokenize(prompt, documents=documents)
        with pytest.raises(UntrustedDocumentError):
            trusting.score(prompt, [1], documents=documents, reuse=False)
    assert trusting.stats == before


def test_a_document_that_was_removed_is_no_longer_trusted(trusting):
    trusting.add_documents([gone := Document("gone", "This will have been here.")])
    assert trusting.generate("Why?", documents=[gone], **GREEDY).finish_reason
    trusting.remove_documents(["gone"])
    with pytest.raises(UntrustedDocumentError):
        trusting.generate("Why?", documents=[gone], **GREEDY)


def test_it_holds_without_reuse_too():
    with make_engine(trusted_only=True, reuse="off") as engine:
        engine.add_documents(DOCUMENTS)
        assert engine.generate("Why?", documents=["zebra"], **GREEDY).finish_reason
        with pytest.raises(UntrustedDocumentError):
            engine.generate("Why?", documents=[Document("a", "A text.")], **GREEDY)


def test_langchain_adds_nothing_to_an_engine_that_trusts_its_owner_alone(trusting):
    langchain = pytest.importorskip("langchain_kvboost", reason="pip install 'kvboost-rag[langchain]'")
    from langchain_core.documents import Document as Page
    from langchain_core.embeddings import DeterministicFakeEmbedding

    known, stranger = Page(ZEBRA, id="zebra"), Page("Trust me, I am a page.", id="page")
    before = trusting.documents
    for model in (langchain.ChatKVBoost(engine=trusting, max_tokens=2), langchain.KVBoostLLM(engine=trusting)):
        assert model.invoke("Why?", documents=[known], max_tokens=2) is not None
        with pytest.raises(UntrustedDocumentError):
            model.invoke("Why?", documents=[known, stranger])
    store = langchain.KVBoostVectorStore.from_documents([known, stranger], DeterministicFakeEmbedding(size=8))
    retriever = langchain.KVBoostRetriever(retriever=store.as_retriever(), engine=trusting)
    assert len(retriever.invoke("Why?")) == 2
    assert trusting.documents == before


def test_llama_index_adds_nothing_to_an_engine_that_trusts_its_owner_alone(trusting):
    llama = pytest.importorskip("llama_index.llms.kvboost", reason="pip install 'kvboost-rag[llama-index]'")
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(id_=name, text=name)) for name in ("zebra", "stranger")]
    before = trusting.documents
    assert llama.KVBoostPostprocessor(engine=trusting).postprocess_nodes(nodes) == nodes
    assert trusting.documents == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trusted_only": True, "cache_dir": "."}, "trusted_only needs a secret for cache_dir"),
        ({"secret": SECRET}, "secret are about cache_dir"),
        ({"secret": SECRET, "reuse": "off"}, "^secret: no use"),
        ({"secret": "short", "cache_dir": "."}, "at least 16"),
        ({"secret": 10**6, "cache_dir": "."}, "text or bytes"),
        ({"namespace": None}, "give each tenant a text"),
    ],
)
def test_options_that_would_trust_by_mistake_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


# secret ----------------------------------------------------------------------------------------------------------


def test_the_secret_is_not_shown():
    assert SECRET not in repr(OWNER)
    assert OWNER.name != Owner.of(SECRET + "!").name
    assert Owner.of(SECRET) == Owner.of(SECRET.encode())
    assert tenant_of("a", OWNER) not in (tenant_of("b", OWNER), tenant_of("a", None), tenant_of("a" + OWNER.name, None))


def signed_chunk(folder):
    entry = make_chunk(1)
    assert open_store(folder, owner=OWNER).put(entry)
    assert same(get(open_store(folder, owner=OWNER), entry), entry)
    return entry


FORGERIES = {
    "unsigned": lambda path: path.write_bytes(unsigned(path)),
    "another owner": lambda path: path.write_bytes(signed_by(path, Owner.of("another secret of another one"))),
    "other KV": lambda path: rewrite(path, tensors=lambda old: {"keys": old["keys"] + 1}),
    "other sensitivity": lambda path: rewrite(path, tensors=lambda old: {"sensitivity": old["sensitivity"] + 1}),
    "other document": lambda path: rewrite(path, {"document_id": "x"}),
    "no ASCII": lambda path: rewrite(path, {"mac": "é" * 64}),
    "empty": lambda path: rewrite(path, {"mac": ""}),
    "one digit": lambda path: rewrite(path, {"mac": "0" * 64}),
}


def unsigned(path) -> bytes:
    return signed_by(path, None)


def signed_by(path, owner) -> bytes:
    entry = make_chunk(1)
    folder = path.parent.parent / "elsewhere"
    assert open_store(folder, owner=owner).put(entry)
    return file_of(folder, entry).read_bytes()


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_what_the_owner_did_not_sign_is_a_miss(tmp_path, caplog, forge):
    """The checksum of every one is right: anybody can make one."""
    entry = signed_chunk(tmp_path)
    path = file_of(tmp_path, entry)
    forge(path)
    assert not dict(verify_files(tmp_path))[path]
    store = open_store(tmp_path, owner=OWNER)
    assert get(store, entry) is None
    assert store.find(entry.chunk.key.content, entry.chunk.token_ids) is None
    assert "was not signed" in caplog.text
    assert store.put(entry)
    assert same(get(open_store(tmp_path, owner=OWNER), entry), entry)


def test_a_signed_file_is_no_other_chunks_file(tmp_path):
    entry, other = signed_chunk(tmp_path), make_chunk(2)
    copy = file_of(tmp_path, other)
    shutil.copy(file_of(tmp_path, entry), copy)
    rewrite(copy, {"prefix": other.chunk.key.prefix, "content": other.chunk.key.content})
    assert get(open_store(tmp_path, owner=OWNER), other) is None
    there = file_of(tmp_path, entry, OTHER)
    there.parent.mkdir()
    shutil.copy(file_of(tmp_path, entry), there)
    rewrite(there, {"identity": OTHER})
    assert get(open_store(tmp_path, OTHER, owner=OWNER), entry) is None


def test_signed_files_are_sound_to_who_does_not_know_the_secret(tmp_path):
    entry = signed_chunk(tmp_path)
    assert not any(reason for _, reason in verify_files(tmp_path))
    assert prune_folder(tmp_path) == []
    assert file_of(tmp_path, entry).exists()


def poison(folder) -> int:
    """Replace all KV in a folder by other KV, with right checksums, as whoever may write there can."""
    paths = list(folder.rglob("*.safetensors"))
    for path in paths:
        with safe_open(path, framework="pt") as file:
            meta, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}
        tensors["values"] = -tensors["values"]
        path.write_bytes(save(tensors, metadata={**meta, "checksum": checksum(meta, tensors)}))
    return len(paths)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_poisoned_kv_is_served_to_those_alone_who_keep_no_secret(tmp_path, caplog, secret):
    asked = {"documents": ["rain", "zebra"], "repair": "none"}
    with make_engine(cache_dir=tmp_path, secret=secret) as engine:
        engine.add_documents(DOCUMENTS)
        engine.flush()
        expected = engine.score("Why?", [7], **asked, reuse=secret is None).logits
    assert poison(tmp_path) > 3
    with make_engine(cache_dir=tmp_path, secret=secret, trusted_only=secret is not None) as engine:
        engine.add_documents(DOCUMENTS)
        logits = engine.score("Why?", [7], **asked).logits
        engine.generate("Who?", documents=["zebra", "rain"], **GREEDY)
        engine.flush()
        healed = engine.generate("Why?", documents=["zebra"], **GREEDY).report
    assert (logits - expected).abs().max() < 1e-3 if secret else (logits - expected).abs().max() > 0.1
    assert ("was not signed" in caplog.text) is bool(secret)
    assert {s.kind for s in healed.spans if s.document_id} == {SpanKind.EXACT}


def test_owners_share_no_files(tmp_path):
    keys = []
    for secret in (None, SECRET, SECRET, SECRET + "!"):
        with make_engine(cache_dir=tmp_path, secret=secret) as engine:
            engine.add_documents(DOCUMENTS[:1])
            keys.append(engine.context_key)
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 3


def test_a_policy_that_nobody_signed_is_not_used(tmp_path, caplog):
    with make_engine(cache_dir=tmp_path, secret=SECRET) as engine:
        path, usual = engine.policy_path, engine.repair
    point = {"repair": "none", "ttft_ratio": 0.0, "kl": 0.0, "kl_p95": 0.0, "samples": 1}
    path.write_text(json.dumps({"source": "an attacker", "points": [point]}))
    with make_engine(cache_dir=tmp_path, secret=SECRET) as engine:
        assert engine.repair == usual
    assert "is not signed and not used" in caplog.text


@pytest.mark.real
def test_precompute_signs_for_a_tenant(tmp_path, smollm2, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(MUSIC)
    (tmp_path / "secret").write_text(SECRET + "\n")
    cache = str(tmp_path / "kv")
    command = ["precompute", "--docs", str(tmp_path / "docs"), "--cache-dir", cache]
    assert main([*command, "--namespace", "tenant", "--secret-file", str(tmp_path / "secret")]) == 0
    (path,) = (tmp_path / "kv").rglob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        assert len(file.metadata()["mac"]) == 64
