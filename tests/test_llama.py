"""The Llama family: files, decoding, and its rules."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from goldens import TOLERANCE, apart, golden, repository, run, write

from mupax import optim, zoo
from mupax.zoo.families.llama import LLAMA_3
from mupax.zoo.generate import sample
from mupax.zoo.weights import foreign

TINY = {"width": 16, "depth": 2, "head_dim": 4, "vocab_size": 11, "context": 12}
TOKENS = jax.random.randint(jax.random.key(0), (3, 9), 0, 11)


def tiny(seed=0, **options):
    return zoo.create("llama", rngs=nnx.Rngs(seed), **{**TINY, **options})


def test_weights_in_bfloat16_are_read(tmp_path):
    weights, data = golden("smollm")
    half = {k: np.asarray(jnp.asarray(v, jnp.bfloat16)) for k, v in weights.items()}
    repository(tmp_path, "smollm")
    safetensors.numpy.save_file(half, tmp_path / "model.safetensors")
    model = zoo.load_pretrained(tmp_path)
    assert model.embedding.dtype == jnp.float32
    assert apart(run(model, data["tokens"]), data["logits"]) < 0.1


def changed(folder, kind, change, **config):
    """A repository with other weights."""
    repository(folder, kind, **config)
    write(folder / "model.safetensors", change(golden(kind)[0]))
    return folder


@pytest.mark.parametrize("kind", ["llama", "smollm"])
@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model."]
)
def test_names_of_wrappers_are_removed(prefix, kind, tmp_path):
    changed(tmp_path, kind, lambda w: {prefix + k: v for k, v in w.items()})
    model = zoo.load_pretrained(tmp_path)
    for key, array in foreign.export(model).items():
        np.testing.assert_array_equal(array, golden(kind)[0][key])


def test_a_file_of_a_base_model_is_loaded_for_its_features(tmp_path):
    def base(weights):
        names = {k.removeprefix("model."): v for k, v in weights.items()}
        return {k: v for k, v in names.items() if k != "lm_head.weight"}

    whole = zoo.load_pretrained(repository(tmp_path, "llama"))
    changed(tmp_path, "llama", base, architectures=["LlamaModel"])
    model = zoo.load_pretrained(tmp_path)
    tokens = TOKENS[:1, :6]
    np.testing.assert_array_equal(model.features(tokens), whole.features(tokens))
    assert foreign.export(model).keys() == base(golden("llama")[0]).keys()
    with pytest.raises(ValueError, match=r"has no head.*model\.features"):
        model(tokens)
    # The config says that there is a head, and the file has none.
    changed(tmp_path, "llama", base)
    with pytest.raises(ValueError, match=r"pass head=False .*, or tied=True"):
        zoo.load_pretrained(tmp_path)
    assert zoo.load_pretrained(tmp_path, head=False).readout is None
    zoo.load_pretrained(tmp_path, tied=True)(tokens)


def test_weights_overrule_a_config_that_ties_their_readout(tmp_path):
    other = {"lm_head.weight": golden("llama")[0]["lm_head.weight"]}
    changed(tmp_path, "smollm", lambda weights: {**weights, **other})
    with pytest.raises(ValueError, match="pass tied=False"):
        zoo.load_pretrained(tmp_path)
    readout = zoo.load_pretrained(tmp_path, tied=False).readout
    np.testing.assert_array_equal(readout.kernel[...], other["lm_head.weight"].T)
    repository(tmp_path, "smollm")
    with pytest.raises(ValueError, match="would change the function"):
        zoo.load_pretrained(tmp_path, tied=False)


def in_parts(folder, kind):
    """A repository whose weights lie in two files and an index."""
    weights, data = golden(kind)
    keys = sorted(weights)
    parts = {
        "model-1-of-2.safetensors": keys[::2],
        "model-2-of-2.safetensors": keys[1::2],
    }
    for name, held in parts.items():
        safetensors.numpy.save_file({k: weights[k] for k in held}, folder / name)
    listed = {key: name for name, held in parts.items() for key in held}
    index = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(str(data["config"]))
    return folder


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({}, "it lists None"),
        ({"weight_map": {"a": "../else.safetensors"}}, "'../else.safetensors'"),
        ({"weight_map": {"a": "model.bin"}}, "'model.bin'"),
        ({"weight_map": {"a": "model.safetensors", "b": [1]}}, r"it lists \[1\]"),
        ({"weight_map": {"a": "model.safetensors", "b": -1}}, "it lists -1"),
        ({"weight_map": {"a": "model-3-of-2.safetensors"}}, "there is no file"),
    ],
)
def test_an_index_that_lists_no_files_is_refused(index, said, tmp_path):
    in_parts(tmp_path, "smollm")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=said):
        zoo.load_pretrained(tmp_path)


def test_a_key_in_two_files_is_refused(tmp_path):
    in_parts(tmp_path, "smollm")
    first = tmp_path / "model-1-of-2.safetensors"
    (tmp_path / "model-2-of-2.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="which another file of this model holds too"):
        zoo.load_pretrained(tmp_path)


# Decoding.


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True, "queries_per_key": 2}, {"qkv_bias": True, "tied": False}],
)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_sequence(options):
    model = tiny(**options)
    whole = model(TOKENS)
    cache, parts = model.cache(3, 9), []
    for first, last in ((0, 4), (4, 5), (5, 9)):
        logits, cache = model.decode(TOKENS[:, first:last], cache, first)
        parts.append(logits)
    assert apart(jnp.concatenate(parts, axis=1), np.asarray(whole)) < TOLERANCE


def test_tokens_that_do_not_fit_into_the_cache_are_an_error():
    model = tiny()
    cache = model.cache(3, 6)
    for position in (-1, 3):
        with pytest.raises(ValueError, match="do not fit into a cache of 6 tokens"):
            model.decode(TOKENS[:, :4], cache, position)
    with pytest.raises(ValueError, match="the cache holds 3 sequences, and tokens"):
        model.decode(TOKENS[:2, :4], cache, 0)
    decode = jax.jit(lambda position: model.decode(TOKENS[:, :4], cache, position))
    assert not jnp.isnan(decode(2)[0]).any()
    logits, cache = decode(3)
    assert jnp.isnan(logits).all()
    assert jnp.isnan(cache.key).any()


PROMPTS = [[1, 2, 3, 4], [5], [6, 7, 8]]


@pytest.mark.parametrize("draws", [{}, {"temperature": 1.0, "top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("options", [{"name": "gpt"}, {"queries_per_key": 2}])
def test_prompts_of_different_lengths_continue_as_if_alone(options, draws):
    model = zoo.create(rngs=nnx.Rngs(3), **TINY, **{"name": "llama", **options})
    keys = jax.random.split(jax.random.key(0), 3)
    together = zoo.generate(model, PROMPTS, 6, key=keys, **draws)
    assert together.shape == (3, 10)
    for row, prompt, key in zip(together, PROMPTS, keys, strict=True):
        alone = zoo.generate(model, [prompt], 6, key=key[None], **draws)[0]
        assert row.tolist() == [0] * (4 - len(prompt)) + alone.tolist()


def test_logits_of_padded_prompts_are_those_of_each_alone():
    model = zoo.create("gpt", rngs=nnx.Rngs(3), **TINY)
    padded = jnp.array([[1, 2, 3, 4], [0, 0, 0, 5], [0, 6, 7, 8]])
    logits, _ = model.decode(padded, model.cache(3, 8), 0, jnp.array([0, 3, 1]))
    for row, prompt in zip(logits, PROMPTS, strict=True):
        alone = model(jnp.array([prompt]))[0]
        assert apart(row[4 - len(prompt) :], np.asarray(alone)) < TOLERANCE


@pytest.mark.parametrize(
    "prompts", [[[1], []], [[1, [2]], [3]], [[1], 2], "text", None]
)
def test_prompts_that_are_no_lists_of_tokens_are_refused(prompts):
    with pytest.raises(ValueError, match=r"whole numbers of shape|prompts of 0 tokens"):
        zoo.generate(tiny(), prompts, 2)


def test_each_sequence_stops_at_its_end_token():
    model = zoo.create("gpt", rngs=nnx.Rngs(3), **TINY)
    whole = zoo.generate(model, PROMPTS, 8)
    ends = (int(whole[0, 5]), int(whole[2, 7]))
    model.eos = ends
    stopped = zoo.generate(model, PROMPTS, 8)
    for row, before in zip(stopped.tolist(), whole.tolist(), strict=True):
        new = before[4:]
        stop = min((new.index(end) for end in ends if end in new), default=7)
        assert row[4:] == new[:stop] + [new[stop]] * (8 - stop)
    np.testing.assert_array_equal(zoo.generate(model, PROMPTS, 8, eos=()), whole)


def test_end_tokens_are_read_from_the_files_of_transformers(tmp_path):
    for config, beside, expected in (
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": [3, 2, 10**6]}, {}, (3, 2)),
        ({"eos_token_id": 3}, {"generation_config": {"eos_token_id": [5]}}, (5,)),
        ({"eos_token_id": 3}, {"generation_config": {}}, (3,)),
        ({"eos_token_id": 7}, {}, (7,)),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        repository(folder, "llama", **config)
        for name, content in beside.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        model = zoo.load_pretrained(folder)
        assert model.eos == expected
    zoo.save(model, tmp_path / "saved")
    assert zoo.load_pretrained(tmp_path / "saved").eos == (7,)
    assert zoo.load_pretrained(folder, eos=1).eos == (1,)
    repository(folder, "llama", eos_token_id="</s>")
    with pytest.raises(ValueError, match="must be a token or a list of tokens"):
        zoo.load_pretrained(folder)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 400)
    rows = jnp.tile(logits, (400, 1))
    for top_k, top_p, expected in (
        (None, 0.39, {1}),
        (None, 0.41, {1, 3}),
        (None, 0.69, {1, 3}),
        (None, 0.71, {1, 2, 3}),
        (None, 0.95, {0, 1, 2, 3}),
        # Of the two that top_k leaves, the first has 4/7.
        (2, 0.56, {1}),
        (2, 0.58, {1, 3}),
    ):
        drawn = np.asarray(sample(keys, rows, top_k, jnp.float32(top_p)))
        assert set(drawn.tolist()) == expected
    # 4/7 of the draws; four standard deviations.
    share = (np.asarray(sample(keys, rows, None, jnp.float32(0.6))) == 1).mean()
    assert abs(share - 4 / 7) < 4 * 0.5 / 20
    # Of equally likely tokens, top_k keeps k.
    drawn = sample(keys, jnp.zeros((400, 4)), 2, None)
    assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize("more", [{}, {"name": "gpt"}, {"experts": 4}], ids=str)
def test_generate_takes_the_likeliest_token_each_time(more):
    model = zoo.create(rngs=nnx.Rngs(3), **{"name": "llama", **TINY, **more})
    expected = np.zeros_like(TOKENS)  # of one shape; no token sees those after it
    expected[:, :4] = TOKENS[:, :4]
    for n in range(4, 9):
        expected[:, n] = run(model, expected)[:, n - 1].argmax(-1)
    np.testing.assert_array_equal(zoo.generate(model, TOKENS[:, :4], 5), expected)


def test_generate_draws_from_the_distribution_of_the_logits():
    model = tiny(3)
    start = jnp.tile(TOKENS[:1, :4], (4000, 1))
    drawn = zoo.generate(model, start, 1, temperature=0.7, key=jax.random.key(1))
    share = np.bincount(np.asarray(drawn[:, -1]), minlength=11) / 4000
    expected = jax.nn.softmax(model(start[:1])[0, -1] / 0.7)
    # Six standard deviations of a share of 4000 draws.
    np.testing.assert_allclose(share, expected, atol=6 * 0.5 / math.sqrt(4000))
    few = zoo.generate(model, start, 1, temperature=0.7, top_k=2, key=jax.random.key(1))
    likeliest = jnp.argsort(expected)[-2:]
    assert set(np.unique(few[:, -1])) == set(likeliest.tolist())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "at least 1"),
        ({"temperature": -1.0}, "at least 0"),
        ({"temperature": 1.0}, r"pass key=jax.random.key"),
        ({"top_k": 12}, r"top_k=12 must lie in \[1, 11\]"),
        ({"steps": 9}, "does not fit into context=12"),
    ],
)
def test_generate_refuses_what_it_cannot_do(changes, said):
    given = {"steps": 2, **changes}
    with pytest.raises(ValueError, match=said):
        zoo.generate(tiny(), TOKENS[:, :4], given.pop("steps"), **given)


@pytest.mark.parametrize("token", [-1, 11])
def test_generate_refuses_a_token_that_the_vocabulary_lacks(token):
    with pytest.raises(ValueError, match="the vocabulary has 11"):
        zoo.generate(tiny(), TOKENS.at[0, 0].set(token), 2)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (TOKENS[0], r"of shape \(\d+,\); expected whole numbers of shape"),
        (TOKENS[:, :4].astype(float), "tokens are float32 of shape"),
        (TOKENS[:0, :4], "there are 0 prompts of 4 tokens"),
        (TOKENS[:, :0], "prompts of 0 tokens"),
    ],
)
def test_generate_refuses_tokens_of_another_shape_or_dtype(tokens, said):
    with pytest.raises(ValueError, match=said):
        zoo.generate(tiny(), tokens, 2)


def test_generate_takes_lists():
    tokens = TOKENS[:, :4]
    expected = zoo.generate(tiny(), tokens, 2)
    np.testing.assert_array_equal(zoo.generate(tiny(), tokens.tolist(), 2), expected)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_generate_works_with_64_bits(name):
    expected = zoo.generate(zoo.create(name, rngs=nnx.Rngs(3), **TINY), TOKENS, 2)
    with jax.enable_x64(True):
        model = zoo.create(name, rngs=nnx.Rngs(3), **TINY)
        np.testing.assert_array_equal(zoo.generate(model, TOKENS, 2), expected)


def test_generate_needs_a_decoder():
    model = zoo.create("resmlp", width=8, depth=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs a decoder, not a ResMLP"):
        zoo.generate(model, TOKENS, 2)


# The rules.


def test_the_default_is_completep_and_keys_grow_with_the_queries():
    model = tiny(base_width=8, base_depth=1, queries_per_key=2)
    assert model.plan.parametrization == optim.parametrization("completep")
    assert model.plan["kv_heads"] == (1, 2, True)
    scale = zoo.scales(model)["blocks/attention/key/kernel"]
    assert scale.role is optim.Role.HIDDEN
    assert scale.width_in == 2


def test_a_frequency_is_kept_or_divided_by_the_factor_of_llama_3():
    plain = zoo.layers.rotary.Rotary(500000.0).frequencies(64)
    scaled = zoo.layers.rotary.Rotary(500000.0, LLAMA_3).frequencies(64)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 32
    assert (np.diff(scaled / plain) <= 0).all()


def test_rotary_logits_depend_on_the_distance_alone():
    rotary = zoo.layers.rotary.Rotary(100.0)
    x = jax.random.normal(jax.random.key(0), (1, 1, 2, 8))

    def logit(at, other):
        query = rotary.rotate(x[:, :, :1], jnp.array([[at]]))
        key = rotary.rotate(x[:, :, 1:], jnp.array([[other]]))
        return jnp.vdot(query, key)

    assert logit(7, 3) == pytest.approx(float(logit(25, 21)), rel=1e-5)
    assert logit(7, 3) != pytest.approx(float(logit(7, 4)), rel=1e-3)


def test_a_file_alone_is_read_with_a_warning_of_what_it_does_not_show(tmp_path, caplog):
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file(golden("smollm")[0], path)
    sizes = {"width": 24, "depth": 2, "queries_per_key": 2, "mlp_ratio": 1.5}
    zoo.load_pretrained("llama", path, **sizes, vocab_size=11, head_dim=6)
    assert "norm_eps and experts_per_token, which no weights show" in caplog.text
