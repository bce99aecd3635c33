"""Adapters that are switched, and weights that change, while an engine runs: no KV of another state is ever served."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from adapted import (
    DOCUMENTS,
    TEXTS,
    adapted,
    distance_to_full,
    lora,
    make_engine,
    scored,
    stored_tokens,
)
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, ModelChangedError, UnsupportedModelError
from kvboost_rag.model import WeightsWatch, unwrapped
from kvboost_rag.model.fingerprint import weights_digest

peft = pytest.importorskip("peft")
pytestmark = [
    # PEFT asks transformers for an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute"),
    pytest.mark.filterwarnings("ignore:Already unmerged"),
]
ALL = sum(len(text) for text in TEXTS.values())


def test_every_adapter_has_its_own_entries_and_finds_them_again():
    model = adapted("x", "y")
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        first = engine.fingerprint
        logits = {"x": scored(engine, repair="none").logits}
        assert stored_tokens(engine) == ALL
        model.set_adapter("y")
        assert stored_tokens(engine) == 0
        assert engine.fingerprint != first
        logits["y"] = scored(engine, reuse=False).logits
        assert (logits["x"] - logits["y"]).abs().max() > 0.1
        engine.generate("Why?", documents=["music", "zebra"], max_tokens=1)
        engine.flush()
        assert stored_tokens(engine) == ALL
        for name in ("x", "y", "x"):
            model.set_adapter(name)
            assert stored_tokens(engine) == ALL
            assert (scored(engine, repair="none").logits - logits[name]).abs().max() < 1e-3
        assert engine.fingerprint == first


def test_a_switched_engine_equals_one_made_for_that_adapter(tmp_path):
    with make_engine(adapted("y"), cache_dir=tmp_path) as alone:
        alone.add_documents(DOCUMENTS)
        expected, fingerprint, key = scored(alone, ("music", "zebra")), alone.fingerprint, alone.context_key
    model = adapted("x", "y")
    with make_engine(model, cache_dir=tmp_path) as engine:
        engine.add_documents(DOCUMENTS)
        model.set_adapter("y")
        got = scored(engine, ("music", "zebra"))
        assert (engine.fingerprint, engine.context_key) == (fingerprint, key)
        assert got.report.spans == expected.report.spans
        assert torch.equal(got.logits, expected.logits)


def test_adapters_never_share_entries_in_one_folder(tmp_path):
    keys = {}
    for name in ("x", "y"):
        with make_engine(adapted(name), cache_dir=tmp_path) as engine:
            engine.add_documents(DOCUMENTS[:1])
            assert distance_to_full(engine) < 1e-3
            keys[name] = {chunk.key for chunk in engine._library.chunks(["zebra"])}
    assert not {k.prefix for k in keys["x"]} & {k.prefix for k in keys["y"]}
    assert not {k.content for k in keys["x"]} & {k.content for k in keys["y"]}
    assert len({path.parent for path in tmp_path.rglob("*.safetensors")}) >= 2


def merge_and_unload(model):
    model.merge_and_unload()


def scale(model):
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("x", 5.0)


def train(model):
    trained = [p for n, p in model.named_parameters() if "lora_B.x" in n]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    model(input_ids=torch.arange(1, 20)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def edit_unseen(model):
    # Through .data, PyTorch does not count the change.
    unwrapped(model).model.layers[1].self_attn.k_proj.base_layer.weight.data.mul_(1.5)


def load_weights(model):
    model.load_state_dict({n: t * 1.2 if "v_proj" in n else t for n, t in model.state_dict().items()})


def delete(model):
    model.set_adapter("y")
    model.delete_adapter("x")


def replace_weight(model):
    layer = unwrapped(model).model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 1.5, requires_grad=False)


def load_another(model):
    model.delete_adapter("y")
    model.add_adapter("y", lora(ord("z")))
    model.set_adapter("y")


CHANGES = {
    "switch": lambda model: model.set_adapter("y"),
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "merge": lambda model: model.merge_adapter(["y"]),
    "both": lambda model: model.base_model.set_adapter(["x", "y"]),
    "attention": lambda model: unwrapped(model).set_attn_implementation("eager"),
    "half": lambda model: unwrapped(model).to(torch.bfloat16),
    **{f.__name__: f for f in (merge_and_unload, scale, train, edit_unseen, load_weights, delete, replace_weight)},
    "load_another": load_another,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed_at_the_next_request(change):
    model = adapted("x", "y")
    with make_engine(model, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        assert stored_tokens(engine) == ALL
        before, fingerprint = scored(engine, reuse=False).logits, engine.fingerprint
        CHANGES[change](model)
        assert stored_tokens(engine) == 0
        assert engine.fingerprint != fingerprint
        after = scored(engine, reuse=False).logits
        if change not in ("attention", "merge_and_unload"):
            assert (after - before).abs().max() > 1e-2
        engine.add_documents(DOCUMENTS)
        assert stored_tokens(engine) == ALL
        assert distance_to_full(engine) < (5e-2 * float(after.abs().max()) if change == "half" else 1e-3)


def test_what_changes_nothing_keeps_the_entries():
    model = adapted("x")
    with make_engine(model, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        fingerprint = engine.fingerprint
        model.add_adapter("y", lora(ord("y")))
        assert stored_tokens(engine) == ALL
        model.load_state_dict(model.state_dict())
        assert stored_tokens(engine) == ALL
        model.set_adapter("y")
        assert stored_tokens(engine) == 0
        model.set_adapter("x")
        model.delete_adapter("y")
        assert stored_tokens(engine) == ALL
        assert engine.fingerprint == fingerprint


def test_disabled_adapters_are_the_base_model():
    model = adapted("x")
    with make_engine(deepcopy(tiny_model("llama"))) as base, make_engine(model) as engine:
        assert engine.fingerprint != base.fingerprint
        with model.disable_adapter():
            scored(engine, [])
            assert engine.fingerprint == base.fingerprint
        scored(engine, [])
        assert engine.fingerprint != base.fingerprint


def test_merged_then_disabled_adapters_are_taken_apart_by_the_first_forward():
    model = adapted("x")
    with make_engine(model, refill=False) as engine:
        model.merge_adapter()
        model.base_model.disable_adapter_layers()
        engine.add_documents(DOCUMENTS)
        assert stored_tokens(engine) == ALL
        assert distance_to_full(engine) < 1e-3
        # Known by the weights as the forward left them, and not as it found them.
        with make_engine(model) as later:
            assert later.fingerprint == engine.fingerprint


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
def test_merged_adapters_are_known_as_the_model_that_was_merged_and_saved():
    model = adapted("x")
    model.merge_adapter()
    with make_engine(model) as merged, make_engine(deepcopy(model).merge_and_unload()) as saved:
        assert merged.fingerprint == saved.fingerprint


def test_an_engine_over_the_base_notices_adapters_put_into_it():
    base = deepcopy(tiny_model("llama"))
    with make_engine(base, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        peft.inject_adapter_in_model(lora(1), base, "own")
        assert stored_tokens(engine) == 0
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3


def test_an_adapter_that_came_and_was_merged_between_two_requests_is_noticed():
    base = deepcopy(tiny_model("llama"))
    with make_engine(base, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        weights = [(id(w), w.data_ptr(), w._version) for w in base.parameters()]
        peft.get_peft_model(base, lora(1)).merge_and_unload()
        # The same tensors at the same places, and PyTorch has counted no change.
        assert weights == [(id(w), w.data_ptr(), w._version) for w in base.parameters()]
        assert stored_tokens(engine) == 0
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3


def test_transformers_own_adapters():
    model = deepcopy(tiny_model("llama"))
    try:
        model.add_adapter(lora(1), "x")
    except ValueError as error:
        pytest.skip(f"this transformers does not take the installed PEFT: {error}")
    model.add_adapter(lora(2), "y")
    model.set_adapter("x")
    with make_engine(model, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        for change in (lambda: model.set_adapter("y"), model.disable_adapters, model.enable_adapters):
            change()
            assert distance_to_full(engine) < 1e-3
        assert stored_tokens(engine) == 0
        model.set_adapter("x")
        assert stored_tokens(engine) == ALL


def test_a_switch_in_the_middle_of_an_answer_is_an_error():
    model = adapted("x", "y")
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        stream = engine.stream("Why?", documents=["zebra"], **options)
        next(stream)
        model.set_adapter("y")
        with pytest.raises(ModelChangedError, match="ask again"):
            list(stream)
        assert engine.stats.prefix_bytes == 0
        model.set_adapter("x")
        assert engine.generate("Why?", documents=["zebra"], **options).token_ids


def test_a_switch_during_the_prefill_is_an_error():
    model = adapted("x", "y")
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        hook = unwrapped(model).model.norm.register_forward_hook(lambda *_: model.set_adapter("y"))
        with pytest.raises(ModelChangedError, match="ask again"):
            scored(engine)
        hook.remove()
        assert distance_to_full(engine) < 1e-3


def test_a_model_in_training_mode_is_an_error_and_not_noise_in_the_store():
    model = peft.get_peft_model(deepcopy(tiny_model("llama")), lora(1, lora_dropout=0.3)).eval()
    dropout = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    with make_engine(model, refill=False) as engine:
        for part in (model, dropout):
            part.train()
            for work in (lambda: engine.add_documents(DOCUMENTS), lambda: scored(engine, [])):
                with pytest.raises(UnsupportedModelError, match=r"training mode.*model.eval\(\)"):
                    work()
            model.eval()
        engine.add_documents(DOCUMENTS)
        assert distance_to_full(engine) < 1e-3
    # Attention drops without a module of its own.
    with pytest.raises(UnsupportedModelError, match="training mode"):
        make_engine(deepcopy(tiny_model("llama")).train())


def test_an_answer_that_was_left_before_a_switch_is_not_kept():
    model = adapted("x", "y")
    with make_engine(model) as engine:
        stream = engine.stream("Why is it so?", max_tokens=8, ignore_eos=True)
        next(stream)
        stream.close()
        model.set_adapter("y")
        scored(engine, [])
        assert engine.stats.prefix_bytes == 0


def test_earlier_prompts_are_kept_apart():
    model = adapted("x", "y")
    options = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    with make_engine(model) as engine:
        for name in ("x", "y"):
            model.set_adapter(name)
            engine.generate("Once there was a zebra.", **options)
        for name in ("x", "y"):
            model.set_adapter(name)
            again = engine.generate("Once there was a zebra. It ran.", **options)
            plain = engine.generate("Once there was a zebra. It ran.", reuse=False, **options)
            assert again.report.spans[0].tokens > 20
            assert again.token_ids == plain.token_ids


def test_a_switch_while_documents_are_added_is_an_error(monkeypatch):
    model = adapted("x", "y")
    with make_engine(model, refill=False) as engine:
        encode = engine._encoder._encode_batch

        def switching(ids):
            yield from encode(ids)
            model.set_adapter("y")

        monkeypatch.setattr(engine._encoder, "_encode_batch", switching)
        with pytest.raises(ModelChangedError, match="add all of them again"):
            engine.add_documents([*DOCUMENTS, *(d.__class__(d.id + "2", d.text * 6) for d in DOCUMENTS)])
        monkeypatch.undo()
        engine.add_documents(DOCUMENTS)
        assert stored_tokens(engine) == ALL
        assert distance_to_full(engine) < 1e-3


@pytest.mark.parametrize("on_disk", [False, True])
def test_removed_documents_go_from_every_space(tmp_path, on_disk):
    model = adapted("x", "y")
    with make_engine(model, cache_dir=tmp_path if on_disk else None) as engine:
        for name in ("x", "y"):
            model.set_adapter(name)
            engine.add_documents(DOCUMENTS)
        engine.flush()
        kept = engine.stats.store_bytes / 2 * len(TEXTS["music"]) / ALL
        engine.remove_documents(["zebra"])
        engine.flush()
        assert engine.stats.store_bytes == pytest.approx(2 * kept, rel=0.01)
        chunks = len(engine._library.chunks(["music"]))
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2 * chunks * on_disk
        engine.add_documents([DOCUMENTS[1].__class__("music", "Another text altogether.")])
        engine.flush()
        assert len(engine._memory) == len(engine._library.chunks(["music"]))


def test_prompts_with_a_removed_document_go_from_every_space():
    model = adapted("x", "y")
    with make_engine(model, refill=False) as engine:
        for name in ("x", "y"):
            model.set_adapter(name)
            engine.add_documents(DOCUMENTS)
            engine.generate("Why?", documents=["zebra"], max_tokens=1)
        assert engine.stats.prefix_bytes > 0
        engine.remove_documents(["zebra"])
        assert engine.stats.prefix_bytes == 0


def test_documents_that_share_a_text_share_it_in_every_space():
    model = adapted("x", "y")
    with make_engine(model, refill=False) as engine:
        for name in ("x", "y"):
            model.set_adapter(name)
            engine.add_documents([*DOCUMENTS, Document("copy", TEXTS["zebra"])])
        engine.remove_documents(["copy"])
        for name in ("x", "y"):
            model.set_adapter(name)
            assert stored_tokens(engine) == ALL


def test_pins_hold_in_every_space():
    model = adapted("x", "y")
    with make_engine(model) as engine:
        engine.add_documents(DOCUMENTS)
        engine.pin_documents(["zebra"])
        pinned = set(engine._memory._pins)
        model.set_adapter("y")
        engine.add_documents(DOCUMENTS)
        assert len(engine._memory._pins) == 2 * len(pinned) > 0
        assert pinned < set(engine._memory._pins)
        engine.unpin_documents(["zebra"])
        assert not engine._memory._pins


def test_training_leaves_no_memory_behind():
    model = adapted("x", "y")
    with make_engine(model, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        engine.pin_documents(["zebra"])
        used = engine.stats.store_bytes
        for _ in range(3):
            train(model)
            engine.add_documents(DOCUMENTS)
            assert engine.stats.store_bytes == used
            assert stored_tokens(engine) == ALL
        assert len(list(engine._spaces)) == 1
        assert set(engine._memory._pins) == set(engine._library.prefixes(["zebra"]))


@pytest.mark.parametrize("reuse", ["on", "off"])
def test_adapters_that_are_more_than_layers_are_refused(reuse):
    prompt = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModelError, match="PromptTuningConfig.*LoRA"):
        make_engine(peft.get_peft_model(deepcopy(tiny_model("llama")), prompt), reuse=reuse)
    with pytest.raises(UnsupportedModelError, match="weighs its parts anew"):
        mixed = adapted("x")
        mixed.peft_config["x"].peft_type = peft.PeftType.XLORA
        make_engine(mixed, reuse=reuse)
    with pytest.raises(UnsupportedModelError, match="at a token of the prompt"):
        invoked = lora(1, alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")
        make_engine(peft.get_peft_model(deepcopy(tiny_model("llama")), invoked), reuse=reuse)


def test_a_wrapped_model_runs_without_reuse():
    model = adapted("x")
    engine = make_engine(model, reuse="off")
    ids = tiny_tokenizer()("Once upon a time", return_tensors="pt", add_special_tokens=False).input_ids
    expected = model.generate(input_ids=ids, do_sample=False, max_new_tokens=8, min_new_tokens=8)[0, 16:].tolist()
    got = engine.generate("Once upon a time", max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(got.token_ids) == expected


def test_the_digest_is_of_what_takes_part():
    one, two = adapted("x"), adapted("x", "y")
    assert weights_digest(unwrapped(one)) == weights_digest(unwrapped(two))
    two.set_adapter("y")
    assert weights_digest(unwrapped(one)) != weights_digest(unwrapped(two))


def test_an_edit_that_pytorch_does_not_count_shows_in_every_part_of_a_weight():
    model = deepcopy(tiny_model("llama"))
    watch, weight = WeightsWatch(model), model.model.layers[1].self_attn.k_proj.weight
    before = watch.state()
    for rows in weight.data.chunk(7):
        rows.mul_(2)
        now = watch.state()
        assert now != before
        before = now


def test_what_pytorch_counts_is_noticed_to_the_last_number():
    model = deepcopy(tiny_model("llama"))
    model.model.register_buffer("scale", torch.ones(1000))
    watch, layer = WeightsWatch(model), model.model.layers[1].self_attn.k_proj
    states = [watch.state()]
    # Neither lies where samples are taken.
    layer.weight[0, 20] += 1
    states.append(watch.state())
    model.model.scale[20] = 2
    states.append(watch.state())
    other = layer.weight.clone()
    other[0, 20] += 1
    layer.weight = torch.nn.Parameter(other, requires_grad=False)
    states.append(watch.state())
    assert all(one != other for one, other in pairwise(states))
    assert {state.samples for state in states} == {states[0].samples}


def test_a_look_at_the_weights_reads_few_of_them():
    model = unwrapped(adapted("x", "y"))
    watch = WeightsWatch(model)
    state = watch.state()
    held = {n for n, p in model.named_parameters() if any(p is w for w in state.weights)}
    assert any("lora_A.x" in name for name in held)
    assert not any(".y." in name for name in held)
    assert len(state.samples) <= 256 * len(state.weights)
    assert watch.state() == state
