"""Transformers: GPT, BERT, T5, ViT, DETR, Perceiver and their kin."""

from .kit import F, H, I, O, Setup, V

VOCAB = 1000
BLOCKS = {"L": (2, 8)}
DEEP = {"depth": (2, 8)}
SAME = {"L": (2, 2)}


def norm(path, n):
    return {f"{path}/scale": V(n), f"{path}/bias": V(n)}


def dense(path, a, b):
    return {f"{path}/kernel": H(a, b), f"{path}/bias": V(b)}


def attention(path, n):
    """Flax's MultiHeadDotProductAttention, heads of 16, of which more are added."""
    heads = n // 16
    tree = {}
    for name in ("query", "key", "value"):
        tree |= {
            f"{path}/{name}/kernel": H(n, heads, 16),
            f"{path}/{name}/bias": V(heads, 16),
        }
    return tree | {f"{path}/out/kernel": H(heads, 16, n), f"{path}/out/bias": V(n)}


def flax_block(path, n):
    return (
        norm(f"{path}/LayerNorm_0", n)
        | attention(f"{path}/MultiHeadDotProductAttention_0", n)
        | norm(f"{path}/LayerNorm_1", n)
        | dense(f"{path}/MlpBlock_0/Dense_0", n, 4 * n)
        | dense(f"{path}/MlpBlock_0/Dense_1", 4 * n, n)
    )


def layers(count, block, path, n):
    tree = {}
    for i in range(count):
        tree |= block(path.format(i), n)
    return tree


def gpt2_block(path, n):
    """Kernels (in, out), as Flax GPT-2 and nanoGPT ports in JAX keep them."""
    return (
        norm(f"{path}/ln_1", n)
        | {
            f"{path}/attn/c_attn/kernel": H(n, 3 * n),
            f"{path}/attn/c_attn/bias": V(3 * n),
        }
        | dense(f"{path}/attn/c_proj", n, n)
        | norm(f"{path}/ln_2", n)
        | dense(f"{path}/mlp/c_fc", n, 4 * n)
        | dense(f"{path}/mlp/c_proj", 4 * n, n)
    )


def gpt2(n, L=2, head=True):
    tree = {"wte/embedding": I(VOCAB, n), "wpe/embedding": I(128, n)}
    tree |= layers(L, gpt2_block, "h/{}", n) | norm("ln_f", n)
    return tree | ({"lm_head/kernel": O(n, VOCAB)} if head else {})


def llama_block(path, n):
    return {
        f"{path}/attention_norm/kernel": V(n),
        f"{path}/attention/wq/kernel": H(n, n),
        f"{path}/attention/wk/kernel": H(n, n // 4),
        f"{path}/attention/wv/kernel": H(n, n // 4),
        f"{path}/attention/wo/kernel": H(n, n),
        f"{path}/ffn_norm/kernel": V(n),
        f"{path}/feed_forward/w1/kernel": H(n, 3 * n),
        f"{path}/feed_forward/w2/kernel": H(3 * n, n),
        f"{path}/feed_forward/w3/kernel": H(n, 3 * n),
    }


def llama(n, L=2):
    return (
        {"transformer/wte/embedding": I(VOCAB, n)}
        | layers(L, llama_block, "transformer/h/{}", n)
        | {"transformer/ln_f/kernel": V(n), "lm_head/kernel": O(n, VOCAB)}
    )


def nanodo_block(path, n):
    heads = n // 16
    tree = {f"{path}/LayerNorm_0/scale": V(n), f"{path}/LayerNorm_1/scale": V(n)}
    for name in ("query", "key", "value"):
        tree[f"{path}/CausalAttn_0/{name}/kernel"] = H(n, heads, 16)
    return tree | {
        f"{path}/CausalAttn_0/attn_out_proj/kernel": H(heads, 16, n),
        f"{path}/Mlp_0/Dense_0/kernel": H(n, 4 * n),
        f"{path}/Mlp_0/Dense_1/kernel": H(4 * n, n),
    }


def nanodo(n, L=2):
    """Tied: the logits are `embed.attend(x)`, so there is no other readout."""
    return (
        {"embed/embedding": I(VOCAB, n), "pos_embed/embedding": I(64, n)}
        | layers(L, nanodo_block, "blocks_{}", n)
        | {"out_ln/scale": V(n)}
    )


def vit(n, L=2, classes=10, head="head"):
    return (
        {
            "embedding/kernel": I(16, 16, 3, n),
            "embedding/bias": V(n),
            "cls": V(1, 1, n),
            "Transformer/posembed_input/pos_embedding": V(1, 197, n),
        }
        | layers(L, flax_block, "Transformer/encoderblock_{}", n)
        | norm("Transformer/encoder_norm", n)
        | {f"{head}/kernel": O(n, classes), f"{head}/bias": F(classes)}
    )


def stacked_vit(n, L):
    """big_vision with `scan=True`: one tree, a leading axis of layers."""
    heads = n // 16
    at = "Transformer/encoderblock"
    tree = {
        "embedding/kernel": I(16, 16, 3, n),
        "embedding/bias": V(n),
        "pos_embedding": V(1, 196, n),
        f"{at}/LayerNorm_0/scale": V(L, n),
        f"{at}/LayerNorm_0/bias": V(L, n),
        f"{at}/LayerNorm_1/scale": V(L, n),
        f"{at}/LayerNorm_1/bias": V(L, n),
        f"{at}/MlpBlock_0/Dense_0/kernel": H(L, n, 4 * n),
        f"{at}/MlpBlock_0/Dense_0/bias": V(L, 4 * n),
        f"{at}/MlpBlock_0/Dense_1/kernel": H(L, 4 * n, n),
        f"{at}/MlpBlock_0/Dense_1/bias": V(L, n),
    }
    for name in ("query", "key", "value"):
        tree[f"{at}/MultiHeadDotProductAttention_0/{name}/kernel"] = H(L, n, heads, 16)
        tree[f"{at}/MultiHeadDotProductAttention_0/{name}/bias"] = V(L, heads, 16)
    tree[f"{at}/MultiHeadDotProductAttention_0/out/kernel"] = H(L, heads, 16, n)
    tree[f"{at}/MultiHeadDotProductAttention_0/out/bias"] = V(L, n)
    return (
        tree
        | norm("Transformer/encoder_norm", n)
        | {
            "head/kernel": O(n, 10),
            "head/bias": F(10),
        }
    )


def bert(n, L=2):
    """Hugging Face's FlaxBert for classification."""

    def block(path, n):
        tree = {}
        for name in ("query", "key", "value"):
            tree |= dense(f"{path}/attention/self/{name}", n, n)
        return (
            tree
            | dense(f"{path}/attention/output/dense", n, n)
            | norm(f"{path}/attention/output/LayerNorm", n)
            | dense(f"{path}/intermediate/dense", n, 4 * n)
            | dense(f"{path}/output/dense", 4 * n, n)
            | norm(f"{path}/output/LayerNorm", n)
        )

    return (
        {
            "bert/embeddings/word_embeddings/embedding": I(VOCAB, n),
            "bert/embeddings/position_embeddings/embedding": I(128, n),
            "bert/embeddings/token_type_embeddings/embedding": I(2, n),
        }
        | norm("bert/embeddings/LayerNorm", n)
        | layers(L, block, "bert/encoder/layer/{}", n)
        | dense("bert/pooler/dense", n, n)
        | {"classifier/kernel": O(n, 3), "classifier/bias": F(3)}
    )


def bert_mlm(n):
    """The decoder is the word table, its bias has an entry for every word."""
    tree = {
        path: leaf
        for path, leaf in bert(n).items()
        if not path.startswith("classifier")
    }
    return (
        tree
        | dense("cls/predictions/transform/dense", n, n)
        | norm("cls/predictions/transform/LayerNorm", n)
        | {"cls/predictions/bias": F(VOCAB)}
    )


def t5x(n, L=2, tied=False):
    """T5X's minimal T5: 2-D kernels, heads of 16, rel_embedding (heads, buckets)."""

    def attn(path, n):
        return {f"{path}/{k}/kernel": H(n, n) for k in ("query", "key", "value", "out")}

    def mlp(path, n):
        return {
            f"{path}/wi_0/kernel": H(n, 2 * n),
            f"{path}/wi_1/kernel": H(n, 2 * n),
            f"{path}/wo/kernel": H(2 * n, n),
        }

    def encoder(path, n):
        return (
            attn(f"{path}/attention", n)
            | mlp(f"{path}/mlp", n)
            | {
                f"{path}/pre_attention_layer_norm/scale": V(n),
                f"{path}/pre_mlp_layer_norm/scale": V(n),
            }
        )

    def decoder(path, n):
        return (
            attn(f"{path}/self_attention", n)
            | attn(f"{path}/encoder_decoder_attention", n)
            | mlp(f"{path}/mlp", n)
            | {
                f"{path}/pre_self_attention_layer_norm/scale": V(n),
                f"{path}/pre_cross_attention_layer_norm/scale": V(n),
                f"{path}/pre_mlp_layer_norm/scale": V(n),
            }
        )

    return (
        {
            "token_embedder/embedding": I(VOCAB, n),
            # a bias of the logits for every head: looked up, summed over nothing
            "encoder/relpos_bias/rel_embedding": V(n // 16, 32),
            "decoder/relpos_bias/rel_embedding": V(n // 16, 32),
            "encoder/encoder_norm/scale": V(n),
            "decoder/decoder_norm/scale": V(n),
        }
        | layers(L, encoder, "encoder/layers_{}", n)
        | layers(L, decoder, "decoder/layers_{}", n)
        | ({} if tied else {"decoder/logits_dense/kernel": O(n, VOCAB)})
    )


REL = {r"rel_embedding$": ((), (0, 1))}


def detr(n, L=2):
    return (
        {
            "backbone_proj/kernel": I(1, 1, 128, n),
            "backbone_proj/bias": V(n),
            "query_embed/embedding": I(100, n),
            "row_embed": I(50, n, out=4),
        }
        | layers(L, flax_block, "decoder/layers_{}", n)
        | norm("decoder/norm", n)
        | {"class_embed/kernel": O(n, 92), "class_embed/bias": F(92)}
        | dense("bbox_embed/layers_0", n, n)
        | {"bbox_embed/layers_1/kernel": O(n, 4), "bbox_embed/layers_1/bias": F(4)}
    )


def perceiver(n):
    """Latents (count, n) attend to inputs of a fixed number of channels."""
    return (
        {
            "latents": I(32, n),
            "input_proj/kernel": I(261, n),
            "input_proj/bias": V(n),
        }
        | flax_block("cross", n)
        | flax_block("self", n)
        | {"decoder_query": V(1, n), "head/kernel": O(n, 10), "head/bias": F(10)}
    )


def mixer(n, L=2):
    """Tokens (49) and their hidden width stay; channels grow."""

    def block(path, n):
        return (
            norm(f"{path}/LayerNorm_0", n)
            | {
                f"{path}/token_mixing/Dense_0/kernel": F(49, 96),
                f"{path}/token_mixing/Dense_0/bias": F(96),
                f"{path}/token_mixing/Dense_1/kernel": F(96, 49),
                f"{path}/token_mixing/Dense_1/bias": F(49),
            }
            | norm(f"{path}/LayerNorm_1", n)
            | dense(f"{path}/channel_mixing/Dense_0", n, 4 * n)
            | dense(f"{path}/channel_mixing/Dense_1", 4 * n, n)
        )

    return (
        {"stem/kernel": I(16, 16, 3, n), "stem/bias": V(n)}
        | layers(L, block, "MixerBlock_{}", n)
        | norm("pre_head_layer_norm", n)
        | {"head/kernel": O(n, 10), "head/bias": F(10)}
    )


def mixer_tokens(n):
    """The hidden width of the token mixing grows too, the tokens do not."""
    tree = mixer(n)
    for i in range(2):
        at = f"MixerBlock_{i}/token_mixing"
        tree |= {
            f"{at}/Dense_0/kernel": I(49, 2 * n),
            f"{at}/Dense_0/bias": V(2 * n),
            # Sums over the hidden width and gives 49 tokens: like a readout.
            f"{at}/Dense_1/kernel": O(2 * n, 49),
            f"{at}/Dense_1/bias": F(49),
        }
    return tree


def retnet(n, L=2):
    def block(path, n):
        return (
            {
                f"{path}/retention/{name}_proj/kernel": H(n, n)
                for name in ("q", "k", "v", "g", "out")
            }
            | {f"{path}/retention/group_norm/scale": V(n)}
            | norm(f"{path}/ln1", n)
            | norm(f"{path}/ln2", n)
            | dense(f"{path}/ffn/fc1", n, 2 * n)
            | dense(f"{path}/ffn/fc2", 2 * n, n)
        )

    return (
        {"embed_tokens/embedding": I(VOCAB, n)}
        | layers(L, block, "layers_{}", n)
        | norm("layer_norm", n)
        | {"output_projection/kernel": O(n, VOCAB)}
    )


def decision_transformer(n, L=2):
    """States, actions and returns go in; three heads come out."""
    return (
        {
            "embed_timestep/embedding": I(1000, n),
            "embed_return/kernel": I(1, n),
            "embed_state/kernel": I(17, n),
            "embed_action/kernel": I(6, n),
        }
        | layers(L, gpt2_block, "transformer/h/{}", n)
        | norm("transformer/ln_f", n)
        | {
            "predict_state/kernel": O(n, 17),
            "predict_action/kernel": O(n, 6),
            "predict_return/kernel": O(n, 1),
        }
    )


def clip(n):
    """Both towers project into one space, which grows or not."""
    return (
        {
            "text_model/token_embedding/embedding": I(VOCAB, n),
            "text_model/position_embedding/embedding": I(77, n),
            "vision_model/class_embedding": V(n),
            "vision_model/patch_embedding/kernel": I(16, 16, 3, n),
            "vision_model/position_embedding/embedding": I(50, n),
        }
        | flax_block("text_model/layers_0", n)
        | flax_block("vision_model/layers_0", n)
        | {
            "text_projection/kernel": O(n, 128),
            "visual_projection/kernel": O(n, 128),
            "logit_scale": F(),
        }
    )


SETUPS = [
    Setup("gpt2_untied", "nanoGPT in Flax", gpt2),
    Setup(
        "gpt2_deeper",
        "nanoGPT in Flax",
        gpt2,
        DEEP | {"branch": r"^h/\d+/"},
        grow=BLOCKS,
    ),
    Setup(
        "gpt2_tied_named",
        "Hugging Face FlaxGPT2",
        lambda n: gpt2(n, head=False),
        {"tied": r"^wte/"},
    ),
    Setup(
        "gpt2_tied_not_named",
        "Hugging Face FlaxGPT2: no parameter looks like a readout",
        lambda n: gpt2(n, head=False),
        asks=r"wte",
        remedies=({"tied": r"^wte/"}, {"tied": r"wte", "readout": None}),
    ),
    Setup(
        "gpt2_tied_deeper",
        "Hugging Face FlaxGPT2",
        lambda n, L: gpt2(n, L, head=False),
        DEEP | {"branch": r"^h/", "tied": r"^wte/"},
        grow=BLOCKS,
    ),
    Setup("llama", "EasyLM llama", llama),
    Setup("llama_deeper", "EasyLM llama", llama, DEEP | {"branch": "/h/"}, grow=BLOCKS),
    Setup("nanodo_tied", "nanodo model.py", nanodo, {"tied": r"^embed/"}),
    Setup(
        "nanodo_tied_deeper",
        "nanodo model.py",
        nanodo,
        DEEP | {"tied": r"^embed/", "branch": r"^blocks_\d+/"},
        grow=BLOCKS,
    ),
    Setup(
        "nanodo_forgets_tied",
        "nanodo model.py",
        nanodo,
        asks=r"embed/embedding",
        remedies=({"tied": r"^embed/"},),
    ),
    Setup("vit", "google-research/vision_transformer", vit),
    Setup(
        "vit_deeper",
        "google-research/vision_transformer",
        vit,
        DEEP | {"branch": r"encoderblock_\d+"},
        grow=BLOCKS,
    ),
    Setup(
        "vit_thousand_classes",
        "google-research/vision_transformer",
        lambda n: vit(n, classes=1000),
    ),
    Setup(
        "vit_more_classes",
        "google-research/vision_transformer; classes are not a width",
        lambda n, c: (
            vit(n, classes=c)
            | {"head/kernel": O(n, c, copies=10), "head/bias": F(c, copies=10)}
        ),
        grow={"c": (10, 100)},
        asks="head/kernel",
        either=True,
        remedies=({"axes": {r"^head/kernel$": ((0,), ()), r"^head/bias$": ((), ())}},),
    ),
    Setup(
        "vit_scanned",
        "big_vision vit.py with scan",
        stacked_vit,
        DEEP | {"branch": "encoderblock"},
        grow=BLOCKS,
    ),
    Setup(
        "vit_scanned_same_depth",
        "big_vision vit.py with scan",
        stacked_vit,
        {"depth": (2, 2), "branch": "encoderblock"},
        grow=SAME,
    ),
    Setup(
        "vit_scanned_deeper_not_said",
        "big_vision vit.py with scan: an axis of layers grows",
        stacked_vit,
        grow=BLOCKS,
        asks="encoderblock",
        remedies=(DEEP | {"branch": "encoderblock"},),
    ),
    Setup(
        "vit_scanned_same_depth_not_said",
        "big_vision vit.py with scan; fan-ins of 2·n and n grow alike",
        stacked_vit,
        grow=SAME,
        asks="encoderblock",
        either=True,
        remedies=({"depth": (2, 2), "branch": "encoderblock"},),
    ),
    Setup("bert_classifier", "Hugging Face FlaxBert", bert),
    Setup(
        "bert_classifier_deeper",
        "Hugging Face FlaxBert",
        bert,
        DEEP | {"branch": r"encoder/layer/"},
        grow=BLOCKS,
    ),
    Setup(
        "bert_masked_tied",
        "Hugging Face FlaxBert",
        bert_mlm,
        {"tied": "word_embeddings"},
    ),
    Setup(
        "bert_masked_forgets_tied",
        "Hugging Face FlaxBert",
        bert_mlm,
        asks="word_embeddings",
        remedies=({"tied": "word_embeddings"},),
    ),
    Setup(
        "t5x_untied_named",
        "t5x examples/t5",
        t5x,
        {"readout": r"logits_dense", "axes": REL},
    ),
    Setup(
        "t5x_untied_plain",
        "t5x examples/t5: rel_embedding (heads, 32) looks like a readout",
        t5x,
        asks="rel_embedding",
        either=True,
        remedies=(
            {"axes": REL},
            {"readout": r"logits_dense", "axes": REL},
        ),
    ),
    Setup(
        "t5x_tied",
        "t5x examples/t5, logits_via_embedding",
        lambda n: t5x(n, tied=True),
        {"tied": "token_embedder", "axes": REL},
    ),
    Setup(
        "t5x_tied_not_named",
        "t5x examples/t5, logits_via_embedding: rel_embedding is no readout",
        lambda n: t5x(n, tied=True),
        asks="token_embedder|rel_embedding",
        remedies=({"tied": "token_embedder", "axes": REL},),
    ),
    Setup(
        "t5x_tied_named_rel_not",
        "t5x examples/t5, logits_via_embedding",
        lambda n: t5x(n, tied=True),
        {"tied": "token_embedder"},
        asks="rel_embedding",
        either=True,
        remedies=({"axes": REL},),
    ),
    Setup(
        "t5x_deeper",
        "t5x examples/t5",
        t5x,
        DEEP | {"branch": r"layers_\d+/", "readout": "logits_dense", "axes": REL},
        grow=BLOCKS,
    ),
    Setup(
        "t5x_fixed_heads",
        "t5x examples/t5: heads are fixed, so the bias table is too",
        lambda n: {
            path: F(8, 32) if "rel_embedding" in path else leaf
            for path, leaf in t5x(n).items()
        },
    ),
    Setup(
        "detr",
        "google-research/scenic DETR: two heads",
        detr,
        {"readout": r"class_embed|bbox_embed/layers_1"},
    ),
    Setup(
        "detr_not_named",
        "google-research/scenic DETR: two heads",
        detr,
        asks=r"class_embed|bbox_embed/layers_1",
        remedies=({"readout": r"class_embed|bbox_embed/layers_1"},),
    ),
    Setup("perceiver", "deepmind perceiver in Flax", perceiver),
    Setup("mixer", "google-research MlpMixer", mixer),
    Setup(
        "mixer_deeper",
        "google-research MlpMixer",
        mixer,
        DEEP | {"branch": r"MixerBlock_\d+"},
        grow=BLOCKS,
    ),
    Setup(
        "mixer_token_width_grows",
        "google-research MlpMixer: the token mixing ends in a fixed number of tokens",
        mixer_tokens,
        {"readout": r"^head|token_mixing/Dense_1"},
    ),
    Setup(
        "mixer_token_width_grows_not_named",
        "google-research MlpMixer",
        mixer_tokens,
        asks=r"token_mixing/Dense_1",
        remedies=({"readout": r"^head|token_mixing/Dense_1"},),
    ),
    Setup("retnet", "torchscale RetNet in Flax", retnet),
    Setup(
        "decision_transformer",
        "Hugging Face decision transformer",
        decision_transformer,
        {"readout": "predict_"},
    ),
    Setup(
        "decision_transformer_not_named",
        "Hugging Face decision transformer",
        decision_transformer,
        asks="predict_(state|action|return)",
        remedies=({"readout": "predict_"},),
    ),
    Setup(
        "clip",
        "Hugging Face FlaxCLIP",
        clip,
        {"readout": r"^(text|visual)_projection"},
    ),
    Setup(
        "clip_not_named",
        "Hugging Face FlaxCLIP",
        clip,
        asks=r"(text|visual)_projection",
        remedies=({"readout": r"^(text|visual)_projection"},),
    ),
]
