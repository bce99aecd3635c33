"""Weights of every kind: dtypes, quantised ones, tied heads, devices and attention implementations."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from adapted import DOCUMENTS, TEXTS, distance_to_full, make_engine, scored, stored_tokens
from tiny import CONFIGS, CORE, SHAPE, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from kvboost_rag import KVBoostEngine, UnsupportedModelError
from kvboost_rag.loading import load_model
from kvboost_rag.model.fingerprint import fingerprint, weights_digest

HALF = (torch.bfloat16, torch.float16)
ORDERS = (("zebra",), ("music", "zebra", "music"))
ALL = sum(len(text) for text in TEXTS.values())


@cache
def rounded(family: str, dtype: torch.dtype):
    """A model in a half precision, and the same numbers computed in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    half = model.to(dtype).eval().requires_grad_(False)
    return half, deepcopy(half).float()


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("dtype", HALF)
def test_reuse_adds_no_more_than_the_rounding_of_the_dtype(family, dtype):
    half, single = rounded(family, dtype)
    reference = make_engine(single, reuse="off")
    with make_engine(half) as engine:
        engine.add_documents(DOCUMENTS)
        for documents, repair in zip(ORDERS, ("none", "random:1.0"), strict=True):
            full = scored(engine, documents, reuse=False).logits
            texts = [DOCUMENTS[list(TEXTS).index(i)] for i in documents]
            rounding = (full - scored(reference, texts).logits).abs().max()
            # Both ways to the same number round; each is so far from it, so twice that apart, and one unit for luck.
            bound = 2 * rounding + full.abs().max() * torch.finfo(dtype).eps
            assert (scored(engine, documents, repair=repair).logits - full).abs().max() <= bound
        reused = scored(engine, ORDERS[1], repair="none").logits
        assert (reused - full).abs().max() > 2 * bound


def test_half_precision_is_another_model_to_the_store():
    prints = {weights_digest(model) for dtype in HALF for model in rounded("llama", dtype)}
    assert len(prints) == 4


def test_all_that_kv_depends_on_is_in_the_fingerprint():
    """Each of these has the same weights, byte by byte."""
    model, tokenizer = deepcopy(tiny_model("llama")), tiny_tokenizer()
    prints = [fingerprint(model, tokenizer, *others) for others in ((), ("a",), ("", "int8"))]
    other = deepcopy(tokenizer)
    other.add_tokens(["<more>"])
    prints += [fingerprint(model, other), fingerprint(model, tiny_tokenizer(template=False))]
    for name, value in (("rms_norm_eps", 1e-3), ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})):
        changed = deepcopy(model)
        setattr(changed.config, name, value)
        prints.append(fingerprint(changed, tokenizer))
    prints.append(fingerprint(tiny_model("llama", attention="eager"), tokenizer))
    prints.append(fingerprint(tiny_model("llama", seed=1), tokenizer))
    assert len(set(prints)) == len(prints)


def test_numbers_too_large_for_float16_are_named():
    model = deepcopy(tiny_model("llama"))
    model.lm_head.weight.mul_(1e5)
    with pytest.raises(UnsupportedModelError, match="no numbers in float16.*torch.bfloat16"):
        KVBoostEngine(model.half(), tiny_tokenizer())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3
        fingerprint = engine.fingerprint
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert make_engine(load_model(tmp_path)[0]).fingerprint == fingerprint


# Quantised weights ---------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from adapted import make_engine
from test_weights import quantised
print(make_engine(quantised(sys.argv[1])).fingerprint)
"""


def quantised(kind: str, seed: int = 0):
    """A tiny model whose linear layers were quantised by torchao."""
    quantization = pytest.importorskip("torchao.quantization")
    configs = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        "int8-activations": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "initializer_range": 0.1})).eval()
    quantization.quantize_(model, configs[kind]())
    return model


@pytest.mark.parametrize(("kind", "bound"), [("int8", 1e-3), ("int4", 1e-3), ("int8-activations", 0.1)])
def test_exact_limits_hold_within_a_quantised_model(kind, bound):
    model = quantised(kind)
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        full = scored(engine, ORDERS[1], reuse=False).logits
        assert (scored(engine, ORDERS[1], repair="random:1.0").logits - full).abs().max() < bound
        assert (scored(engine, ORDERS[1], repair="none").logits - full).abs().max() > 2 * bound
        assert distance_to_full(engine) < bound
        assert stored_tokens(engine) == ALL


def test_fingerprints_tell_quantised_weights_apart():
    same, other, alike = quantised("int8"), quantised("int8", seed=1), quantised("int8")
    parts = dict(alike.named_parameters())["model.layers.2.self_attn.k_proj.weight"]
    assert weights_digest(same) == weights_digest(alike)
    parts.scale[3] *= 1.01
    digests = {weights_digest(m) for m in (same, other, alike, quantised("int4"), quantised("int8-activations"))}
    assert len(digests) == 5


def test_a_change_of_a_quantised_weight_is_noticed():
    model = quantised("int8")
    with make_engine(model, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        model.model.layers[1].self_attn.v_proj.weight.scale.mul_(1.5)
        assert stored_tokens(engine) == 0


def test_quantised_fingerprints_are_equal_in_every_process():
    # The kind with the most settings to tell.
    kind = "int8-activations"
    mine = make_engine(quantised(kind)).fingerprint
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True, timeout=200,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.stdout.split()[-1] == mine


def test_quantised_by_transformers_saved_and_loaded(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    tiny_model("llama").save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    options = {"quantization_config": config, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3
        fingerprint = engine.fingerprint
    model.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    assert make_engine(load_model(tmp_path / "small")[0]).fingerprint == fingerprint


def test_weights_that_are_no_tensors_are_refused_by_name():
    model = deepcopy(tiny_model("llama"))
    norm = model.model.norm
    norm.__class__ = type("Odd", (type(norm),), {"get_extra_state": lambda self: {"scale": 2}})
    with pytest.raises(UnsupportedModelError, match="norm._extra_state.*is a dict.*torchao"):
        KVBoostEngine(model, tiny_tokenizer())


# Devices and attention -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_maps_of_one_device(folder, device_map):
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto means the GPU here, which has a test of its own")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3
        assert engine.fingerprint == make_engine(tiny_model("llama")).fingerprint


def test_offloaded_weights_are_refused_by_name_and_run_without_reuse(folder, tmp_path):
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)}
    options = {"device_map": parts | layers, "offload_folder": tmp_path / "offloaded"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    with pytest.raises(UnsupportedModelError, match=r"offloaded \(model.layers.2.*device_map"):
        make_engine(model)
    asked = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    texts = [make_engine(m, reuse="off").generate("Why?", **asked).token_ids for m in (model, tiny_model("llama"))]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", CORE)
def test_eager_attention_keeps_the_limits(family):
    with make_engine(tiny_model(family, attention="eager")) as engine:
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3
        full = scored(engine, ORDERS[1], reuse=False).logits
        for repair in ("random:1.0", "cacheblend:1.0"):
            assert (scored(engine, ORDERS[1], repair=repair).logits - full).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "paged|eager"])
def test_attention_without_token_masks_is_refused_by_name(name, monkeypatch):
    model = deepcopy(tiny_model("llama"))
    monkeypatch.setattr(model.config, "_attn_implementation_internal", name)
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        KVBoostEngine(model, tiny_tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_on_a_gpu(dtype):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that this torch can use")
    half = tiny_model("llama") if dtype == torch.float32 else rounded("llama", dtype)[0]
    with make_engine(deepcopy(half).to("cuda")) as engine:
        engine.add_documents(DOCUMENTS)
        full = scored(engine, ORDERS[1], reuse=False).logits
        bound = 1e-2 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps * float(full.abs().max())
        assert (scored(engine, ORDERS[1], repair="random:1.0").logits - full).abs().max() < bound
        assert distance_to_full(engine) < bound
        assert stored_tokens(engine) == ALL
        assert len(engine.generate("Why?", documents=["zebra"], max_tokens=4, ignore_eos=True).token_ids) == 4
