"""Depth: which axis or list counts layers, and what is in the branches."""

from .kit import F, H, I, O, Setup, V

DEEPER = {"L": (2, 8)}
SAME = {"L": (2, 2)}
DEPTH = {"depth": (2, 8)}


def norm(path, n, *stack):
    return {f"{path}/scale": V(*stack, n), f"{path}/bias": V(*stack, n)}


def block(path, n, *stack):
    return (
        norm(f"{path}/norm", n, *stack)
        | {
            f"{path}/up/kernel": H(*stack, n, 4 * n),
            f"{path}/up/bias": V(*stack, 4 * n),
        }
        | {
            f"{path}/down/kernel": H(*stack, 4 * n, n),
            f"{path}/down/bias": V(*stack, n),
        }
    )


def ends(n):
    return {"embed/kernel": I(32, n), "embed/bias": V(n)} | norm("final_norm", n)


def head(n):
    return {"head/kernel": O(n, 10), "head/bias": F(10)}


def listed(n, L, path="blocks/{}"):
    tree = ends(n)
    for i in range(L):
        tree |= block(path.format(i), n)
    return tree | head(n)


def stacked(n, L, path="blocks"):
    return ends(n) | block(path, n, L) | head(n)


def bare_stack(n, L):
    """A plain tree of arrays, as README's example has it."""
    return {"embed": I(8, n), "blocks": H(L, n, n), "bias": V(L, n), "head": O(n, 3)}


def square_stack(n, L):
    """(4, 64, 64) to (16, 128, 128): L and n may both look like widths."""
    return {"embed": I(8, n), "w": H(L, n, n), "head": O(n, 3)}


def stack_as_wide(n, L):
    """As many layers as the stack's matrices are wide, in the base."""
    return {"embed": I(8, n), "w": H(L, n, n), "b": V(L, n), "head": O(n, 3)}


def shared_block(n):
    """ALBERT and Universal Transformers: one block, used at every depth."""
    return ends(n) | block("shared", n) | head(n)


def shared_fixed_axis(n):
    """A shared block with kernels of 2 parts, in a model of 2 blocks: not a stack."""
    tree = ends(n) | {"shared/gated": H(2, n, n)}
    for i in range(2):
        tree |= block(f"blocks/{i}", n)
    return tree | head(n)


def encoder_decoder(n, L):
    tree = ends(n)
    for side in ("encoder", "decoder"):
        for i in range(L):
            tree |= block(f"{side}/blocks/{i}", n)
        tree |= norm(f"{side}/final_layer_norm", n)
    return tree | head(n)


def one_side_grows(n, L):
    """The encoder gets deeper, the decoder keeps two blocks."""
    tree = ends(n)
    for i in range(L):
        tree |= block(f"encoder/blocks/{i}", n)
    for i in range(2):
        tree |= block(f"decoder/blocks/{i}", n)
    return tree | head(n)


def pyramid(n, a, b):
    """Stages of a and b blocks: ratios of depth differ between them."""
    tree = ends(n)
    for i in range(a):
        tree |= block(f"stage1/blocks/{i}", n)
    for i in range(b):
        tree |= block(f"stage2/blocks/{i}", n)
    return tree | head(n)


def alternating(n, attn, mlp):
    """Two lists, of which one member is used in turn with the other."""
    tree = ends(n)
    for i in range(attn):
        tree |= {
            f"attn_blocks/{i}/qkv/kernel": H(n, 3 * n),
            f"attn_blocks/{i}/out/kernel": H(n, n),
        }
    for i in range(mlp):
        tree |= block(f"mlp_blocks/{i}", n)
    return tree | head(n)


def members_differ(n, L):
    """A list whose members widen by different ratios: 4 and 2."""
    k = 32 if n == 64 else 64
    tree = {"embed/kernel": I(32, n)}
    for i in range(L):
        tree[f"blocks/{i}/mix/kernel"] = H(n, n)
        out = 4 if i % 2 == 0 else 2
        inner = n if i % 2 == 0 else k
        tree |= {
            f"blocks/{i}/up/kernel": H(n, inner, out=out),
            f"blocks/{i}/down/kernel": H(inner, n, into=out),
        }
    return tree | {"head/kernel": O(n, 10)}


def scanned_groups(n, L):
    """Gemma-like: a scan over groups of two layers, which stand apart in the tree."""
    return (
        ends(n) | block("groups/local", n, L) | block("groups/global", n, L) | head(n)
    )


def norms_outside(n, L):
    """The norms of the branches are kept in another subtree, stacked too."""
    return (
        {"embed/kernel": I(8, n)}
        | {"mlp/up": H(L, n, 4 * n), "mlp/down": H(L, 4 * n, n)}
        | {"norms/scale": V(L, n), "norms/bias": V(L, n)}
        | {"final_norm/scale": V(n), "head/kernel": O(n, 10)}
    )


def layers_named(n, L):
    """`layer_0`, and a `layer_norm` that a careless pattern matches as well."""
    tree = {"embed_layer/kernel": I(8, n)}
    for i in range(L):
        tree |= block(f"layer_{i}", n)
    return tree | {"final_layer_norm/scale": V(n), "head/kernel": O(n, 10)}


def gpt_stack(n, L):
    heads = n // 16
    at = "transformer/blocks"
    return {
        "transformer/wte/embedding": I(1000, n),
        "transformer/wpe/embedding": I(64, n),
        f"{at}/ln_1/scale": V(L, n),
        f"{at}/attn/query/kernel": H(L, n, heads, 16),
        f"{at}/attn/out/kernel": H(L, heads, 16, n),
        f"{at}/mlp/c_fc/kernel": H(L, n, 4 * n),
        f"{at}/mlp/c_proj/kernel": H(L, 4 * n, n),
        "transformer/ln_f/scale": V(n),
        "lm_head/kernel": O(n, 1000),
    }


def conv_stack(n, L):
    return (
        {"stem/kernel": I(3, 3, 3, n), "stem/bias": V(n)}
        | {"blocks/conv/kernel": H(L, 3, 3, n, n), "blocks/conv/bias": V(L, n)}
        | {"blocks/depthwise/kernel": I(L, 3, 3, 1, n)}
        | head(n)
    )


def torch_stack(n, L):
    """torch.func.stack_module_state: (L, out, in)."""
    return {
        "embed.weight": I(n, 8),
        "embed.bias": V(n),
        "blocks.fc.weight": H(L, 4 * n, n),
        "blocks.fc.bias": V(L, 4 * n),
        "blocks.proj.weight": H(L, n, 4 * n),
        "blocks.proj.bias": V(L, n),
        "head.weight": O(10, n),
        "head.bias": F(10),
    }


def deeper_only(n, L):
    """No width grows, so nothing but depth can differ."""
    return {path: F(*leaf.shape) for path, leaf in listed(n, L).items()}


def wrong(name, tree, pattern, asks, right, source, grow=None, depth=(2, 8), **rest):
    """A branch pattern that is wrong, and the one that a user meant."""
    return Setup(
        name,
        source,
        tree,
        {"depth": depth, "branch": pattern},
        grow=grow or DEEPER,
        inside=right,
        asks=asks,
        remedies=({"branch": right},),
        **rest,
    )


SETUPS = [
    Setup(
        "list_deeper",
        "a list of residual blocks",
        listed,
        DEPTH | {"branch": "^blocks/"},
        grow=DEEPER,
    ),
    Setup(
        "list_deeper_not_said",
        "a list of residual blocks, of which there are more",
        listed,
        grow=DEEPER,
        asks="blocks/",
        remedies=(DEPTH | {"branch": "^blocks/"},),
    ),
    Setup(
        "list_depth_without_branch",
        "depth is given, but not what is in the branches",
        listed,
        DEPTH,
        grow=DEEPER,
        asks="branch",
        remedies=({"branch": "^blocks/"},),
    ),
    Setup("list_same", "a list of residual blocks", listed, grow=SAME),
    Setup(
        "list_same_depth_said",
        "a list of residual blocks",
        listed,
        {"depth": (2, 2), "branch": "^blocks/"},
        grow=SAME,
    ),
    Setup(
        "list_underscores",
        "Linen's names: blocks_0, blocks_1",
        lambda n, L: listed(n, L, "blocks_{}"),
        DEPTH | {"branch": r"^blocks_\d+/"},
        grow=DEEPER,
    ),
    Setup(
        "stack_deeper",
        "a stack of blocks",
        stacked,
        DEPTH | {"branch": "^blocks/"},
        grow=DEEPER,
    ),
    Setup(
        "stack_same",
        "a stack of blocks",
        stacked,
        {"depth": (2, 2), "branch": "^blocks/"},
        grow=SAME,
    ),
    Setup(
        "stack_deeper_not_said",
        "a stack of blocks in a plain tree: layers grow by the widths' ratio",
        stacked,
        grow=DEEPER,
        asks="blocks/",
        remedies=(DEPTH | {"branch": "^blocks/"},),
    ),
    Setup(
        "stack_deeper_other_ratio_not_said",
        "a stack of blocks in a plain tree",
        stacked,
        grow={"L": (2, 16)},
        asks="blocks/",
        remedies=({"depth": (2, 16), "branch": "^blocks/"},),
    ),
    Setup(
        "stack_same_not_said",
        "a stack of blocks in a plain tree; a fan-in of 2·n grows as n does",
        stacked,
        grow=SAME,
        asks="blocks/",
        either=True,
        remedies=({"depth": (2, 2), "branch": "^blocks/"},),
    ),
    Setup(
        "stack_bare",
        "arrays in a dictionary",
        bare_stack,
        DEPTH | {"branch": "^(blocks|bias)$"},
        grow=DEEPER,
    ),
    wrong(
        "stack_bare_forgets_bias",
        bare_stack,
        "^blocks$",
        r"\bbias\b",
        "^(blocks|bias)$",
        "arrays in a dictionary: the stacked bias is outside the pattern",
    ),
    Setup(
        "stack_square_not_said",
        "(4, 64, 64) to (16, 128, 128): total size grows evenly by cutting axis 0",
        square_stack,
        grow={"n": (64, 128), "L": (4, 16)},
        asks=r"'w'|\bw\b",
        remedies=({"depth": (4, 16), "branch": "^w$"},),
    ),
    Setup(
        "stack_square_deeper_than_wide_not_said",
        "(4, 64, 64) to (8, 256, 256)",
        square_stack,
        grow={"L": (4, 8)},
        asks=r"'w'|\bw\b",
        remedies=({"depth": (4, 8), "branch": "^w$"},),
    ),
    Setup(
        "stack_as_wide",
        "64 layers of width 64 in the base",
        stack_as_wide,
        {"depth": (64, 256), "branch": "^[wb]$"},
        grow={"L": (64, 256)},
        asks=r"'[wb]'",
        either=True,
        instead=lambda n, L: stack_as_wide(2 * n, L),
        remedies=({},),
    ),
    Setup(
        "stack_as_wide_not_said",
        "64 layers of width 64 in the base, both grow alike",
        stack_as_wide,
        grow={"L": (64, 256)},
        asks=r"'[wb]'",
        instead=lambda n, L: stack_as_wide(2 * n, L),
        remedies=({"depth": (64, 256), "branch": "^[wb]$"},),
    ),
    Setup(
        "stack_wrong_depth",
        "depth is given as (4, 8), the stacks have 2 and 8",
        stacked,
        {"depth": (4, 8), "branch": "^blocks/"},
        grow=DEEPER,
        asks="blocks/",
        remedies=(DEPTH,),
    ),
    Setup(
        "list_wrong_depth",
        "depth is given as (4, 8), the lists have 2 and 8",
        listed,
        {"depth": (4, 8), "branch": "^blocks/"},
        grow=DEEPER,
        asks="blocks",
        remedies=(DEPTH,),
    ),
    Setup("shared_block", "ALBERT: one block for every depth", shared_block),
    Setup(
        "shared_block_taken_for_stack",
        "ALBERT: the branch has no axis of layers, though depth is said to grow",
        shared_block,
        DEPTH | {"branch": "^shared/"},
        asks="shared/",
        remedies=({"depth": None, "branch": None},),
    ),
    Setup(
        "shared_parts",
        "a kernel of two parts (2, n, n) outside the branches, which are two",
        shared_fixed_axis,
        {"depth": (2, 2), "branch": "^blocks/"},
    ),
    Setup(
        "encoder_decoder",
        "T5-like: two lists that grow alike",
        encoder_decoder,
        DEPTH | {"branch": "/blocks/"},
        grow=DEEPER,
    ),
    Setup(
        "one_list_grows",
        "two lists, of which one grows, and the pattern names that one",
        one_side_grows,
        DEPTH | {"branch": "^encoder/blocks/"},
        grow=DEEPER,
    ),
    wrong(
        "one_list_grows_both_named",
        one_side_grows,
        "blocks/",
        "decoder/blocks",
        "^encoder/blocks/",
        "two lists, of which one grows: the pattern names both",
    ),
    wrong(
        "encoder_decoder_one_named",
        encoder_decoder,
        "^encoder/blocks/",
        "decoder/blocks",
        "/blocks/",
        "T5-like: the pattern names one of two lists that grow",
    ),
    wrong(
        "encoder_decoder_final_norm",
        encoder_decoder,
        "^(encoder|decoder)/",
        "final_layer_norm",
        "/blocks/",
        "T5-like: the pattern matches final_layer_norm",
    ),
    wrong(
        "pattern_of_everything",
        listed,
        ".*",
        "embed|final_norm|head",
        "^blocks/",
        "a list of blocks: .*",
    ),
    wrong(
        "pattern_of_everything_stacked",
        stacked,
        ".*",
        "embed|final_norm|head",
        "^blocks/",
        "a stack of blocks: .*",
    ),
    wrong(
        "pattern_of_norms_too",
        listed,
        "blocks|norm",
        "final_norm",
        "^blocks/",
        "a list of blocks: the pattern matches the last norm",
    ),
    wrong(
        "pattern_forgets_norms",
        listed,
        r"blocks/\d+/(up|down)",
        r"blocks/\d+/norm",
        "^blocks/",
        "a list of blocks: the pattern forgets their norms",
    ),
    wrong(
        "pattern_forgets_norms_stacked",
        stacked,
        r"blocks/(up|down)",
        "blocks/norm",
        "^blocks/",
        "a stack of blocks: the pattern forgets their norms",
    ),
    wrong(
        "pattern_forgets_biases_stacked",
        stacked,
        "kernel$|scale$",
        "blocks/.*bias|embed|final_norm|head",
        "^blocks/",
        "a stack of blocks: the pattern matches kernels and scales",
    ),
    wrong(
        "pattern_forgets_norms_elsewhere",
        norms_outside,
        "^mlp/",
        "norms/",
        "^(mlp|norms)/",
        "stacked norms in another subtree",
    ),
    wrong(
        "pattern_of_layer_names",
        layers_named,
        "layer_",
        "final_layer_norm|embed_layer",
        r"^layer_\d+/",
        "Linen's names: layer_ matches final_layer_norm, too",
    ),
    wrong(
        "pattern_of_embedding",
        layers_named,
        r"layer_\d|embed",
        "embed_layer",
        r"^layer_\d+/",
        "Linen's names: the embedding is in no branch",
    ),
    wrong(
        "pattern_of_nothing",
        listed,
        "^layers/",
        "layers",
        "^blocks/",
        "a list of blocks: the pattern matches nothing",
    ),
    wrong(
        "pattern_of_head",
        listed,
        "blocks|head",
        "head",
        "^blocks/",
        "a list of blocks: the readout is in no branch",
    ),
    Setup(
        "layers_named",
        "Linen's names",
        layers_named,
        DEPTH | {"branch": r"^layer_\d+/"},
        grow=DEEPER,
    ),
    Setup(
        "pyramid_alike",
        "two stages that grow alike",
        pyramid,
        {"depth": (4, 16), "branch": r"^stage\d/"},
        grow={"a": (2, 8), "b": (2, 8)},
    ),
    Setup(
        "pyramid_unlike",
        "two stages, of 2 and 2 blocks in the base, 8 and 4 in the target",
        pyramid,
        DEPTH | {"branch": r"^stage1/"},
        grow={"a": (2, 8), "b": (2, 4)},
        asks="stage2/blocks",
        # One stream adds up all of them: 4 blocks to 12.
        remedies=({"depth": (4, 12), "branch": r"^stage\d/"},),
    ),
    Setup(
        "pyramid_resnet",
        "stages of 2 and 3 blocks to 8 and 12: 5 blocks to 20, ratios alike",
        pyramid,
        {"depth": (5, 20), "branch": r"^stage\d/"},
        grow={"a": (2, 8), "b": (3, 12)},
    ),
    Setup(
        "alternating_alike",
        "two lists in turn",
        alternating,
        DEPTH | {"branch": "_blocks/"},
        grow={"attn": (2, 8), "mlp": (2, 8)},
    ),
    Setup(
        "members_differ_same_depth",
        "a list whose members widen by 4 and by 2",
        members_differ,
        grow=SAME,
    ),
    Setup(
        "members_differ_deeper",
        "a list whose members widen by 4 and by 2: nothing tells what the third gets",
        members_differ,
        DEPTH | {"branch": "^blocks/"},
        grow=DEEPER,
        asks=r"blocks/",
        either=True,
        instead=lambda n, L: members_differ(n, 8),
        remedies=({"depth": (8, 8)},),
    ),
    Setup(
        "scanned_groups",
        "a scan over groups of two layers",
        scanned_groups,
        DEPTH | {"branch": "^groups/"},
        grow=DEEPER,
    ),
    Setup(
        "norms_outside",
        "stacked norms in another subtree",
        norms_outside,
        DEPTH | {"branch": "^(mlp|norms)/"},
        grow=DEEPER,
    ),
    Setup(
        "gpt_stack",
        "a scanned GPT in plain JAX",
        gpt_stack,
        DEPTH | {"branch": "/blocks/"},
        grow=DEEPER,
    ),
    Setup(
        "gpt_stack_not_said",
        "a scanned GPT in plain JAX",
        gpt_stack,
        grow=DEEPER,
        asks="transformer/blocks/",
        remedies=(DEPTH | {"branch": "/blocks/"},),
    ),
    Setup(
        "conv_stack",
        "stacked convolutions",
        conv_stack,
        DEPTH | {"branch": "^blocks/"},
        grow=DEEPER,
    ),
    Setup(
        "conv_stack_same",
        "stacked convolutions",
        conv_stack,
        {"depth": (2, 2), "branch": "^blocks/"},
        grow=SAME,
    ),
    Setup(
        "conv_stack_not_said",
        "stacked convolutions",
        conv_stack,
        grow=DEEPER,
        asks="blocks/",
        remedies=(DEPTH | {"branch": "^blocks/"},),
    ),
    Setup(
        "torch_stack",
        "torch.func.stack_module_state",
        torch_stack,
        DEPTH | {"branch": r"^blocks\.", "layout": "out_in"},
        grow=DEEPER,
        style="flat",
    ),
    Setup(
        "torch_stack_not_said",
        "torch.func.stack_module_state",
        torch_stack,
        {"layout": "out_in"},
        grow=DEEPER,
        style="flat",
        asks=r"blocks\.",
        remedies=(DEPTH | {"branch": r"^blocks\."},),
    ),
    Setup(
        "torch_stack_same_not_said",
        "torch.func.stack_module_state: (2, out, in) reads as 2 outputs",
        torch_stack,
        {"layout": "out_in"},
        grow=SAME,
        style="flat",
        asks=r"blocks\.",
        either=True,
        remedies=({"depth": (2, 2), "branch": r"^blocks\."},),
    ),
    Setup(
        "deeper_only",
        "only depth grows",
        deeper_only,
        DEPTH | {"branch": "^blocks/"},
        grow=DEEPER | {"n": (64, 64)},
        asks="readout|width|delta",
        either=True,
        remedies=({"readout": None},),
    ),
]
