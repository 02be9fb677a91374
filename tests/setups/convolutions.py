"""Convolutions: kernels of Flax and Haiku are (space, in, out)."""

from .kit import F, H, I, O, Setup, V


def conv(path, k, a, b, kind=H):
    return {
        f"{path}/kernel": kind(k, k, a, b),
        f"{path}/bias": (V if kind in (H, I) else F)(b),
    }


def norm(path, n):
    return {f"{path}/scale": V(n), f"{path}/bias": V(n)}


def head(n, classes=10, path="head"):
    return {f"{path}/kernel": O(n, classes), f"{path}/bias": F(classes)}


def cnn(n):
    return (
        conv("Conv_0", 3, 3, n, I)
        | conv("Conv_1", 3, n, 2 * n)
        | {"Dense_0/kernel": H(2 * n * 16, 8 * n), "Dense_0/bias": V(8 * n)}
        | head(8 * n, path="Dense_1")
    )


def cnn_gray_lists(n):
    return (
        {"layers/0/w": I(5, 5, 1, n), "layers/0/b": V(n)}
        | {"layers/1/w": H(5, 5, n, n), "layers/1/b": V(n)}
        | {"layers/2/w": O(n, 10), "layers/2/b": F(10)}
    )


def resnet(n):
    """flax examples/imagenet: stages of n, 2n, 4n, 8n."""
    tree = {"conv_init/kernel": I(7, 7, 3, n)} | norm("bn_init", n)
    a, i = n, 0
    for stage in range(4):
        b = n * 2**stage
        for _ in range(2):
            at = f"ResNetBlock_{i}"
            tree |= {
                f"{at}/Conv_0/kernel": H(3, 3, a, b),
                f"{at}/Conv_1/kernel": H(3, 3, b, b),
            }
            tree |= norm(f"{at}/BatchNorm_0", b) | norm(f"{at}/BatchNorm_1", b)
            if a != b:
                tree |= {f"{at}/conv_proj/kernel": H(1, 1, a, b)} | norm(
                    f"{at}/norm_proj", b
                )
            a, i = b, i + 1
    return tree | head(a, 1000, "Dense_0")


def resnet_bottleneck(n):
    tree = {"conv_init/kernel": I(7, 7, 3, n)} | norm("bn_init", n)
    a = n
    for i, b in enumerate((n, 2 * n)):
        at = f"BottleneckResNetBlock_{i}"
        tree |= {
            f"{at}/Conv_0/kernel": H(1, 1, a, b),
            f"{at}/Conv_1/kernel": H(3, 3, b, b),
            f"{at}/Conv_2/kernel": H(1, 1, b, 4 * b),
            f"{at}/conv_proj/kernel": H(1, 1, a, 4 * b),
        }
        tree |= norm(f"{at}/BatchNorm_0", b) | norm(f"{at}/BatchNorm_1", b)
        tree |= norm(f"{at}/BatchNorm_2", 4 * b) | norm(f"{at}/norm_proj", 4 * b)
        a = 4 * b
    return tree | head(a, 1000, "Dense_0")


def convnext_block(path, n):
    return (
        # A depthwise kernel sums over its own channel only: 49 terms.
        {f"{path}/dwconv/kernel": I(7, 7, 1, n), f"{path}/dwconv/bias": V(n)}
        | norm(f"{path}/norm", n)
        | {f"{path}/pwconv1/kernel": H(n, 4 * n), f"{path}/pwconv1/bias": V(4 * n)}
        | {f"{path}/pwconv2/kernel": H(4 * n, n), f"{path}/pwconv2/bias": V(n)}
        | {f"{path}/gamma": V(n)}
    )


def convnext(n, L=2):
    tree = conv("stem", 4, 3, n, I)
    for i in range(L):
        tree |= convnext_block(f"blocks_{i}", n)
    return tree | norm("norm", n) | head(n)


def convnext_stages(n):
    tree = conv("downsample_layers_0/0", 4, 3, n, I)
    a = n
    for s in range(3):
        b = n * 2**s
        if s:
            tree |= conv(f"downsample_layers_{s}/1", 2, a, b) | norm(
                f"downsample_layers_{s}/0", a
            )
        tree |= convnext_block(f"stages_{s}/0", b) | convnext_block(f"stages_{s}/1", b)
        a = b
    return tree | head(a)


def mobilenet(n):
    """Squeeze-and-excitation is (n → n/4 → n) here; expansion is 6."""
    tree = {"stem/kernel": I(3, 3, 3, n)} | norm("stem_bn", n)
    for i in range(2):
        at, e = f"block_{i}", 6 * n
        tree |= {
            f"{at}/expand/kernel": H(1, 1, n, e),
            f"{at}/depthwise/kernel": I(3, 3, 1, e),
            f"{at}/se/reduce/kernel": H(e, n // 4),
            f"{at}/se/reduce/bias": V(n // 4),
            f"{at}/se/expand/kernel": H(n // 4, e),
            f"{at}/se/expand/bias": V(e),
            f"{at}/project/kernel": H(1, 1, e, n),
        }
        tree |= norm(f"{at}/bn", n)
    return tree | {"top/kernel": H(1, 1, n, 20 * n)} | head(20 * n)


def squeeze_fixed(n):
    """Squeeze to 8 channels whatever the width: the squeeze is like a readout."""
    return (
        conv("stem", 3, 3, n, I)
        | conv("body", 3, n, n)
        | {
            "se/reduce/kernel": O(n, 8),
            "se/reduce/bias": F(8),
            "se/expand/kernel": I(8, n),
            "se/expand/bias": V(n),
        }
        | head(n)
    )


def grouped(n):
    """32 groups whatever the width: each output sums over n/32, which grows."""
    return (
        conv("stem", 3, 3, n, I)
        | {"group/kernel": H(3, 3, n // 32, n), "group/bias": V(n)}
        | conv("body", 1, n, n)
        | head(n)
    )


def grouped_fixed_size(n):
    """Groups of 8 channels: each output sums over 72 terms whatever the width."""
    return (
        conv("stem", 3, 3, n, I)
        | {"group/kernel": I(3, 3, 8, n), "group/bias": V(n)}
        | conv("body", 1, n, n)
        | head(n)
    )


def fully_convolutional(n):
    """FCN and Pix2Pix discriminators: the readout is a convolution."""
    return (
        conv("stem", 3, 3, n, I)
        | conv("body", 3, n, n)
        | conv("classifier", 1, n, 21, O)
    )


def denoiser(n):
    """DnCNN: noise of 3 channels is read out by a 3x3 convolution."""
    return (
        {"Conv_0/kernel": I(3, 3, 3, n)}
        | {"Conv_1/kernel": H(3, 3, n, n)}
        | norm("BatchNorm_0", n)
        | {"Conv_2/kernel": O(3, 3, n, 3)}
    )


def decoder(n):
    """Flax ConvTranspose keeps (k, k, in, out)."""
    return (
        {"Dense_0/kernel": I(16, 49 * n), "Dense_0/bias": V(49 * n)}
        | conv("ConvTranspose_0", 4, n, n // 2)
        | conv("ConvTranspose_1", 4, n // 2, 1, O)
    )


def haiku_decoder(n):
    """Haiku Conv2DTranspose keeps (k, k, out, in); here with biases."""
    return {
        "decoder/~/linear/w": I(16, 49 * n),
        "decoder/~/linear/b": V(49 * n),
        "decoder/~/conv2_d_transpose/w": H(4, 4, n // 2, n),
        "decoder/~/conv2_d_transpose/b": V(n // 2),
        "decoder/~/conv2_d_transpose_1/w": O(4, 4, 1, n // 2),
        "decoder/~/conv2_d_transpose_1/b": F(1),
    }


def haiku_decoder_unbiased(n):
    return {path: leaf for path, leaf in haiku_decoder(n).items() if path[-1] != "b"}


def wav2vec(n):
    """1-D kernels (k, in, out); the positional convolution has 16 groups."""
    tree = {"feature/0/kernel": I(10, 1, n), "feature/0/bias": V(n)}
    for i in (1, 2):
        tree |= {f"feature/{i}/kernel": H(3, n, n), f"feature/{i}/bias": V(n)}
    return (
        tree
        | {"pos_conv/kernel": H(128, n // 16, n), "pos_conv/bias": V(n)}
        | {"proj/kernel": H(n, n), "proj/bias": V(n)}
        | {"lm_head/kernel": O(n, 32), "lm_head/bias": F(32)}
    )


def tcn(n):
    tree = {"embed/kernel": I(12, n)}
    for i in range(2):
        tree |= {f"blocks/{i}/conv/kernel": H(3, n, n), f"blocks/{i}/conv/bias": V(n)}
    return tree | {"out/kernel": O(n, 4), "out/bias": F(4)}


def conv3d(n):
    return (
        {"conv1/kernel": I(3, 3, 3, 1, n), "conv1/bias": V(n)}
        | {"conv2/kernel": H(3, 3, 3, n, 2 * n), "conv2/bias": V(2 * n)}
        | head(2 * n, path="fc")
    )


def separable(n):
    """Flax's idiom with feature_group_count, and a channel multiplier of 2."""
    return (
        conv("stem", 3, 3, n, I)
        | {"depthwise/kernel": I(3, 3, 1, 2 * n), "depthwise/bias": V(2 * n)}
        | {"pointwise/kernel": H(1, 1, 2 * n, n), "pointwise/bias": V(n)}
        | head(n)
    )


def haiku_depthwise(n):
    """Haiku DepthwiseConv2D keeps (k, k, 1, channels)."""
    return {
        "net/~/conv2_d/w": I(3, 3, 3, n),
        "net/~/conv2_d/b": V(n),
        "net/~/depthwise_conv2_d/w": I(3, 3, 1, n),
        "net/~/depthwise_conv2_d/b": V(n),
        "net/~/conv2_d_1/w": H(1, 1, n, n),
        "net/~/conv2_d_1/b": V(n),
        "net/~/linear/w": O(n, 10),
        "net/~/linear/b": F(10),
    }


def keras_depthwise(n):
    """Keras DepthwiseConv2D keeps (k, k, channels, 1): the channels are no fan-in."""
    return (
        conv("stem", 3, 3, n, I)
        | {"depthwise/depthwise_kernel": I(3, 3, n, 1), "depthwise/bias": V(n)}
        | conv("pointwise", 1, n, n)
        | head(n)
    )


def fpn(n):
    """RetinaNet: classes and boxes are read out by 3x3 convolutions."""
    return (
        {"backbone/kernel": I(7, 7, 3, n)}
        | conv("lateral", 1, n, n)
        | conv("cls_tower", 3, n, n)
        | conv("cls_score", 3, n, 80, O)
        | conv("bbox_pred", 3, n, 4, O)
    )


def patchgan_spectral(n):
    """Spectral norm keeps a vector u (1, out) beside each kernel."""
    return (
        conv("conv_0", 4, 3, n, I)
        | conv("conv_1", 4, n, 2 * n)
        | conv("conv_2", 4, 2 * n, 1, O)
    )


CONV_READOUT = {"readout": "classifier"}
TRANSPOSED = {
    "axes": {r"conv2_d_transpose(_1)?/w$": ((0, 1, 3), (2,))},
    "readout": "conv2_d_transpose_1/w",
}
KERAS = {"axes": {r"depthwise_kernel$": ((0, 1), (2, 3))}}

SETUPS = [
    Setup("cnn", "flax examples/mnist", cnn),
    Setup("cnn_lists", "plain JAX, lists of layers", cnn_gray_lists),
    Setup("resnet18", "flax examples/imagenet", resnet),
    Setup("resnet50", "flax examples/imagenet", resnet_bottleneck),
    Setup("convnext", "ConvNeXt in Flax", convnext),
    Setup(
        "convnext_deeper",
        "ConvNeXt in Flax",
        convnext,
        {"depth": (2, 8), "branch": r"^blocks_\d+/"},
        grow={"L": (2, 8)},
    ),
    Setup("convnext_stages", "ConvNeXt in Flax", convnext_stages),
    Setup("mobilenet", "EfficientNet in Flax", mobilenet),
    Setup(
        "squeeze_fixed",
        "a squeeze to 8 channels",
        squeeze_fixed,
        {"readout": "^head/kernel|se/reduce/kernel"},
    ),
    Setup(
        "squeeze_fixed_not_named",
        "a squeeze to 8 channels",
        squeeze_fixed,
        asks="se/reduce/kernel",
        remedies=({"readout": "^head/kernel|se/reduce/kernel"},),
    ),
    Setup("resnext_groups", "ResNeXt in Flax, 32 groups", grouped),
    Setup("regnet_group_width", "RegNet in Flax, groups of 8", grouped_fixed_size),
    Setup("fcn_named", "an FCN in Flax", fully_convolutional, CONV_READOUT),
    Setup(
        "fcn_not_named",
        "an FCN in Flax: a convolution as the readout",
        fully_convolutional,
        asks="classifier/kernel",
        either=True,
        remedies=(CONV_READOUT,),
    ),
    Setup("dncnn_named", "DnCNN in Flax", denoiser, {"readout": "^Conv_2/"}),
    Setup(
        "dncnn_not_named",
        "DnCNN in Flax",
        denoiser,
        asks="Conv_2/kernel",
        either=True,
        remedies=({"readout": "^Conv_2/"},),
    ),
    Setup(
        "conv_decoder_flax",
        "flax ConvTranspose",
        decoder,
        {"readout": "ConvTranspose_1/kernel"},
    ),
    Setup(
        "conv_decoder_haiku",
        "hk.Conv2DTranspose",
        haiku_decoder,
        TRANSPOSED,
        style="haiku",
    ),
    Setup(
        "conv_decoder_haiku_not_named",
        "hk.Conv2DTranspose: (k, k, out, in); the bias tells which is out",
        haiku_decoder,
        style="haiku",
        asks="conv2_d_transpose",
        either=True,
        remedies=(TRANSPOSED,),
    ),
    Setup(
        "conv_decoder_haiku_unbiased",
        "hk.Conv2DTranspose without biases",
        haiku_decoder_unbiased,
        style="haiku",
        asks="conv2_d_transpose",
        either=True,
        remedies=(TRANSPOSED,),
    ),
    Setup("wav2vec", "Hugging Face FlaxWav2Vec2", wav2vec),
    Setup("tcn", "a temporal convolution network", tcn),
    Setup("conv3d", "3-D convolutions", conv3d),
    Setup("separable", "flax, a channel multiplier of 2", separable),
    Setup("depthwise_haiku", "hk.DepthwiseConv2D", haiku_depthwise, style="haiku"),
    Setup(
        "depthwise_keras",
        "keras.layers.DepthwiseConv2D",
        keras_depthwise,
        KERAS,
    ),
    Setup(
        "depthwise_keras_not_named",
        "keras.layers.DepthwiseConv2D: reads as a readout",
        keras_depthwise,
        asks="depthwise_kernel",
        either=True,
        remedies=(KERAS,),
    ),
    Setup("retinanet", "RetinaNet in Flax", fpn, {"readout": "cls_score|bbox_pred"}),
    Setup(
        "retinanet_not_named",
        "RetinaNet in Flax",
        fpn,
        asks="cls_score|bbox_pred",
        remedies=({"readout": "cls_score|bbox_pred"},),
    ),
    Setup(
        "patchgan", "Pix2Pix in Flax", patchgan_spectral, {"readout": "^conv_2/kernel"}
    ),
]
