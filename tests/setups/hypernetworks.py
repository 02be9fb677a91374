"""Kernels of more than two axes that mean something else, and generated weights."""

from .kit import F, H, I, O, Setup, V


def dense(path, a, b, kind=H):
    return {
        f"{path}/kernel": kind(a, b),
        f"{path}/bias": (F if kind in (O, F) else V)(b),
    }


def around(**extra):
    """The extra leaves in a small classifier."""

    def tree(n):
        out = dense("first", 32, n, I) | dense("mid", n, n)
        for path, leaf in extra.items():
            out[path.replace("__", "/")] = leaf(n)
        return out | dense("head", n, 10, O)

    return tree


def generates_fixed(n):
    """The trunk grows, the generated network does not: its weights are read out."""
    return (
        dense("hyper/fc0", 16, n, I)
        | dense("hyper/fc1", n, n)
        | dense("hyper/to_kernel", n, 32 * 32, O)
        | dense("hyper/to_bias", n, 32, O)
        | {"main/embed/kernel": F(8, 32), "main/out/kernel": F(32, 4)}
    )


def generates_width(n, flat):
    """W = z @ kernel has a fan-in of its own, n: entries of n^-1/2, updates of 1/n."""
    gen = {"hyper/to_kernel": H(16, n * n) if flat else H(16, n, n)}
    return (
        {"first/kernel": I(32, n), "codes": F(4, 16)} | gen | {"head/kernel": O(n, 10)}
    )


def film(n, condition="fixed"):
    c = 24 if condition == "fixed" else n
    kind = I if condition == "fixed" else H
    return (
        dense("first", 32, n, I)
        | dense("film", c, 2 * n, kind)
        | dense("head", n, 10, O)
    )


def pointnet(n):
    """The feature transform's network reads out a matrix (64, 64) of a fixed width."""
    return (
        dense("conv1", 3, 64, F)
        | dense("tnet/fc1", 64, n, I)
        | dense("tnet/fc2", n, n)
        | dense("tnet/out", n, 64 * 64, O)
        | dense("fc1", 64, n, I)
        | dense("fc2", n, n)
        | dense("cls", n, 40, O)
    )


def bilinear_readout(n):
    """y_k = x W_k x' sums over n² terms."""
    return (
        dense("left", 32, n, I)
        | dense("right", 32, n, I)
        | {"bilinear": O(n, n, 10, into=16)}
    )


def bilinear_torch(n):
    """torch.nn.Bilinear keeps (out, in1, in2)."""
    return {
        "left.weight": I(n, 32),
        "left.bias": V(n),
        "right.weight": I(n, 32),
        "right.bias": V(n),
        "bilinear.weight": O(10, n, n, into=16),
        "bilinear.bias": F(10),
    }


def deeponet(n, p="fixed"):
    width = 40 if p == "fixed" else n
    kind = O if p == "fixed" else H
    tree = dense("branch/0", 100, n, I) | dense("branch/1", n, n)
    tree |= {"branch/2/kernel": kind(n, width), "trunk/2/kernel": kind(n, width)}
    tree |= dense("trunk/0", 2, n, I) | dense("trunk/1", n, n)
    return tree | {"bias": F(1)}


def fno(n):
    """Spectral weights (in, out, modes, modes, 2): each mode sums over in alone."""
    tree = dense("lift", 3, n, I)
    for i in range(2):
        tree |= {f"spectral_{i}/w": H(n, n, 12, 12, 2)} | dense(f"pointwise_{i}", n, n)
    return tree | dense("proj_0", n, 2 * n) | dense("proj_1", 2 * n, 1, O)


FNO = {"axes": {r"spectral_\d/w$": ((0,), (1,))}}


def kan(n):
    """pykan-like (in, out, basis): y_j sums over inputs and 8 basis functions."""
    return {
        "layer0/coef": I(5, n, 8),
        "layer1/coef": H(n, n, 8),
        "layer2/coef": O(n, 3, 8),
    }


KAN = {"axes": {r"layer\d/coef$": ((0, 2), (1,))}, "readout": "layer2/coef"}


def kan_torch(n):
    """efficient-kan keeps (out, in, basis)."""
    return {
        "layers.0.base_weight": I(n, 5),
        "layers.0.spline_weight": I(n, 5, 8),
        "layers.1.base_weight": H(n, n),
        "layers.1.spline_weight": H(n, n, 8),
        "layers.2.base_weight": O(3, n),
        "layers.2.spline_weight": O(3, n, 8),
    }


def outer_product_mean(n, inner="grows"):
    """AlphaFold: output_w (c, c, pair) sums over c² products."""
    c = n // 2 if inner == "grows" else 16
    left = H if inner == "grows" else O
    out = H(c, c, n, into=16) if inner == "grows" else I(c, c, n)
    return {
        "first/kernel": I(32, n),
        "left_projection/kernel": left(n, c),
        "right_projection/kernel": left(n, c),
        "output_w": out,
        "output_b": V(n),
        "head/kernel": O(n, 10),
    }


def general_readout(n, grows="heads"):
    """DenseGeneral(10, axis=(-2, -1)), unbiased: (heads, dim, 10)."""
    h, d = (n // 16, 16) if grows == "heads" else (4, n // 4)
    return {
        "first/kernel": I(32, h, d),
        "first/bias": V(h, d),
        "head/kernel": O(h, d, 10),
    }


SETUPS = [
    Setup(
        "hyper_generates_fixed",
        "hypernetworks: the generated network keeps its size",
        generates_fixed,
        {"readout": "hyper/to_(kernel|bias)/kernel"},
    ),
    Setup(
        "hyper_generates_fixed_not_named",
        "hypernetworks: two generators look like readouts",
        generates_fixed,
        asks="hyper/to_(kernel|bias)/kernel",
        remedies=({"readout": "hyper/to_(kernel|bias)/kernel"},),
    ),
    Setup(
        "hyper_generates_width",
        "hypernetworks: the generated kernel (n, n) keeps its axes",
        lambda n: generates_width(n, flat=False),
        asks="hyper/to_kernel",
        either=True,
        remedies=({"axes": {"to_kernel$": ((1,), (2,))}},),
    ),
    Setup(
        "hyper_generates_width_flat",
        "hypernetworks: n·n outputs grow by the square of every other width; no option"
        " says so, the axes have to be kept apart",
        lambda n: generates_width(n, flat=True),
        asks="hyper/to_kernel",
        instead=lambda n: generates_width(n, flat=False),
        remedies=({"axes": {"to_kernel$": ((1,), (2,))}},),
    ),
    Setup("film_fixed_condition", "FiLM", film),
    Setup("film_growing_condition", "FiLM", lambda n: film(n, "grows")),
    Setup(
        "pointnet",
        "PointNet's feature transform",
        pointnet,
        {"readout": "tnet/out|^cls"},
    ),
    Setup(
        "pointnet_not_named",
        "PointNet's feature transform",
        pointnet,
        asks="tnet/out",
        remedies=({"readout": "tnet/out|^cls"},),
    ),
    Setup(
        "bilinear_readout_axes",
        "an unbiased bilinear readout (n, n, 10)",
        bilinear_readout,
        {"readout": "bilinear", "axes": {"^bilinear$": ((0, 1), (2,))}},
    ),
    Setup(
        "bilinear_readout_not_named",
        "an unbiased bilinear readout (n, n, 10): (n, heads, dim) has that shape too",
        bilinear_readout,
        asks="bilinear",
        either=True,
        remedies=({"readout": "bilinear", "axes": {"^bilinear$": ((0, 1), (2,))}},),
    ),
    Setup(
        "bilinear_torch",
        "torch.nn.Bilinear",
        bilinear_torch,
        {"layout": "out_in", "readout": "bilinear"},
        style="flat",
        asks="bilinear.weight",
        either=True,
        remedies=({"axes": {r"^bilinear\.weight$": ((1, 2), (0,))}},),
    ),
    Setup(
        "neural_tensor_layer",
        "a neural tensor network: (n, n, n) sums over n²",
        around(tensor=lambda n: H(n, n, n, into=16)),
        {"axes": {"^tensor$": ((0, 1), (2,))}},
    ),
    Setup(
        "neural_tensor_layer_not_named",
        "a neural tensor network: all three axes grow",
        around(tensor=lambda n: H(n, n, n, into=16)),
        asks="tensor",
        either=True,
        remedies=({"axes": {"^tensor$": ((0, 1), (2,))}},),
    ),
    Setup(
        "neural_tensor_slices",
        "a neural tensor network of 4 slices: W (n, n, 4) sums over n²",
        around(
            W=lambda n: O(n, n, 4, into=16), V=lambda n: O(2 * n, 4), u=lambda n: F(4)
        ),
        {"readout": "^head/kernel|^[WV]$", "axes": {"^W$": ((0, 1), (2,))}},
    ),
    Setup(
        "neural_tensor_slices_not_named",
        "a neural tensor network of 4 slices: W (n, n, 4) could be maxout too",
        around(
            W=lambda n: O(n, n, 4, into=16), V=lambda n: O(2 * n, 4), u=lambda n: F(4)
        ),
        asks=r"\b[WV]\b",
        remedies=({"readout": "^head/kernel|^[WV]$", "axes": {"^W$": ((0, 1), (2,))}},),
    ),
    Setup(
        "deeponet_fixed_basis",
        "DeepONet: 40 basis functions",
        deeponet,
        {"readout": "(branch|trunk)/2/kernel", "branch": None},
    ),
    Setup(
        "deeponet_growing_basis",
        "DeepONet: the output is a dot product of n terms, no parameter reads out",
        lambda n: deeponet(n, "grows"),
        {"readout": None},
    ),
    Setup(
        "deeponet_growing_basis_not_said",
        "DeepONet: the output is a dot product of n terms",
        lambda n: deeponet(n, "grows"),
        asks="readout",
        remedies=({"readout": None},),
    ),
    Setup("fno_named", "Fourier neural operator", fno, FNO),
    Setup(
        "fno_not_named",
        "Fourier neural operator: a last axis of 2",
        fno,
        asks=r"spectral_\d/w",
        either=True,
        remedies=(FNO,),
    ),
    Setup("kan_named", "pykan in JAX", kan, KAN),
    Setup(
        "kan_not_named",
        "pykan in JAX: a last axis of 8 basis functions",
        kan,
        asks=r"layer\d/coef",
        remedies=(KAN,),
    ),
    Setup(
        "kan_torch",
        "efficient-kan",
        kan_torch,
        {"layout": "out_in", "readout": r"layers\.2\."},
        style="flat",
    ),
    Setup(
        "outer_product_mean_axes",
        "AlphaFold's outer product mean",
        outer_product_mean,
        {"axes": {"^output_w$": ((0, 1), (2,))}},
    ),
    Setup(
        "outer_product_mean_not_named",
        "AlphaFold's outer product mean: all three axes grow",
        outer_product_mean,
        asks="output_w",
        either=True,
        remedies=({"axes": {"^output_w$": ((0, 1), (2,))}},),
    ),
    Setup(
        "outer_product_mean_fixed",
        "AlphaFold's outer product mean of 16 channels",
        lambda n: outer_product_mean(n, "fixed"),
        {"readout": "^head|(left|right)_projection"},
    ),
    Setup(
        "readout_of_heads",
        "Flax DenseGeneral over (heads, 16), unbiased",
        general_readout,
        asks="head/kernel",
        either=True,
        remedies=({"readout": "^head/", "axes": {"^head/kernel$": ((0, 1), (2,))}},),
    ),
    Setup(
        "readout_of_head_dim",
        "Flax DenseGeneral over (4, n/4), unbiased",
        lambda n: general_readout(n, "dim"),
        asks="head/kernel",
        either=True,
        remedies=({"readout": "^head/", "axes": {"^head/kernel$": ((0, 1), (2,))}},),
    ),
    Setup(
        "layer_scale_and_rezero",
        "CaiT and ReZero",
        around(gamma=lambda n: V(n), alpha=lambda n: F(), beta=lambda n: F(1)),
    ),
    Setup(
        "square_gamma",
        "GDN (compression): gamma (n, n) mixes channels, its name says scale",
        around(gdn__gamma=lambda n: H(n, n), gdn__beta=lambda n: V(n)),
        asks="gdn/gamma",
        either=True,
        remedies=({"axes": {"gdn/gamma$": ((0,), (1,))}},),
    ),
    Setup(
        "gamma_of_images",
        "a scale (1, 1, n) and an offset (n, 1, 1) of channels first",
        around(norm__scale=lambda n: V(1, 1, n)),
    ),
    Setup(
        "fixed_codes",
        "task embeddings of a fixed size beside a growing network",
        around(tasks=lambda n: F(12, 16), to_task__kernel=lambda n: I(16, n)),
    ),
    Setup(
        "maxout",
        "maxout: (n, n, 4 pieces), each sums over n",
        around(maxout=lambda n: H(n, n, 4)),
        {"axes": {"^maxout$": ((0,), (1,))}},
    ),
    Setup(
        "maxout_not_named",
        "maxout: (n, n, 4 pieces) reads as a bilinear readout",
        around(maxout=lambda n: H(n, n, 4)),
        asks="maxout",
        either=True,
        remedies=({"axes": {"^maxout$": ((0,), (1,))}},),
    ),
]
