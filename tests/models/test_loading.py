"""load_model on folders: what it names, and every way in which a folder can be broken."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.errors import ModelError
from jaxkv.models import load_model


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_model_describes_itself(save_llama):
    folder, _ = save_llama()
    model = load_model(str(folder))
    assert model.name == "tiny"
    assert model.config.dtype == "float32"
    assert model.tokenizer.stop_ids == (257,)
    assert hash(model) != hash(load_model(folder))  # by identity: a static argument of jit
    assert len(model.fingerprint) == 64


def test_fingerprint_follows_weights_and_config_but_not_dtype(save_llama, edit_config):
    folder, _ = save_llama()
    first = load_model(folder).fingerprint
    assert load_model(folder, dtype="bfloat16").fingerprint == first
    edit_config(folder, max_position_embeddings=256)
    second = load_model(folder).fingerprint
    rewrite(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].__imul__(2))
    assert len({first, second, load_model(folder).fingerprint}) == 3


def test_stop_ids_of_generation_config_are_added(save_llama):
    folder, _ = save_llama()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 257]}))
    assert load_model(folder).tokenizer.stop_ids == (3, 257)


def test_repeated_head_of_a_tied_model_is_ignored(save_llama):
    folder, _ = save_llama(tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "head" not in load_model(folder).params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing tensors: model\.layers\.1\.mlp\.up_proj"),
        (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head"),
        (lambda t: t.update({"model.extra": np.zeros(2, np.float32)}), r"unexpected tensors: model\.extra"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(47, np.float32)}),
            r"wrong shapes: model\.norm\.weight is \[47\], not \[48\]",
        ),
        (lambda t: t.update({"model.norm.weight": np.zeros(48, np.int32)}), r"model\.norm\.weight.*I32"),
    ],
)
def test_wrong_tensors_are_named_before_any_is_read(save_llama, monkeypatch, change, message):
    folder, _ = save_llama()
    rewrite(folder, change)
    monkeypatch.setattr("jaxkv.models.loading.jnp.array", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_many_missing_tensors_are_counted(save_llama, edit_config):
    folder, _ = save_llama()
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"missing tensors: .*and 10 more"):
        load_model(folder)


def test_truncated_weights(save_llama):
    folder, _ = save_llama()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load_model(folder)


def test_missing_shard(save_llama):
    folder, _ = save_llama(shard=40_000)
    gone = sorted(folder.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(ModelError, match=f"lacks the shards {gone.name}"):
        load_model(folder)


def test_index_may_not_leave_its_folder(save_llama):
    folder, _ = save_llama()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ModelError, match="outside its folder"):
        load_model(folder)


def test_duplicate_tensor(save_llama):
    folder, _ = save_llama()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(ModelError, match="more than one safetensors file"):
        load_model(folder)


def test_pickles_are_never_loaded(save_llama):
    folder, _ = save_llama()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["missing", "broken"])
def test_missing_or_broken_json(save_llama, name, how):
    folder, _ = save_llama()
    if how == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_text('{"cut": ')
    with pytest.raises(ModelError, match=name):
        load_model(folder)


def test_unknown_model_type(save_llama, edit_config):
    folder, _ = save_llama()
    edit_config(folder, model_type="mamba")
    with pytest.raises(ModelError, match="'mamba' is not supported; supported are llama"):
        load_model(folder)


def test_vocabulary_larger_than_the_model(save_llama):
    folder, _ = save_llama(vocab_size=200)
    model = load_model(folder)
    with pytest.raises(ModelError, match="beyond the model's vocabulary of 200"):
        _ = model.tokenizer.token_bytes


def test_not_a_folder(tmp_path):
    file = tmp_path / "weights"
    file.write_text("")
    with pytest.raises(ModelError, match="is a file"):
        load_model(file)
    with pytest.raises(ModelError, match=r"neither a folder nor a known model; known models are .*smollm2-135m"):
        load_model("smollm3-999b")
    with pytest.raises(ModelError, match="'float16' is not supported"):
        load_model("smollm2-135m", dtype="float16")


def test_hub_failure_is_a_model_error(monkeypatch):
    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"'someone/something' is not a folder.*no route to host"):
        load_model("someone/something")


def test_hub_snapshot_is_loaded_as_a_folder(save_llama, monkeypatch):
    folder, _ = save_llama()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    model = load_model("someone/tiny")
    assert model.name == "someone/tiny"
    assert len(jax.tree.leaves(model.params)) == 3 * 9 + 3
