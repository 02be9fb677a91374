"""Generative models: U-Nets, VAEs, codebooks, GANs, diffusion transformers, fields."""

from .kit import F, H, I, O, Setup, V


def conv(path, k, a, b, kind=H):
    return {
        f"{path}/kernel": kind(k, k, a, b),
        f"{path}/bias": (F if kind is O else V)(b),
    }


def dense(path, a, b, kind=H):
    return {
        f"{path}/kernel": kind(a, b),
        f"{path}/bias": (F if kind in (O, F) else V)(b),
    }


def norm(path, n):
    return {f"{path}/scale": V(n), f"{path}/bias": V(n)}


def res_block(path, a, b, t):
    tree = norm(f"{path}/norm1", a) | conv(f"{path}/conv1", 3, a, b)
    tree |= dense(f"{path}/time_emb_proj", t, b)
    tree |= norm(f"{path}/norm2", b) | conv(f"{path}/conv2", 3, b, b)
    return tree | (conv(f"{path}/conv_shortcut", 1, a, b) if a != b else {})


def unet(n, fixed_time=False):
    """Skips are concatenated: every channel of a fan-in grows with n."""
    t = 4 * n
    tree = conv("conv_in", 3, 3, n, I)
    # Sinusoids of n frequencies are a width; 256 of them are not.
    tree |= dense(
        "time_embedding/linear_1", 256 if fixed_time else n, t, I if fixed_time else H
    )
    tree |= dense("time_embedding/linear_2", t, t)
    tree |= res_block("down_blocks_0/resnets_0", n, n, t)
    tree |= conv("down_blocks_0/downsamplers_0/conv", 3, n, n)
    tree |= res_block("down_blocks_1/resnets_0", n, 2 * n, t)
    tree |= res_block("mid_block/resnets_0", 2 * n, 2 * n, t)
    tree |= res_block("up_blocks_0/resnets_0", 4 * n, 2 * n, t)
    tree |= res_block("up_blocks_1/resnets_0", 3 * n, n, t)
    return tree | norm("conv_norm_out", n) | conv("conv_out", 3, n, 3, O)


def unet_text(n):
    """Stable Diffusion: keys and values of 768 channels of text, which stay."""
    at = "down_blocks_0/attentions_0/transformer_blocks_0"
    tree = unet(n) | norm("down_blocks_0/attentions_0/norm", n)
    tree |= conv("down_blocks_0/attentions_0/proj_in", 1, n, n)
    for name in ("to_q", "to_k", "to_v", "to_out_0"):
        tree[f"{at}/attn1/{name}/kernel"] = H(n, n)
    tree |= {
        f"{at}/attn2/to_q/kernel": H(n, n),
        f"{at}/attn2/to_k/kernel": I(768, n),
        f"{at}/attn2/to_v/kernel": I(768, n),
        f"{at}/attn2/to_out_0/kernel": H(n, n),
    }
    # GEGLU: one kernel for values and gates.
    return (
        tree
        | dense(f"{at}/ff/net_0/proj", n, 8 * n)
        | dense(f"{at}/ff/net_2", 4 * n, n)
    )


def unet_classes(n):
    return unet(n) | {"class_embedding/embedding": I(10, 4 * n)}


def unet_segmentation(n):
    tree = conv("enc1", 3, 1, n, I) | conv("enc2", 3, n, 2 * n)
    tree |= conv("up", 2, 2 * n, n) | conv("dec", 3, 2 * n, n)
    return tree | conv("final", 1, n, 2, O)


def vae(n, latents=20, growing=False):
    kind, up = (H, H) if growing else (O, I)
    tree = dense("encoder/fc1", 784, n, I)
    tree |= {
        "encoder/fc2_mean/kernel": kind(n, latents),
        "encoder/fc2_logvar/kernel": kind(n, latents),
    }
    bias = V if growing else F
    tree |= {
        "encoder/fc2_mean/bias": bias(latents),
        "encoder/fc2_logvar/bias": bias(latents),
    }
    return tree | dense("decoder/fc1", latents, n, up) | dense("decoder/fc2", n, 784, O)


def conv_vae(n):
    """Stable Diffusion's autoencoder: 8 moments come out, 4 latents go in."""
    tree = conv("encoder/conv_in", 3, 3, n, I) | conv("encoder/mid", 3, n, n)
    tree |= conv("encoder/conv_out", 3, n, 8, O) | conv("quant_conv", 1, 8, 8, F)
    tree |= {"quant_conv/bias": F(8)}
    tree |= conv("decoder/conv_in", 3, 4, n, I) | conv("decoder/mid", 3, n, n)
    return tree | conv("decoder/conv_out", 3, n, 3, O)


def autoencoder(n):
    tree = dense("encoder/Dense_0", 784, 2 * n, I) | dense("encoder/Dense_1", 2 * n, n)
    return (
        tree
        | dense("decoder/Dense_0", n, 2 * n)
        | dense("decoder/Dense_1", 2 * n, 784, O)
    )


def vqvae(n, dim="grows", rows="entries", entries=512):
    """A code is looked up and compared: nothing is summed over the entries."""
    d = n if dim == "grows" else 32
    if dim == "fixed":
        code = F(entries, d)
    else:
        code = I(entries, d) if rows == "entries" else V(d, entries)
    tree = conv("encoder/conv_in", 4, 3, n, I) | conv("encoder/mid", 3, n, n)
    tree |= conv("encoder/out", 1, n, d, H if dim == "grows" else O)
    tree |= {"quantizer/codebook": code}
    tree |= conv("decoder/conv_in", 3, d, n, H if dim == "grows" else I)
    return tree | conv("decoder/conv_out", 4, n, 3, O)


def vqvae_more(n, k):
    tree = vqvae(n)
    return tree | {"quantizer/codebook": I(k, n, copies=4)}


def residual_vq(n):
    """SoundStream: 8 codebooks of 512 codes; 1-D convolutions."""
    return {
        "encoder/in/kernel": I(7, 1, n),
        "encoder/mid/kernel": H(7, n, n),
        "rvq/codebooks": I(8, 512, n),
        "decoder/mid/kernel": H(7, n, n),
        "decoder/out/kernel": O(7, n, 1),
    }


def low_dim_vq(n):
    """ViT-VQGAN: codes of 32, projections in and out."""
    tree = dense("patch", 192, n, I) | dense("enc", n, n) | dense("pre_quant", n, 32, O)
    tree |= {"codebook/embedding": F(8192, 32)}
    return (
        tree
        | dense("post_quant", 32, n, I)
        | dense("dec", n, n)
        | dense("to_pixel", n, 192, O)
    )


def gan(n):
    tree = dense("generator/Dense_0", 64, 49 * n, I)
    tree |= conv("generator/ConvTranspose_0", 4, n, n)
    tree |= conv("generator/ConvTranspose_1", 4, n, 1, O)
    tree |= conv("discriminator/Conv_0", 4, 1, n, I) | conv(
        "discriminator/Conv_1", 4, n, n
    )
    return tree | dense("discriminator/Dense_0", 49 * n, 1, O)


def stylegan(n):
    """A style of 512 modulates the channels; noise has one strength for a layer."""
    tree = dense("mapping/fc0", 512, 512, F) | {"mapping/fc0/bias": F(512)}
    tree |= {"synthesis/const": V(4, 4, n)}
    for i in range(2):
        at = f"synthesis/b{i}"
        tree |= dense(f"{at}/affine", 512, n, I)
        tree |= conv(f"{at}/conv", 3, n, n) | {f"{at}/noise_strength": F()}
    return (
        tree
        | dense("synthesis/torgb/affine", 512, n, I)
        | conv("synthesis/torgb/conv", 1, n, 3, O)
    )


def conditional_norm(n):
    """BigGAN: gains and offsets of batch norm are looked up by the class."""
    tree = {"embed/embedding": F(1000, 128)} | dense("fc", 20, 16 * n, I)
    tree |= {"bn0/gain/kernel": I(148, n), "bn0/offset/kernel": I(148, n)}
    return tree | conv("conv0", 3, n, n) | norm("bn1", n) | conv("to_rgb", 3, n, 3, O)


def dit(n, L=2):
    tree = {
        "x_embedder/proj/kernel": I(2, 2, 4, n),
        "x_embedder/proj/bias": V(n),
        "pos_embed": V(1, 256, n),
        "y_embedder/embedding_table/embedding": I(1001, n),
    }
    tree |= dense("t_embedder/mlp_0", 256, n, I) | dense("t_embedder/mlp_2", n, n)
    for i in range(L):
        at = f"blocks_{i}"
        tree |= dense(f"{at}/attn/qkv", n, 3 * n) | dense(f"{at}/attn/proj", n, n)
        tree |= dense(f"{at}/mlp/fc1", n, 4 * n) | dense(f"{at}/mlp/fc2", 4 * n, n)
        tree |= dense(f"{at}/adaLN_modulation", n, 6 * n)
    tree |= dense("final_layer/adaLN_modulation", n, 2 * n)
    return tree | dense("final_layer/linear", n, 32, O)


def nerf(n, skip="whole"):
    """Points of 63 features; a view of 27 joins the last layer."""
    tree = dense("Dense_0", 63, n, I) | dense("Dense_1", n, n)
    tree |= dense("sigma", n, 1, O) | dense("bottleneck", n, n)
    if skip == "joined":
        base, target = 64 + 63, 256 + 63
        tree |= {
            "Dense_2/kernel": H(n + 63, n, into=target / base),
            "Dense_2/bias": V(n),
        }
    return tree | dense("rgb_0", n, n // 2) | dense("rgb", n // 2, 3, O)


def siren(n):
    tree = {"layers/0/w": I(2, n), "layers/0/b": V(n)}
    for i in (1, 2):
        tree |= {f"layers/{i}/w": H(n, n), f"layers/{i}/b": V(n)}
    return tree | {"layers/3/w": O(n, 3), "layers/3/b": F(3)}


def score_net(n):
    """Random Fourier features W (n/2,), which are not trained, start as they are."""
    return (
        {"fourier/W": V(n // 2)}
        | dense("time", n, n)
        | dense("fc0", 2, n, I)
        | dense("fc1", n, n)
        | dense("out", n, 2, O)
    )


def realnvp(n):
    """Each coupling has a network of its own, which reads out shifts and scales."""
    tree = {}
    for i in range(2):
        at = f"couplings_{i}"
        tree |= dense(f"{at}/fc0", 3, n, I) | dense(f"{at}/fc1", n, n)
        tree |= dense(f"{at}/out", n, 6, O) | {f"{at}/log_scale": F(3)}
    return tree


def glow(n):
    """Glow: actnorm and 1x1 convolutions of 12 channels stay; the networks grow."""
    tree = {
        "actnorm/log_scale": F(12),
        "actnorm/bias": F(12),
        "inv1x1/kernel": F(1, 1, 12, 12),
    }
    tree |= conv("nn/conv1", 3, 6, n, I) | conv("nn/conv2", 1, n, n)
    return tree | conv("nn/conv3", 3, n, 12, O)


def named(name, source, tree, pattern, asks=None, **rest):
    """Two rows: the readouts named, and not."""
    options = {"readout": pattern}
    return [
        Setup(name, source, tree, options, **rest),
        Setup(
            f"{name}_not_named",
            source,
            tree,
            asks=asks or pattern,
            remedies=(options,),
            **rest,
        ),
    ]


SETUPS = [
    Setup("unet", "Hugging Face diffusers in Flax", unet, {"readout": "^conv_out/"}),
    Setup(
        "unet_not_named",
        "Hugging Face diffusers in Flax: a convolution reads out",
        unet,
        asks="conv_out/kernel",
        either=True,
        remedies=({"readout": "^conv_out/"},),
    ),
    Setup(
        "unet_fixed_time",
        "a U-Net whose time has 256 features",
        lambda n: unet(n, True),
        {"readout": "conv_out"},
    ),
    Setup(
        "unet_text",
        "Stable Diffusion in Flax",
        unet_text,
        {"readout": "^conv_out/kernel$"},
    ),
    Setup(
        "unet_classes",
        "a U-Net of classes: a table of labels, which is not tied",
        unet_classes,
        {"readout": "^conv_out/"},
        asks="class_embedding",
        either=True,
        remedies=({"tied": None},),
    ),
    Setup(
        "unet_segmentation",
        "the first U-Net",
        unet_segmentation,
        {"readout": "^final/"},
    ),
    *named("vae", "flax examples/vae", vae, "fc2"),
    Setup(
        "vae_growing_latents",
        "flax examples/vae, as many latents as width",
        lambda n: vae(n, n // 4, growing=True),
    ),
    *named(
        "conv_vae",
        "Stable Diffusion's autoencoder",
        conv_vae,
        "(encoder|decoder)/conv_out",
    ),
    Setup("autoencoder", "an autoencoder whose bottleneck grows", autoencoder),
    Setup("vqvae_codebook", "VQ-VAE: (512, n)", vqvae, {"readout": "decoder/conv_out"}),
    Setup(
        "vqvae_codebook_named",
        "VQ-VAE: (512, n)",
        vqvae,
        {"readout": "decoder/conv_out", "embeddings": "codebook", "tied": None},
    ),
    Setup(
        "vqvae_haiku_codebook",
        "hk.nets.VectorQuantizer: embeddings (n, 512), axes for the codebook given",
        lambda n: vqvae(n, rows="features"),
        {"readout": "decoder/conv_out", "axes": {"codebook$": ((), (0,))}},
    ),
    Setup(
        "vqvae_haiku_codebook_not_named",
        "hk.nets.VectorQuantizer: embeddings (n, 512) read as a readout",
        lambda n: vqvae(n, rows="features"),
        {"readout": "decoder/conv_out"},
        asks="quantizer/codebook",
        either=True,
        remedies=({"axes": {"codebook$": ((), (0,))}},),
    ),
    Setup(
        "vqvae_haiku_codebook_nothing_named",
        "hk.nets.VectorQuantizer",
        lambda n: vqvae(n, rows="features"),
        asks="quantizer/codebook|conv_out",
        remedies=({"readout": "decoder/conv_out", "axes": {"codebook$": ((), (0,))}},),
    ),
    *named(
        "vqvae_fixed_codes",
        "VQ-VAE: codes of 32; the encoder reads them out",
        lambda n: vqvae(n, "fixed"),
        "encoder/out|decoder/conv_out",
    ),
    Setup(
        "vqvae_more_codes",
        "VQ-VAE: 512 codes to 2048, which are entries and no fan-in",
        vqvae_more,
        {"readout": "decoder/conv_out"},
        grow={"k": (512, 2048)},
        asks="quantizer/codebook",
        either=True,
        remedies=(
            {"embeddings": "codebook", "tied": None},
            {"axes": {"codebook$": ((), (1,))}},
        ),
    ),
    Setup("residual_vq", "SoundStream", residual_vq, {"readout": "decoder/out"}),
    *named("low_dim_vq", "ViT-VQGAN", low_dim_vq, "pre_quant/kernel|to_pixel/kernel"),
    *named(
        "gan", "a DCGAN in Flax", gan, "generator/ConvTranspose_1|discriminator/Dense_0"
    ),
    Setup("stylegan", "StyleGAN2 in Flax", stylegan, {"readout": "torgb/conv"}),
    Setup("biggan", "BigGAN in Flax", conditional_norm, {"readout": "to_rgb"}),
    Setup(
        "dit",
        "facebookresearch/DiT in Flax: a table of labels, which is not tied",
        dit,
        asks="final_layer/linear|y_embedder",
        either=True,
        remedies=({"readout": "^final_layer/linear", "tied": None},),
    ),
    Setup(
        "dit_deeper",
        "facebookresearch/DiT in Flax",
        dit,
        {
            "depth": (2, 8),
            "branch": r"^blocks_\d+/",
            "readout": "^final_layer/linear",
            "tied": None,
        },
        grow={"L": (2, 8)},
    ),
    *named(
        "nerf",
        "google-research/jaxnerf",
        nerf,
        "^(sigma|rgb)/kernel",
        asks="(sigma|rgb)/kernel",
    ),
    Setup(
        "nerf_joined_skip",
        "google-research/jaxnerf: n + 63 features go into a layer",
        lambda n: nerf(n, "joined"),
        {"readout": "^(sigma|rgb)/kernel"},
        asks="Dense_2/kernel",
        remedies=({"fractional": True, "axes": {"^Dense_2/kernel$": ((0,), (1,))}},),
    ),
    Setup("siren", "SIREN in plain JAX", siren),
    Setup("score_net", "score-based models: Fourier features of time", score_net),
    *named("realnvp", "RealNVP in distrax", realnvp, r"couplings_\d/out/kernel"),
    Setup("glow", "Glow in Flax", glow, {"readout": "nn/conv3"}),
]
