"""Policy files: what is written is read back, and everything that does not fit is named before any work."""

import copy
import dataclasses
import json
import warnings
from fractions import Fraction
from types import SimpleNamespace

import pytest

from jaxkv.errors import PolicyError
from jaxkv.grammar.tags import CALL_VOCABULARY
from jaxkv.policies import load_policy
from jaxkv.policies.pask import structural_prior as prior
from jaxkv.policies.pask.frozen_policy import ModelKey, Reserve
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.policy_file import checksum, parse_policy, read_policy, save_policy
from jaxkv.policies.pask.table import Entry
from jaxkv.state.payload import KVSpec

TAG = "schema_bearing/required/critical/no_lookahead"
SPEC = KVSpec(30, 3, 64)


@pytest.fixture(scope="module")
def policy():
    """A policy that uses every field."""
    return dataclasses.replace(
        prior.structural_prior(),
        name="every-field",
        calibrated=True,
        model=ModelKey("abc", 30, 3, 64),
        boundaries=((0, 10), (10, 20), (20, 30)),
        reserve=Reserve(8, Fraction(4, 5), {"key,string": (Fraction(7, 3), 4), "": (Fraction(0), 0)}, (Fraction(1), 2)),
        thresholds={"decode_low": "1/200", "decode_high": "1/100"},
        decode={TAG: (Entry(2, 1, (0.1, 1e-9)), Entry(0, 1, (3.0, 0.0)), Entry(1, 0, (1 / 3, 2.0)))},
    )


@pytest.fixture
def data(policy):
    return signed(policy.to_json())


def signed(data):
    return {**data, "sha256": checksum(data)}


def write(path, data):
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def changed(data, path, value):
    """A correctly signed copy with the field at a dotted path changed; `del` removes it."""
    data = copy.deepcopy(data)
    *parents, last = path.split(">")
    inner = data
    for part in parents:
        inner = inner[int(part) if isinstance(inner, list) else part]
    if value is del_:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return signed(data)


del_ = object()


def test_what_is_saved_is_read_back(policy, tmp_path):
    path = save_policy(policy, tmp_path / "folder" / "policy.json")
    assert read_policy(path) == policy
    assert [p.name for p in path.parent.iterdir()] == ["policy.json"]
    again = save_policy(read_policy(path), tmp_path / "again.json")
    assert again.read_bytes() == path.read_bytes()


def test_checksum_is_over_content_not_layout(data, tmp_path):
    assert read_policy(write(tmp_path / "one_line.json", data)) == parse_policy(data, "data")
    assert checksum(dict(reversed(data.items()))) == data["sha256"]


def test_a_bad_policy_is_not_written(policy, tmp_path):
    bad = dataclasses.replace(policy, budget_decode=Fraction(3, 2))
    with pytest.raises(PolicyError, match=r"budgets\.decode is '3/2'"):
        save_policy(bad, tmp_path / "bad.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "format is 2, expected 1"),
        ("window", del_, r"missing fields is \['window'\]"),
        ("extra", 1, r"unknown fields is \['extra'\]"),
        ("name", " ", "name is ' ', expected a text"),
        ("calibrated", 1, "calibrated is 1, expected true or false"),
        ("note", None, "note is None"),
        ("grammar", "prose", "grammar is 'prose', expected one of"),
        ("xgrammar", 3, "xgrammar is 3"),
        ("groups", ["lower", "upper"], "groups is"),
        ("prompt_labels", ["protected_content"], "prompt_labels is"),
        ("vocabulary>roles", ["required", "required"], r"vocabulary\.roles is"),
        ("vocabulary>roles", ["a/b"], r"vocabulary\.roles is"),
        ("vocabulary>states", [], r"vocabulary\.states is"),
        ("vocabulary>rest_state", "stable", r"vocabulary\.rest_state is 'stable'"),
        ("vocabulary>more", 1, r"vocabulary is \['more'\]"),
        ("layers", "halves", "layers is 'halves'"),
        ("layers", [[0, 10], [11, 20], [20, 30]], "layers is"),
        ("layers", [[0, 10], [10, 30]], "layers is"),
        ("layers", [[0, 10], [10, 5], [5, 30]], "layers is"),
        ("model_fingerprint", 5, "model_fingerprint is 5"),
        ("num_layers", 0, "num_layers is 0"),
        ("num_layers", "any", "num_layers is 'any', expected an integer, as there is a model_fingerprint"),
        ("head_dim", True, "head_dim is True"),
        ("quantizer>bits", 3, "quantizer is .* which is what jaxkv implements"),
        ("costs>scale_bits", 8, "costs is .* which is what jaxkv implements"),
        ("tie_order>decode", ["score"], "tie_order is .* which is what jaxkv implements"),
        ("sinks", -1, "sinks is -1, expected an integer of at least 0"),
        ("window", 1.5, r"window is 1\.5"),
        ("thresholds>decode_low", 0.005, r"thresholds\.decode_low is 0\.005, expected a rational"),
        ("budgets>decode", "0.5", r"budgets\.decode is '0\.5', expected a rational"),
        ("budgets>decode", "1/0", r"budgets\.decode is '1/0', expected a rational"),
        ("budgets>prompt", "-1/2", r"budgets\.prompt is '-1/2'"),
        ("budgets>prompt", "5/4", r"budgets\.prompt is '5/4', expected a share of Full KV"),
        ("budgets>prompt", del_, r"budgets\.prompt is None, expected a value, and it is missing"),
        ("reserve>horizon", -1, r"reserve\.horizon is -1"),
        ("reserve>quantile", "2", r"reserve\.quantile is '2'"),
        ("reserve>pooled", ["1", 9], r"reserve\.pooled is \['1', 9\], expected .* 0 <= h <= 8"),
        ("reserve>pooled", ["3", 2], r"reserve\.pooled is \['3', 2\], expected at most h tokens"),
        ("reserve>states>key,string", ["x", 1], r"reserve\.states\.key,string is 'x'"),
        ("decode", [], "decode is"),
        ("decode>schema_bearing/required", {}, "decode is 'schema_bearing/required', expected keys"),
        (f"decode>{TAG}>upper", del_, f"decode.{TAG} is .* one entry for each of"),
        (f"decode>{TAG}>upper>base", "medium", rf"decode\.{TAG}\.upper\.base is 'medium'"),
        (f"decode>{TAG}>upper>floor", 1, rf"decode\.{TAG}\.upper\.floor is 1"),
        (f"decode>{TAG}>upper>floor", del_, rf"decode\.{TAG}\.upper is .* expected base, floor and scores"),
        (f"decode>{TAG}>lower>scores", [1.0], rf"decode\.{TAG}\.lower\.scores is \[1\.0\]"),
        (f"decode>{TAG}>lower>scores", [-1.0, 0.0], rf"decode\.{TAG}\.lower\.scores is"),
        (f"decode>{TAG}>lower>scores", ["1", 0], rf"decode\.{TAG}\.lower\.scores is"),
        (f"decode>{TAG}>lower>base", "release", r"fallback\.schema_bearing is .* the maximum over"),
        ("fallback>schema_bearing>lower", "low", r"fallback\.schema_bearing is .*'low'"),
        ("fallback>schema_bearing/required", del_, r"fallback\.schema_bearing/required is None"),
        ("fallback>free_generation", {"lower": "low"}, r"fallback\.free_generation is"),
        ("prompt>protected_content", del_, r"prompt is \[\], expected an entry for 'protected_content'"),
        ("prompt>headline", {}, "prompt is 'headline'"),
    ],
)
def test_every_field_is_checked(data, tmp_path, path, value, message):
    file = write(tmp_path / "policy.json", changed(data, path, value))
    for transfer in (False, True):
        with pytest.raises(PolicyError, match=message) as error:
            load_policy(file, transfer=transfer)
        assert str(error.value).startswith(f"{file}: ")


@pytest.mark.parametrize("transfer", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [('"sinks": 4', '"sinks": 5'), ('"high"', '"low"'), ('"1/2"', '"1/3"'), ('"sha256": "', '"sha256": "0')],
)
def test_a_tampered_file_is_refused(policy, tmp_path, old, new, transfer):
    path = save_policy(policy, tmp_path / "policy.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PolicyError, match=r"sha256 is .* was changed after it was frozen"):
        load_policy(path, transfer=transfer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b'{"format": 1', "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[]", "top level is 'list'"),
        (b'{"format": NaN}', "NaN is not a JSON number"),
        (b'{"format": 1, "format": 1}', r"repeats a key among \['format', 'format'\]"),
        (b"{}", "format is None"),
    ],
)
def test_files_that_are_no_policies(tmp_path, content, message):
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=message):
        load_policy(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(PolicyError, match=r"nowhere\.json: cannot be read \(No such file"):
        load_policy(tmp_path / "nowhere.json")


def transferred(path, message, **arguments):
    """Loading fails with the message, and only warns with it under transfer."""
    with pytest.raises(PolicyError, match=message) as error:
        load_policy(path, **arguments)
    assert "transfer=True" in str(error.value)
    with pytest.warns(UserWarning, match=message):
        return load_policy(path, transfer=True, **arguments)


def test_another_xgrammar_version(data, tmp_path):
    path = write(tmp_path / "policy.json", changed(data, "xgrammar", "0.1.0"))
    transferred(path, r"made with xgrammar 0\.1\.0, and 0\.2\.9 is installed")


def test_another_vocabulary_keeps_tags_by_name_under_transfer(policy, tmp_path):
    """The file's roles come in another order and one is missing: its rows must still land on the tags they name."""
    other = dataclasses.replace(CALL_VOCABULARY, roles=("required", "optional", "scaffold_separator"))
    path = save_policy(dataclasses.replace(policy, vocabulary=other), tmp_path / "policy.json")
    loaded = transferred(
        path, r"its vocabulary has the roles \['required', 'optional', 'scaffold_separator'\], and jaxkv's"
    )
    assert loaded.vocabulary == CALL_VOCABULARY
    expected = Pask(policy).bind(SPEC, 1024).table
    table = loaded.bind(SPEC, 1024).table
    assert (table.base == expected.base).all()
    assert (table.floor == expected.floor).all()


def test_another_model(policy, tmp_path):
    path = save_policy(policy, tmp_path / "policy.json")
    model = SimpleNamespace(fingerprint="xyz", config=None)
    loaded = transferred(path, r"fingerprint abc, and this one xyz", model=model)
    with pytest.warns(UserWarning, match=r"num_layers = 30, and this one 36.*layer groups"):
        loaded.bind(KVSpec(36, 8, 128), 1024)
    # without a model at hand, binding finds out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late = load_policy(path)
        assert late.bind(SPEC, 1024, "abc").name == "every-field"
        load_policy(path, SimpleNamespace(fingerprint="abc", config=None))
    with pytest.raises(PolicyError, match="fingerprint abc, and this one xyz"):
        late.bind(SPEC, 1024, "xyz")
    with pytest.raises(PolicyError, match="head_dim = 64, and this one 32"):
        late.bind(KVSpec(30, 3, 32), 1024)
    with pytest.raises(PolicyError, match="layer groups are"):
        late.bind(KVSpec(30, 3, 64, ((0, 5), (5, 20), (20, 30))), 1024)


def test_reserve_scales_with_the_full_cost_under_transfer(policy):
    """F is a share of C_full: exact for the model it was made for, rounded up to a unit for another."""
    states = {"key": (Fraction(49, 192), 1)}
    frozen = dataclasses.replace(policy, budget_decode=Fraction(0), reserve=Reserve(states=states), boundaries=None)
    assert Pask(frozen).bind(SPEC, 64).table.reserve.tolist() == [49, 0]
    with pytest.warns(UserWarning, match="num_kv_heads"):
        bound = Pask(frozen, transfer=True).bind(KVSpec(32, 8, 128), 64)
    assert bound.table.reserve.tolist() == [-(-49 * bound.costs.full_units // 192), 0]
    assert 49 * bound.costs.full_units % 192


def test_the_frozen_prior_is_what_the_code_makes(tmp_path):
    made = save_policy(prior.structural_prior(), tmp_path / "prior.json")
    remedy = "run python -m jaxkv.policies.pask.structural_prior"
    assert prior.PATH.read_bytes() == made.read_bytes(), remedy
    assert read_policy(prior.PATH) == prior.structural_prior()
