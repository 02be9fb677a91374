"""Embeddings, positions, tokens and codes: what is looked up is not summed over."""

from .kit import F, H, I, O, Setup, V


def body(n, classes=7):
    return {
        "dense/kernel": H(n, n),
        "dense/bias": V(n),
        "head/kernel": O(n, classes),
        "head/bias": F(classes),
    }


def with_table(path, base_entries, target_entries=None, classes=7):
    """One table (entries, n) beside a small network."""
    ratio = (target_entries or base_entries) / base_entries

    def tree(n):
        entries = base_entries if n == 64 else (target_entries or base_entries)
        return (
            {path: I(entries, n, copies=ratio)}
            | {"in/kernel": I(5, n)}
            | body(n, classes)
        )

    return tree


def positions(path, lead=True):
    """Positions grow from 32 to 128, as the width from 64 to 256."""

    def tree(n):
        t = n // 2
        shape = (1, t, n) if lead else (t, n)
        return {"patch/kernel": I(12, n), path: I(*shape, copies=4)} | body(n)

    return tree


def language_model(n, vocab, ratio=1.0, bias=False):
    tree = {
        "embed/embedding": I(vocab, n, copies=ratio),
        "dense/kernel": H(n, n),
        "dense/bias": V(n),
        "lm_head/kernel": O(n, vocab, copies=ratio),
    }
    return tree | ({"lm_head/bias": F(vocab, copies=ratio)} if bias else {})


def tied_model(n, vocab, ratio=1.0):
    return {
        "embed/embedding": I(vocab, n, copies=ratio),
        "dense/kernel": H(n, n),
        "dense/bias": V(n),
    }


def text_classifier(name, n, classes=4):
    return {
        "embed/embedding": I(500, n),
        "dense/kernel": H(n, n),
        f"{name}/kernel": O(n, classes),
    }


def recommender(n):
    """Users and items are looked up; the score is a dot product of them."""
    return {
        "user_embedding/embedding": I(3000, n),
        "item_embedding/embedding": I(2000, n),
        "tower/kernel": H(n, n),
        "tower/bias": V(n),
    }


def dlrm(n):
    tree = {f"tables/{i}": I(k, n) for i, k in enumerate((40, 300, 7))}
    return tree | {
        "bottom/kernel": I(13, n),
        "top_0/kernel": H(4 * n, n),
        "top_0/bias": V(n),
        "top_1/kernel": O(n, 1),
        "top_1/bias": F(1),
    }


def factorized(n):
    """ALBERT: words of 128, projected up."""
    return {
        "word_embeddings/embedding": F(1000, 128),
        "embedding_projection/kernel": I(128, n),
        "embedding_projection/bias": V(n),
    } | body(n)


def adaptive(n):
    """Transformer-XL's adaptive softmax: clusters of n, n/4 and their projections."""
    return {
        "embed/emb_0": I(200, n),
        "embed/emb_1": I(800, n // 4),
        "embed/proj_1": H(n // 4, n),
    } | body(n)


def nnlm_char(n):
    """A table of small vectors of fixed size, concatenated: fan-in is fixed."""
    return {
        "chars/embedding": F(60, 16),
        "conv/kernel": I(3, 16, n),
        "conv/bias": V(n),
    } | body(n)


def learned_prompt(n):
    return {"embed/kernel": I(12, n), "cls": V(n), "mask_token": V(1, 1, n)} | body(n)


def axial(n):
    """Reformer: two tables of half the width each."""
    return {
        "patch/kernel": I(12, n),
        "pos_emb/rows": I(16, n // 2),
        "pos_emb/cols": I(16, n // 2),
    } | body(n)


def image_positions(n):
    return {"patch/kernel": I(4, 4, 3, n), "pos_embedding": I(14, 14, n)} | body(n)


def mae(n):
    """A decoder half as wide, with positions of its own."""
    return {
        "patch/kernel": I(16, 16, 3, n),
        "patch/bias": V(n),
        "cls_token": V(1, 1, n),
        "pos_embed": V(1, 197, n),
        "encoder/kernel": H(n, n),
        "decoder_embed/kernel": H(n, n // 2),
        "decoder_embed/bias": V(n // 2),
        "mask_token": V(1, 1, n // 2),
        "decoder_pos_embed": V(1, 197, n // 2),
        "decoder/kernel": H(n // 2, n // 2),
        "decoder_pred/kernel": O(n // 2, 768),
        "decoder_pred/bias": F(768),
    }


def value_head(n):
    """A tied policy with a value head, as in RLHF."""
    return {
        "transformer/wte/embedding": I(1000, n),
        "transformer/wpe/embedding": I(64, n),
        "transformer/h/0/kernel": H(n, n),
        "transformer/ln_f/scale": V(n),
        "v_head/kernel": O(n, 1),
        "v_head/bias": F(1),
    }


def untied_value_head(n):
    return value_head(n) | {"lm_head/kernel": O(n, 1000)}


def actor_critic(n):
    return {
        "Dense_0/kernel": I(8, n),
        "Dense_0/bias": V(n),
        "Dense_1/kernel": H(n, n),
        "Dense_1/bias": V(n),
        "policy/kernel": O(n, 4),
        "policy/bias": F(4),
        "value/kernel": O(n, 1),
        "value/bias": F(1),
    }


def multi_task(n):
    tree = {"embed/kernel": I(20, n), "dense/kernel": H(n, n), "dense/bias": V(n)}
    for task, size in (("age", 1), ("sex", 2), ("city", 40)):
        tree |= {f"heads/{task}/kernel": O(n, size), f"heads/{task}/bias": F(size)}
    return tree


def mlp(n):
    return {"in": I(8, n), "mid": H(n, n), "out": O(n, 2)}


def no_readout(n):
    """A backbone: nothing reads out."""
    return {"in": I(8, n), "mid": H(n, n), "norm": V(n)}


def rectangular(n):
    """Widths that grow by 4 and by 2."""
    k = 32 if n == 64 else 64
    return {
        "a/kernel": I(8, n),
        "a/bias": V(n),
        "b/kernel": H(n, k, out=2),
        "b/bias": V(k, out=2),
        "c/kernel": H(k, k, into=2, out=2),
        "d/kernel": O(k, 3, into=2),
    }


def one_fixed_width(n):
    """A bottleneck that stays: the layer into it is like a readout."""
    return {
        "a/kernel": I(8, n),
        "b/kernel": O(n, 16),
        "b/bias": F(16),
        "c/kernel": I(16, n),
        "c/bias": V(n),
        "d/kernel": O(n, 3),
        "d/bias": F(3),
    }


def one_layer(n):
    """A linear model of growing inputs: only a readout."""
    return {"w": O(n, 1), "b": F(1)}


def growing_inputs(n):
    """Random features of growing number go into a network that grows as well."""
    return {
        "a/kernel": H(2 * n, n),
        "a/bias": V(n),
        "b/kernel": O(n, 2),
        "b/bias": F(2),
    }


VOCAB = {"vocab": (100, 200)}
GROWN_VOCAB = {
    "embeddings": "^embed/",
    "axes": {r"^lm_head/kernel$": ((0,), ()), r"^lm_head/bias$": ((), ())},
}

SETUPS = [
    *[
        Setup(
            f"table_{name}",
            "a table of a fixed number of entries",
            with_table(path, 50),
        )
        for name, path in (
            ("flax", "embed/embedding"),
            ("haiku", "embed/embeddings"),
            ("wte", "wte"),
            ("neutral", "w0"),
            ("queries", "query_embed"),
            ("latents", "latents"),
        )
    ],
    *[
        Setup(
            f"table_grows_{name}",
            "a vocabulary that grows from 100 to 200: entries are not summed over",
            with_table(path, 100, 200),
            asks=path,
            either=True,
            remedies=({"embeddings": f"^{path}$"}, {"axes": {f"^{path}$": ((), (1,))}}),
        )
        for name, path in (
            ("flax", "embed/embedding"),
            ("haiku", "embed/embeddings"),
            ("wte", "wte/embedding"),
            ("shared", "shared/embedding"),
            ("tok", "tok_embeddings/weight"),
            ("codebook", "quantizer/codebook"),
            ("latents", "latents"),
            ("queries", "query_embed/embedding"),
            ("memory", "memory_tokens"),
            ("prompt", "prompt/prompt_embeddings"),
        )
    ],
    *[
        Setup(
            f"positions_grow_{name}",
            "positions (32, 64) to (128, 256): entries are no fan-in",
            positions(path, lead),
            asks=path,
            either=True,
            remedies=(
                {"embeddings": f"^{path}$"},
                {"axes": {f"^{path}$": ((), (2 if lead else 1,))}},
            ),
        )
        for name, path, lead in (
            ("timm", "pos_embed", True),
            ("flax", "posembed_input/pos_embedding", True),
            ("gpt", "wpe/embedding", False),
            ("bert", "position_embeddings/embedding", False),
            ("plain", "pos_emb", False),
            ("positional", "positional_embedding", False),
        )
    ],
    *[
        Setup(
            f"positions_grow_{name}_named",
            "positions (32, 64) to (128, 256)",
            positions(path, lead),
            {"embeddings": f"^{path}$"},
        )
        for name, path, lead in (("timm", "pos_embed", True), ("neutral", "p", False))
    ],
    Setup("language_model", "untied", lambda n: language_model(n, 300)),
    Setup(
        "language_model_grown_vocabulary",
        "untied; a vocabulary of 100 in the base, 200 in the target",
        lambda n, vocab: language_model(n, vocab, 2.0, bias=True),
        grow=VOCAB,
        asks="embed/embedding|lm_head",
        either=True,
        remedies=(GROWN_VOCAB,),
    ),
    Setup(
        "language_model_grown_vocabulary_named",
        "untied; a vocabulary of 100 in the base, 200 in the target",
        lambda n, vocab: language_model(n, vocab, 2.0, bias=True),
        GROWN_VOCAB,
        grow=VOCAB,
    ),
    Setup(
        "language_model_grown_as_width",
        "untied; the vocabulary grows by 4, as the width does",
        lambda n, vocab: language_model(n, vocab, 4.0),
        {"embeddings": "^embed/"},
        grow={"vocab": (100, 400)},
        asks="lm_head/kernel",
        either=True,
        remedies=({"axes": {r"^lm_head/kernel$": ((0,), ())}},),
    ),
    Setup(
        "language_model_padded",
        "untied; a vocabulary of 1000 in the base, padded to 1024 in the target",
        lambda n, vocab: language_model(n, vocab, 1.024, bias=True),
        grow={"vocab": (1000, 1024)},
        asks="embed/embedding|lm_head",
        either=True,
        remedies=({"fractional": True} | GROWN_VOCAB,),
    ),
    Setup(
        "tied_grown_vocabulary",
        "tied; a vocabulary of 100 in the base, 200 in the target",
        lambda n, vocab: tied_model(n, vocab, 2.0),
        {"tied": "^embed/"},
        grow=VOCAB,
    ),
    Setup(
        "tied_grown_vocabulary_not_named",
        "tied; a vocabulary of 100 in the base, 200 in the target",
        lambda n, vocab: tied_model(n, vocab, 2.0),
        grow=VOCAB,
        asks="embed/embedding",
        remedies=({"tied": "^embed/"},),
    ),
    Setup(
        "tied_padded",
        "tied; a vocabulary of 1000 in the base, padded to 1024 in the target",
        lambda n, vocab: tied_model(n, vocab, 1.024),
        {"tied": "^embed/"},
        grow={"vocab": (1000, 1024)},
        asks="embed/embedding",
        either=True,
        remedies=({"fractional": True},),
    ),
    Setup("tied_plain", "tied", lambda n: tied_model(n, 300), {"tied": "embed"}),
    *[
        Setup(
            f"text_classifier_{name}",
            "a text classifier: a table of words, a head of 4 classes",
            lambda n, name=name: text_classifier(name, n),
        )
        for name in ("head", "classifier", "logits", "output")
    ],
    Setup(
        "text_classifier_neutral",
        "a text classifier whose head is named as any layer",
        lambda n: text_classifier("dense_1", n),
        asks="dense_1|embed",
        either=True,
        remedies=({"readout": "^dense_1/"},),
    ),
    Setup("recommender", "two towers", recommender, {"readout": None}),
    Setup(
        "recommender_not_said",
        "two towers: the score is a dot product, no parameter reads out",
        recommender,
        asks="readout",
        remedies=({"readout": None},),
    ),
    Setup("dlrm", "DLRM: a list of tables", dlrm),
    Setup("albert", "ALBERT: a table of fixed size, projected up", factorized),
    Setup(
        "adaptive_embedding",
        "Transformer-XL's adaptive embedding: a projection among the tables",
        adaptive,
        asks="embed/proj_1",
        either=True,
        remedies=({"axes": {"^embed/proj_1$": ((0,), (1,))}},),
    ),
    Setup("char_cnn", "characters of 16", nnlm_char),
    Setup("tokens", "class and mask tokens", learned_prompt),
    Setup("axial_positions", "Reformer", axial),
    Setup("image_positions", "positions (14, 14, n)", image_positions),
    Setup("mae", "a masked autoencoder", mae),
    Setup(
        "value_head_tied",
        "trl: a tied GPT with a value head",
        value_head,
        {"tied": "/wte/", "readout": "v_head"},
    ),
    Setup(
        "value_head_tied_not_named",
        "trl: a tied GPT with a value head, which is not all that reads out",
        value_head,
        asks="wte|v_head",
        remedies=({"tied": "/wte/", "readout": "v_head"},),
    ),
    Setup(
        "value_head_untied",
        "trl: an untied GPT with a value head",
        untied_value_head,
        {"readout": "lm_head|v_head"},
    ),
    Setup(
        "value_head_untied_not_named",
        "trl: an untied GPT with a value head",
        untied_value_head,
        asks="v_head",
        remedies=({"readout": "lm_head|v_head"},),
    ),
    Setup(
        "actor_critic",
        "flax examples/ppo",
        actor_critic,
        {"readout": "^(policy|value)/kernel"},
    ),
    Setup(
        "actor_critic_not_named",
        "flax examples/ppo: two heads",
        actor_critic,
        asks="(policy|value)/kernel",
        remedies=({"readout": "^(policy|value)/kernel"},),
    ),
    Setup(
        "actor_critic_bias_matched",
        "flax examples/ppo: a pattern that matches the biases of the heads as well",
        actor_critic,
        {"readout": "^(policy|value)/"},
    ),
    Setup("multi_task", "a head for each task", multi_task, {"readout": "^heads/"}),
    Setup(
        "readout_names_hidden",
        "a readout pattern that matches a hidden layer",
        lambda n: mlp(n),
        {"readout": "^mid$"},
        asks=r"\bmid\b",
        remedies=({"readout": "^out$"},),
    ),
    Setup(
        "readout_names_input",
        "a readout pattern that matches the first layer",
        lambda n: mlp(n),
        {"readout": "^in$"},
        asks=r"\bin\b",
        remedies=({"readout": "^out$"},),
    ),
    Setup("mlp_plain", "an MLP in plain JAX", mlp),
    Setup("backbone", "a backbone without a head", no_readout, {"readout": None}),
    Setup(
        "backbone_not_said",
        "a backbone without a head",
        no_readout,
        asks="readout",
        remedies=({"readout": None},),
    ),
    Setup("two_ratios", "widths that grow by 4 and by 2", rectangular),
    Setup(
        "fixed_bottleneck",
        "a bottleneck of 16",
        one_fixed_width,
        {"readout": "^[bd]/kernel"},
    ),
    Setup(
        "fixed_bottleneck_not_named",
        "a bottleneck of 16",
        one_fixed_width,
        asks="[bd]/kernel",
        remedies=({"readout": "^[bd]/kernel"},),
    ),
    Setup("linear_model", "a readout alone", one_layer),
    Setup(
        "growing_inputs", "random features that grow with the network", growing_inputs
    ),
]
