"""State dictionaries of torch: kernels stand as (out, in, space)."""

from .kit import F, H, I, O, Setup, V

OUT_IN = {"layout": "out_in"}


def linear(path, a, b, kind=H, bias=True):
    tree = {f"{path}.weight": kind(b, a)}
    return tree | ({f"{path}.bias": (F if kind in (O, F) else V)(b)} if bias else {})


def norm(path, n):
    return {f"{path}.weight": V(n), f"{path}.bias": V(n)}


def mlp(n, bias=True):
    return (
        linear("fc1", 784, n, I, bias)
        | linear("fc2", n, n, H, bias)
        | linear("fc3", n, 10, O, bias)
    )


def mlp_square(n):
    """An MLP with as many inputs as classes: no shape tells the ends apart."""
    return linear("net.0", 10, n, I) | linear("net.2", n, n) | linear("net.4", n, 10, O)


def nanogpt(n, vocab=1000, tied=False, copies=1):
    tree = {
        "transformer.wte.weight": I(vocab, n, copies=copies),
        "transformer.wpe.weight": I(64, n),
    }
    for i in range(2):
        at = f"transformer.h.{i}"
        tree |= norm(f"{at}.ln_1", n) | norm(f"{at}.ln_2", n)
        tree |= linear(f"{at}.attn.c_attn", n, 3 * n) | linear(
            f"{at}.attn.c_proj", n, n
        )
        tree |= linear(f"{at}.mlp.c_fc", n, 4 * n) | linear(
            f"{at}.mlp.c_proj", 4 * n, n
        )
    tree |= norm("transformer.ln_f", n)
    return tree | ({} if tied else {"lm_head.weight": O(vocab, n, copies=copies)})


def hf_gpt2(n):
    """Hugging Face GPT-2 keeps Conv1D kernels as (in, out) amid torch's layout."""
    return {
        "wte.weight": I(1000, n),
        "wpe.weight": I(64, n),
        "h.0.attn.c_attn.weight": H(n, 3 * n),
        "h.0.attn.c_attn.bias": V(3 * n),
        "h.0.mlp.c_fc.weight": H(n, 4 * n),
        "h.0.mlp.c_fc.bias": V(4 * n),
        "h.0.mlp.c_proj.weight": H(4 * n, n),
        "h.0.mlp.c_proj.bias": V(n),
        "ln_f.weight": V(n),
        "ln_f.bias": V(n),
    }


def llama(n, embed="model.embed_tokens"):
    tree = {f"{embed}.weight": I(1000, n)}
    at = "model.layers.0"
    for name in ("q_proj", "o_proj"):
        tree[f"{at}.self_attn.{name}.weight"] = H(n, n)
    for name in ("k_proj", "v_proj"):
        tree[f"{at}.self_attn.{name}.weight"] = H(n // 4, n)
    tree |= {
        f"{at}.mlp.gate_proj.weight": H(3 * n, n),
        f"{at}.mlp.up_proj.weight": H(3 * n, n),
        f"{at}.mlp.down_proj.weight": H(n, 3 * n),
        f"{at}.input_layernorm.weight": V(n),
        f"{at}.post_attention_layernorm.weight": V(n),
        "model.norm.weight": V(n),
        "lm_head.weight": O(1000, n),
    }
    return tree


def timm_vit(n):
    tree = {
        "cls_token": V(1, 1, n),
        "pos_embed": V(1, 197, n),
        "patch_embed.proj.weight": I(n, 3, 16, 16),
        "patch_embed.proj.bias": V(n),
    }
    for i in range(2):
        at = f"blocks.{i}"
        tree |= norm(f"{at}.norm1", n) | norm(f"{at}.norm2", n)
        tree |= linear(f"{at}.attn.qkv", n, 3 * n) | linear(f"{at}.attn.proj", n, n)
        tree |= linear(f"{at}.mlp.fc1", n, 4 * n) | linear(f"{at}.mlp.fc2", 4 * n, n)
        tree |= {f"{at}.ls1.gamma": V(n), f"{at}.ls2.gamma": V(n)}
    return tree | norm("norm", n) | linear("head", n, 10, O)


def registers(n):
    return timm_vit(n) | {"reg_token": V(1, 4, n)}


def timm_swin(n):
    tree = {"patch_embed.proj.weight": I(n, 3, 4, 4), "patch_embed.proj.bias": V(n)}
    tree |= {"layers.0.blocks.0.attn.relative_position_bias_table": I(169, n // 32)}
    tree |= linear("layers.0.blocks.0.attn.qkv", n, 3 * n)
    tree |= linear("layers.0.downsample.reduction", 4 * n, 2 * n, bias=False)
    return tree | norm("norm", 2 * n) | linear("head", 2 * n, 10, O)


def resnet(n):
    tree = {"conv1.weight": I(n, 3, 7, 7)} | norm("bn1", n)
    a = n
    for stage in range(1, 4):
        b = n * 2 ** (stage - 1)
        at = f"layer{stage}.0"
        tree |= {
            f"{at}.conv1.weight": H(b, a, 3, 3),
            f"{at}.conv2.weight": H(b, b, 3, 3),
        }
        tree |= norm(f"{at}.bn1", b) | norm(f"{at}.bn2", b)
        if a != b:
            tree |= {f"{at}.downsample.0.weight": H(b, a, 1, 1)} | norm(
                f"{at}.downsample.1", b
            )
        a = b
    return tree | linear("fc", a, 1000, O)


def convnext(n):
    tree = {"stem.0.weight": I(n, 3, 4, 4), "stem.0.bias": V(n)} | norm("stem.1", n)
    at = "stages.0.blocks.0"
    tree |= {
        f"{at}.conv_dw.weight": I(n, 1, 7, 7),
        f"{at}.conv_dw.bias": V(n),
        f"{at}.gamma": V(n),
    }
    tree |= norm(f"{at}.norm", n) | linear(f"{at}.mlp.fc1", n, 4 * n)
    tree |= linear(f"{at}.mlp.fc2", 4 * n, n)
    return tree | norm("head.norm", n) | linear("head.fc", n, 1000, O)


def efficientnet(n):
    """timm: squeeze-and-excitation as 1x1 convolutions, whose width grows."""
    tree = {"conv_stem.weight": I(n, 3, 3, 3)} | norm("bn1", n)
    at = "blocks.0.0"
    tree |= {
        f"{at}.conv_pw.weight": H(6 * n, n, 1, 1),
        f"{at}.conv_dw.weight": I(6 * n, 1, 5, 5),
        f"{at}.se.conv_reduce.weight": H(n // 4, 6 * n, 1, 1),
        f"{at}.se.conv_reduce.bias": V(n // 4),
        f"{at}.se.conv_expand.weight": H(6 * n, n // 4, 1, 1),
        f"{at}.se.conv_expand.bias": V(6 * n),
        f"{at}.conv_pwl.weight": H(n, 6 * n, 1, 1),
    }
    return tree | linear("classifier", n, 1000, O)


def dcgan(n, bias=False):
    """ConvTranspose2d keeps (in, out, k, k): 100 latents in, 3 colours out."""
    tree = {"main.0.weight": I(100, 4 * n, 4, 4)} | norm("main.1", 4 * n)
    tree |= {"main.3.weight": H(4 * n, 2 * n, 4, 4)} | norm("main.4", 2 * n)
    tree |= {"main.6.weight": O(2 * n, 3, 4, 4)}
    if bias:
        tree |= {"main.0.bias": V(4 * n), "main.3.bias": V(2 * n), "main.6.bias": F(3)}
    return tree


DCGAN = {
    "axes": {r"main\.[036]\.weight$": ((0, 2, 3), (1,))},
    "readout": r"main\.6\.weight",
}


def deconv_decoder(n):
    """An autoencoder: convolutions down, transposed ones up, all with biases."""
    return {
        "enc.0.weight": I(n, 3, 4, 4),
        "enc.0.bias": V(n),
        "enc.2.weight": H(2 * n, n, 4, 4),
        "enc.2.bias": V(2 * n),
        "dec.0.weight": H(2 * n, n, 4, 4),
        "dec.0.bias": V(n),
        "dec.2.weight": O(n, 3, 4, 4),
        "dec.2.bias": F(3),
    }


DECONV = {
    "axes": {r"dec\.\d\.weight$": ((0, 2, 3), (1,))},
    "readout": r"dec\.2\.weight",
}


def deconv_ratios(n):
    """Widths that grow by different ratios: 4 in, 2 out, (in, out) or not matters."""
    k = 32 if n == 64 else 64
    return {
        "enc.weight": I(n, 3, 4, 4),
        "enc.bias": V(n),
        "dec.0.weight": H(n, k, 4, 4, out=2),
        "dec.0.bias": V(k, out=2),
        "dec.2.weight": O(k, 3, 4, 4, into=2),
        "dec.2.bias": F(3),
    }


def mha(n):
    at = "encoder.layers.0"
    tree = {
        f"{at}.self_attn.in_proj_weight": H(3 * n, n),
        f"{at}.self_attn.in_proj_bias": V(3 * n),
    }
    tree |= linear(f"{at}.self_attn.out_proj", n, n)
    tree |= linear(f"{at}.linear1", n, 4 * n) | linear(f"{at}.linear2", 4 * n, n)
    tree |= norm(f"{at}.norm1", n) | norm(f"{at}.norm2", n)
    return linear("embed_in", 20, n, I) | tree | linear("head", n, 5, O)


def bert(n):
    at = "bert.encoder.layer.0"
    tree = {
        "bert.embeddings.word_embeddings.weight": I(1000, n),
        "bert.embeddings.position_embeddings.weight": I(512, n),
        "bert.embeddings.token_type_embeddings.weight": I(2, n),
    } | norm("bert.embeddings.LayerNorm", n)
    for name in ("query", "key", "value"):
        tree |= linear(f"{at}.attention.self.{name}", n, n)
    tree |= linear(f"{at}.attention.output.dense", n, n)
    tree |= linear(f"{at}.intermediate.dense", n, 4 * n) | linear(
        f"{at}.output.dense", 4 * n, n
    )
    return tree | linear("bert.pooler.dense", n, n) | linear("classifier", n, 2, O)


def t5(n):
    """The bias table (32 buckets, heads) is an embedding in torch's layout too."""
    tree = {"shared.weight": I(1000, n), "lm_head.weight": O(1000, n)}
    for side in ("encoder", "decoder"):
        at = f"{side}.block.0.layer.0.SelfAttention"
        tree[f"{at}.relative_attention_bias.weight"] = I(32, n // 16)
        for name in ("q", "k", "v", "o"):
            tree[f"{at}.{name}.weight"] = H(n, n)
        tree[f"{side}.block.0.layer.1.DenseReluDense.wi.weight"] = H(4 * n, n)
        tree[f"{side}.block.0.layer.1.DenseReluDense.wo.weight"] = H(n, 4 * n)
        tree[f"{side}.final_layer_norm.weight"] = V(n)
    return tree


def tokens_and_queries(n):
    """DETR in torch: a table of queries (100, n), a class token, two heads."""
    return {
        "input_proj.weight": I(n, 256, 1, 1),
        "input_proj.bias": V(n),
        "query_embed.weight": I(100, n),
        "cls": V(1, n),
        "encoder.weight": H(n, n),
        "encoder.bias": V(n),
        "class_embed.weight": O(92, n),
        "class_embed.bias": F(92),
    }


def named_table(name):
    def tree(n):
        return {
            f"{name}.weight": I(1000, n),
            "fc.weight": H(n, n),
            "fc.bias": V(n),
            "head.weight": O(1000, n),
        }

    return tree


def rosinality(n):
    """stylegan2-pytorch: (1, out, in, k, k), a constant (1, n, 4, 4)."""
    return {
        "input.input": V(1, n, 4, 4),
        "conv1.conv.weight": H(1, n, n, 3, 3),
        "conv1.conv.modulation.weight": I(n, 512),
        "conv1.conv.modulation.bias": V(n),
        "conv1.activate.bias": V(n),
        "to_rgb.conv.weight": O(1, 3, n, 1, 1),
        "to_rgb.conv.modulation.weight": I(n, 512),
        "to_rgb.conv.modulation.bias": V(n),
        "to_rgb.bias": F(1, 3, 1, 1),
    }


ROSINALITY = {
    "axes": {
        r"^input\.input$": ((), (1,)),
        r"conv\.weight$": ((2, 3, 4), (1,)),
    },
    "readout": r"to_rgb\.conv\.weight",
}

TABLES = {"embeddings": r"\bw[tp]e\b"}


def gpt_padded(n, vocab):
    return nanogpt(n, vocab, copies=1024 / 1000)


def classes(n, c):
    """10 classes in the base, 100 in the target."""
    return mlp(n) | {"fc3.weight": O(c, n, copies=10), "fc3.bias": F(c, copies=10)}


def flat(name, tree, options=OUT_IN, **rest):
    return Setup(name, rest.pop("source"), tree, options, style="flat", **rest)


SETUPS = [
    flat("torch_mlp", mlp, source="a torch MLP"),
    flat(
        "torch_mlp_layout_not_said",
        mlp,
        {},
        source="a torch MLP: its biases tell that the first axis is out",
        asks="layout",
        either=True,
        remedies=(OUT_IN,),
    ),
    flat(
        "torch_mlp_unbiased",
        lambda n: mlp(n, bias=False),
        source="a torch MLP without biases",
    ),
    flat(
        "torch_backbone_unbiased_layout_not_said",
        lambda n: linear("fc1", 784, n, I, bias=False) | linear("fc2", n, n),
        {},
        source="a torch backbone: dotted names that end in weight tell",
        asks="layout|fc1",
        either=True,
        remedies=(OUT_IN | {"readout": None},),
    ),
    flat(
        "resnet_torch_backbone_layout_not_said",
        lambda n: {p: x for p, x in resnet(n).items() if not p.startswith("fc.")},
        {},
        source="torchvision without its head: no convolution has a bias",
        asks=r"layout|conv1\.weight",
        either=True,
        remedies=(OUT_IN | {"readout": None},),
    ),
    flat(
        "timm_vit_backbone",
        lambda n: {p: x for p, x in timm_vit(n).items() if not p.startswith("head.")},
        OUT_IN | {"embeddings": "cls_token|pos_embed"},
        source="timm with num_classes=0",
        asks="readout",
        either=True,
        remedies=({"readout": None}, {"readout": None, "tied": None}),
    ),
    flat("torch_mlp_square", mlp_square, source="10 inputs, 10 classes"),
    flat(
        "torch_mlp_square_layout_not_said",
        mlp_square,
        {},
        source="10 inputs, 10 classes: only the biases tell",
        asks="layout",
        either=True,
        remedies=(OUT_IN,),
    ),
    flat(
        "torch_layout_said_of_flax",
        lambda n: {
            "fc1.kernel": I(784, n),
            "fc1.bias": V(n),
            "fc2.kernel": H(n, n),
            "fc2.bias": V(n),
            "fc3.kernel": O(n, 10),
            "fc3.bias": F(10),
        },
        source="a Flax MLP of which torch's layout is said: the biases contradict",
        asks="layout|fc[13].kernel",
        remedies=({"layout": "in_out"},),
    ),
    flat("nanogpt_torch", nanogpt, OUT_IN | TABLES, source="karpathy/nanoGPT"),
    flat(
        "nanogpt_torch_not_named",
        nanogpt,
        source="karpathy/nanoGPT: wte (vocabulary, n) reads as a readout",
        asks="w[tp]e",
        either=True,
        remedies=(TABLES, TABLES | {"readout": "lm_head"}),
    ),
    flat(
        "nanogpt_torch_readout_named",
        nanogpt,
        OUT_IN | {"readout": "lm_head"},
        source="karpathy/nanoGPT: then wte and wpe are still to be named",
        asks="w[tp]e",
        either=True,
        remedies=(TABLES,),
    ),
    flat(
        "nanogpt_torch_layout_not_said",
        nanogpt,
        {},
        source="karpathy/nanoGPT: lm_head (vocabulary, n) reads as a table",
        asks="layout|lm_head",
        either=True,
        remedies=(OUT_IN | TABLES,),
    ),
    flat(
        "nanogpt_torch_tied",
        lambda n: nanogpt(n, tied=True),
        OUT_IN | TABLES | {"tied": r"\bwte\b"},
        source="karpathy/nanoGPT, tied",
    ),
    flat(
        "nanogpt_torch_tied_not_named",
        lambda n: nanogpt(n, tied=True),
        OUT_IN | TABLES,
        source="karpathy/nanoGPT, tied",
        asks="wte",
        remedies=({"tied": r"\bwte\b"},),
    ),
    flat(
        "nanogpt_torch_tied_nothing_named",
        lambda n: nanogpt(n, tied=True),
        source="karpathy/nanoGPT, tied: both tables read as readouts",
        asks="wte",
        remedies=(TABLES | {"tied": r"\bwte\b"},),
    ),
    flat(
        "nanogpt_torch_padded",
        gpt_padded,
        OUT_IN | {"embeddings": r"\bw[tp]e\b"},
        source="karpathy/nanoGPT: the target's vocabulary is padded from 1000 to 1024",
        grow={"vocab": (1000, 1024)},
        asks="wte|lm_head",
        either=True,
        remedies=({"fractional": True, "axes": {"lm_head": ((1,), ())}},),
    ),
    flat(
        "hf_gpt2_torch",
        hf_gpt2,
        {"tied": r"^wte", "layout": "in_out"},
        source="Hugging Face GPT-2 in torch: Conv1D kernels (in, out)",
    ),
    flat(
        "llama_torch",
        llama,
        OUT_IN | {"embeddings": "embed_tokens"},
        source="Hugging Face Llama",
    ),
    flat("llama_torch_plain", llama, source="Hugging Face Llama: the name says it"),
    flat(
        "llama_torch_meta",
        lambda n: llama(n, "tok_embeddings"),
        source="meta-llama: tok_embeddings",
        asks="tok_embeddings",
        either=True,
        remedies=({"embeddings": "tok_embeddings"},),
    ),
    flat(
        "llama_torch_layout_not_said",
        llama,
        {},
        source="Hugging Face Llama without biases: no parameter reads out",
        asks="layout|lm_head",
        either=True,
        remedies=(OUT_IN | {"embeddings": "embed_tokens"},),
    ),
    *[
        flat(
            f"table_named_{name}",
            named_table(name),
            source=f"a torch table named {name}",
            asks=rf"\b{name}",
            either=True,
            remedies=({"embeddings": rf"^{name}\."},),
        )
        for name in ("tok_emb", "emb", "token_embedding_table", "E", "wte", "lut")
    ],
    flat(
        "timm_vit_named",
        timm_vit,
        OUT_IN | {"embeddings": "cls_token|pos_embed"},
        source="timm",
    ),
    flat(
        "timm_vit",
        timm_vit,
        source="timm: cls_token (1, 1, n) reads as a readout",
        asks="cls_token|pos_embed",
        either=True,
        remedies=(
            {"embeddings": "cls_token|pos_embed"},
            {"axes": {"cls_token|pos_embed": ((), (2,))}},
        ),
    ),
    flat(
        "timm_vit_registers",
        registers,
        source="timm with registers",
        asks="cls_token|pos_embed|reg_token",
        either=True,
        remedies=({"axes": {"cls_token|pos_embed|reg_token": ((), (2,))}},),
    ),
    flat(
        "timm_swin",
        timm_swin,
        source="timm: (169, heads) is looked up; patches of 4n are joined from four",
        asks=r"relative_position_bias_table|reduction\.weight",
        either=True,
        remedies=(
            {
                "embeddings": "relative_position_bias_table",
                "axes": {r"reduction\.weight$": ((1,), (0,))},
            },
        ),
    ),
    flat("resnet_torch", resnet, source="torchvision"),
    flat("convnext_torch", convnext, source="timm"),
    flat("efficientnet_torch", efficientnet, source="timm"),
    flat("dcgan_torch_named", dcgan, OUT_IN | DCGAN, source="pytorch/examples dcgan"),
    flat(
        "dcgan_torch_readout_named",
        dcgan,
        OUT_IN | {"readout": r"^main\.6"},
        source="pytorch/examples dcgan: main.6 reads as a first layer",
        asks=r"main\.[036]",
        remedies=(DCGAN,),
    ),
    flat(
        "dcgan_torch_biased",
        lambda n: dcgan(n, bias=True),
        source="a DCGAN with biases, which tell which axis is out",
        asks=r"main\.[036]\.weight",
        either=True,
        remedies=(DCGAN,),
    ),
    flat(
        "deconv_torch_named",
        deconv_decoder,
        OUT_IN | DECONV,
        source="a torch autoencoder",
    ),
    flat(
        "deconv_torch",
        deconv_decoder,
        source="a torch autoencoder: the bias (3,) tells what dec.2 gives",
        asks=r"dec\.2\.weight",
        either=True,
        remedies=(DECONV,),
    ),
    flat(
        "deconv_torch_ratios",
        deconv_ratios,
        source="a torch decoder whose widths grow by 4 and 2",
        asks=r"dec\.[02]\.weight",
        either=True,
        remedies=(DECONV,),
    ),
    flat("mha_torch", mha, source="torch.nn.TransformerEncoderLayer"),
    flat(
        "bert_torch_named",
        bert,
        OUT_IN | {"embeddings": r"_embeddings\.weight"},
        source="Hugging Face BERT",
    ),
    flat(
        "bert_torch",
        bert,
        source="Hugging Face BERT: names say embeddings",
        asks="position_embeddings",
        either=True,
        remedies=({"embeddings": r"_embeddings\.weight"},),
    ),
    flat(
        "t5_torch_named",
        t5,
        OUT_IN | {"embeddings": "shared|relative_attention_bias"},
        source="Hugging Face T5",
    ),
    flat(
        "t5_torch_forgets_bias_table",
        t5,
        OUT_IN | {"embeddings": "shared"},
        source="Hugging Face T5",
        asks="relative_attention_bias",
        either=True,
        remedies=({"embeddings": "shared|relative_attention_bias"},),
    ),
    flat(
        "t5_torch_not_named",
        t5,
        source="Hugging Face T5",
        asks="shared|relative_attention_bias",
        either=True,
        remedies=({"embeddings": "shared|relative_attention_bias"},),
    ),
    flat(
        "detr_torch_named",
        tokens_and_queries,
        OUT_IN
        | {"embeddings": "query_embed|^cls$", "readout": "class_embed", "tied": None},
        source="facebookresearch/detr",
    ),
    flat(
        "detr_torch",
        tokens_and_queries,
        source="facebookresearch/detr: class_embed is a head, query_embed a table",
        asks="class_embed|query_embed|cls",
        either=True,
        remedies=(
            {"embeddings": "query_embed|^cls$", "readout": "class_embed", "tied": None},
        ),
    ),
    flat(
        "stylegan2_torch",
        rosinality,
        OUT_IN | ROSINALITY,
        source="rosinality/stylegan2-pytorch",
    ),
    flat(
        "stylegan2_torch_not_named",
        rosinality,
        source="rosinality/stylegan2-pytorch: kernels (1, out, in, k, k)",
        asks=r"input\.input|conv\.weight",
        remedies=(ROSINALITY,),
    ),
    flat(
        "more_classes_torch",
        classes,
        source="10 classes in the base, 100 in the target",
        grow={"c": (10, 100)},
        asks=r"fc3\.weight",
        either=True,
        remedies=({"axes": {r"^fc3\.weight$": ((1,), ()), r"^fc3\.bias$": ((), ())}},),
    ),
]
