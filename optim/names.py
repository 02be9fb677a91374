"""Guess the function of a parameter from its name, where shapes are ambiguous."""

import re

# Names of the array itself; the layer's name is the component before it.
_ARRAYS = {"kernel", "weight", "weights", "w", "embedding", "embeddings", "table"}
# Names of kernels (torch gives them to tables too).
_KERNELS = {"kernel", "w", "weight", "weights"}

_WEIGHT = re.compile(r"(?!wte|wpe)w(_[a-z]{1,3}|[a-z]{1,2})?(_?\d+)?")

_VECTOR = re.compile(r"(b|(.*_)?(bias|offset|scale|beta|gamma|gain))\d*", re.IGNORECASE)
_READS = re.compile(
    r"(query|key|value|qkv|kv|q|k|v)(_proj(ection)?|_linear|_dense)?|"
    r"(w|to_|c_|proj_|linear_)(q|k|v|qkv|kv)|in_proj_qkv|"
    r"w?(q|k|v|kv)_(a|b|up|down)(_proj)?"
)
_FUSED = re.compile(r".*(qkv|kv|fused).*")
_WRITES = re.compile(
    r"(attn_|attention_)?(out|output|o)(_proj(ection)?|_linear|_dense)?|"
    r"wo|to_out|proj_out|c_proj|proj"
)
_CONVOLUTION = re.compile(r"conv", re.IGNORECASE)
_TRANSPOSED = re.compile(
    r"transpose|deconv|upconv|up_conv|upsampl|conv_?up|(^|[/._])(up|convt|to_rgb)\d*"
    r"([/._]|$)",
    re.IGNORECASE,
)
_COPIES = re.compile(
    r"(^|[/._])(\w*_)?(experts?|moe|stacked|stack|scan\w*)([/._]|$)|"
    r"(^|/)(layers|blocks)(/(?!\d)|$)",
    re.IGNORECASE,
)
_EXPERTS = re.compile(r"(^|[/._])(\w*_)?(experts?|moe)([/._]|$)", re.IGNORECASE)

# A table of entries: rows are looked up, or added at their position.
_TABLE_WORDS = (
    "embed|embeds|embedding|embeddings|emb|wte|wpe|tok|token|tokens|vocab|vocabulary|"
    "pos|position|positions|positional|posembed|codebook|codes|codewords|table|lookup|"
    "latents|queries|memory|prompt|prompts|prefix|register|registers|slots|prototypes|"
    "anchors|time|rel|relative|relpos|dictionary"
)
_TABLE = re.compile(rf"(^|[/._])(\w*_)?({_TABLE_WORDS})(_\w*)?\d*([/._]|$)", re.I)
_LOOKED_UP = re.compile(
    r"(\w*_)?(tok|token|tokens|word|words|vocab|vocabulary|wte|item|items|wpe)"
    r"(_?(embed|embeds|embedding|embeddings|emb|embedder|embedders|table|lookup))?|"
    r"(\w*_)?(pos|position|positions|positional|type|segment)_?"
    r"(embed|embeds|embedding|embeddings|emb)|embed_(tokens|positions)|\w+_embeddings",
    re.IGNORECASE,
)
# Tables that are never tied to a readout.
_PLACES = re.compile(
    r"(^|[/._])\w*(pos|position|wpe|patch|type|segment|time|register|cls|prompt|latent|"
    r"query|queries|class|classes|label|labels|y_embed|codebook|quantizer|slots|memory)"
    r"\w*([/._]|$)",
    re.IGNORECASE,
)
_EMBEDDING_ARRAY = {"embedding", "embeddings"}

_READOUT = re.compile(
    r"(\w*_)?(head|readout|unembed|unembedding|unembedder|logits?|classifier|clf)"
    r"|(\w*_)?(fc|dense|linear|proj|projection|layer|embed)_?(out|output|final|last)|"
    r"(out|output|final|last)(_(\w*))?|fc|predictions?|decoder|score|probe|w_?out|"
    r"to_logits|unembed\w*|w_?h?[oy]|\w*2(tag|out|vocab|logits?|class(es)?)",
    re.IGNORECASE,
)
_SURE_READOUT = re.compile(
    r"(lm_|mlm_|cls_|classification_|output_|prediction_|final_)?head|readout|"
    r"unembed|unembedding|unembedder|logits?|logits_dense|to_logits|classifier|"
    r"embed_out|lm_logits|output|out|final|fc_out|\w*2(tag|vocab|logits?|class(es)?)",
    re.IGNORECASE,
)
# Parameters inside a model that have a fixed fan-out too.
_INNER = re.compile(
    r"(^|[/._])\w*(router|routing|gate|gating|switch|key|value|query|k_proj|v_proj|"
    r"q_proj|critic|aux|reward|halt|mask|attn|attention|[qkv])([/._]|$)",
    re.IGNORECASE,
)
_DOT_PRODUCT = re.compile(
    r"att(n|ention)?_(src|dst|l|r|i|j|vec|edge|key|query)|a_(l|r)"
)
_DECAY = re.compile(
    r"(\w*_)?(decays?|states?|bonus|faaaa|maa|lambda)(_?\d+)?|(a_)?log(_\w*|\d*)|"
    r"time_\w*",
    re.IGNORECASE,
)
_LOGITS = re.compile(r"(lm_|mlm_|cls_)?head|readout|unembed\w*|logits?|classifier")
_NORM = re.compile(
    r"\w*(layer|batch|group|instance|rms)_?norm(alization)?\d*(_\w+)?|"
    r"(\w*_)?(norm(alization)?s?|ln|bn|gn|rms)\d*(_\w+)?",
    re.IGNORECASE,
)
_ROUTES = re.compile(
    r"(^|[/._])\w*(router|routing|switch|experts?|moe)\w*([/._]|$)", re.IGNORECASE
)
_SKIPS = re.compile(r"skip|shortcut|downsample|identity|residual_proj", re.IGNORECASE)
_STATE_SPACE = re.compile(
    r"(?i)lambda\w*|a_log|log_a\w*|log_step|log_dt|dt_bias|log_lambda\w*|a_re|a_im|"
    r"a_imag|nu_log|theta_log"
)


def parts(path: str) -> list[str]:
    """Components of a path; libraries join them by slashes or dots."""
    return [part for part in re.split(r"[/.]", path) if part and part != "~"]


def array(path: str) -> str:
    """The name of the array itself, e.g. "kernel"."""
    names = [p for p in parts(path) if p != "array"]  # Haliax's NamedArray
    return (names or [""])[-1]


def layer(path: str) -> str:
    """The name of the layer: the last one that is not an array's or a number."""
    names = [p for p in parts(path) if not p.isdigit() and p != "array"]
    while len(names) > 1 and names[-1] in _ARRAYS:
        names.pop()
    return names[-1] if names else ""


def is_vector(path: str) -> bool:
    """Whether the array has a name of a bias or gain."""
    name = array(path)
    # `B` is a matrix of state-space models; `lora_b` one of low rank.
    return _VECTOR.fullmatch(name) is not None and not re.fullmatch(r"B\d*", name)


def norm(path: str) -> bool:
    """Whether a module of the path, or the array, is a normalization by name."""
    return any(_NORM.fullmatch(part) for part in parts(path))


def routes(path: str) -> bool:
    """Whether the parameter belongs to a router or a mixture of experts, by name."""
    return _ROUTES.search(path) is not None


def is_kernel(path: str) -> bool:
    """Whether the array has a name that only kernels have."""
    return array(path) in _KERNELS


def kernel_like(path: str) -> bool:
    """Whether the array may be a kernel by name, e.g. `w_h` of a recurrent layer."""
    return is_kernel(path) or _WEIGHT.fullmatch(array(path).lower()) is not None


def reads(path: str) -> bool:
    """Whether the layer computes queries, keys or values."""
    return _READS.fullmatch(layer(path).lower()) is not None


def writes(path: str) -> bool:
    """Whether the layer maps heads back to the residual stream."""
    return _WRITES.fullmatch(layer(path).lower()) is not None


def fused(path: str) -> bool:
    """Whether the layer computes several of queries, keys and values at once."""
    return _FUSED.fullmatch(layer(path).lower()) is not None


def convolution(path: str) -> bool:
    """Whether the kernel belongs to a convolution, by name."""
    return _CONVOLUTION.search("/".join(parts(path)[-2:])) is not None


def transposed(path: str) -> bool:
    """Whether the kernel may belong to a transposed convolution, by name."""
    return _TRANSPOSED.search(path) is not None


def copies(path: str) -> bool:
    """Whether the first axis counts experts or layers rather than a window, by name."""
    return sure_copies(path) or not (convolution(path) or is_kernel(path))


def sure_copies(path: str) -> bool:
    """Whether the name alone says that the first axis counts experts or layers."""
    return not convolution(path) and _COPIES.search(path) is not None


def experts(path: str) -> bool:
    """Whether the first axis counts experts, by name."""
    return _EXPERTS.search(path) is not None


def embedding_array(path: str) -> bool:
    """Whether the array belongs to an embedding layer of Flax or Haiku."""
    return array(path) in _EMBEDDING_ARRAY


def table(path: str) -> bool:
    """Whether the array is a table of entries, by name."""
    sure = array(path) in {"kernel", "w"}
    return not sure and _TABLE.search(f"{layer(path)}/{array(path)}") is not None


def looked_up(path: str) -> bool:
    """Whether the array is a table of tokens or positions, by name."""
    return _LOOKED_UP.fullmatch(layer(path)) is not None or embedding_array(path)


def places(path: str) -> bool:
    """Whether the table is one of positions, types or patches, by name."""
    return _PLACES.search(path) is not None


def readout(path: str) -> bool:
    """Whether the layer has a readout's name."""
    return _READOUT.fullmatch(layer(path)) is not None


def sure_readout(path: str) -> bool:
    """Whether the layer has a name that only a model's main readout has."""
    return _SURE_READOUT.fullmatch(layer(path)) is not None


def logits(path: str) -> bool:
    """Whether the layer has a readout's name that no first layer has."""
    return _LOGITS.fullmatch(layer(path).lower()) is not None


def inner(path: str) -> bool:
    """Whether the layer is an inner one (router, gate, key, value, ...), by name."""
    return _INNER.search(path) is not None


def is_bias(path: str) -> bool:
    """Whether the array is a bias by name."""
    return re.fullmatch(r"(.*_)?bias\d*", array(path)) is not None


def decays(path: str) -> bool:
    """Whether the array holds decays, steps or states per channel, by name."""
    return state_space(path) or _DECAY.fullmatch(array(path)) is not None


def dot_product(path: str) -> bool:
    """Whether the array is a vector per head of graph attention, by name."""
    return _DOT_PRODUCT.fullmatch(array(path)) is not None


def reads_vector(path: str) -> bool:
    """Whether a vector has the name of the weights of one output."""
    if any(re.search(r"(?i)norm|\bln|rms|scale|gain", part) for part in parts(path)):
        return False
    if is_vector(path):
        return False
    head = re.fullmatch(r"(?i)(\w*_)?(head|score|scorer|critic)", layer(path))
    in_layer = len(parts(path)) > 1 and array(path) in ("w", "weights")
    kernel = in_layer or array(path) == "kernel"
    return kernel or sure_readout(path) or head is not None


def on_skip(path: str) -> bool:
    """Whether the parameter is part of a shortcut, by name."""
    return _SKIPS.search(path) is not None


def low_rank_out(path: str) -> bool:
    """Whether the array is the second one of a low-rank pair, by name."""
    name = parts(path)[-2:]
    return name[-1:] == ["lora_b"] or name in (["lora", "b"], ["lora", "B"])


def state_space(path: str) -> bool:
    """Whether the array has a name from state-space models."""
    return _STATE_SPACE.fullmatch(array(path)) is not None


def open_numbers(path: str) -> str:
    """The path with "#" for every number; equal for all blocks of a list."""
    return re.sub(r"\d+", "#", path)


def open_lists(path: str) -> str:
    """The path with "#" for numbers of blocks; `w1` and `fc2` keep theirs."""
    return re.sub(r"(?<![A-Za-z])\d+(?![A-Za-z])", "#", path)


def renamed(path: str) -> str:
    """The path with another name in place of the parameter's own.

    A pattern that matches both paths names a module, and not this parameter alone.

    Examples:
      >>> renamed("head/gate"), renamed("head/Dense_0/kernel"), renamed("head/1")
      ('head/zzz', 'head/zzz/kernel', 'head/987')
    """
    pieces = re.split(r"([/.])", path)
    own = len(pieces) - 1
    while own > 1 and pieces[own] in _ARRAYS | {"array"}:
        own -= 2
    pieces[own] = "987" if pieces[own].isdigit() else "zzz"
    return "".join(pieces)


def pattern(*paths: str) -> str:
    """An anchored regular expression that matches these paths.

    Several paths that differ in numbers only are matched by one `\\d+`.

    Examples:
      >>> print(pattern("head/kernel"))
      ^head/kernel$
      >>> print(pattern("blocks/0/w", "blocks/1/w", "out.w"))
      ^(blocks/\\d+/w|out\\.w)$
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(open_numbers(path), []).append(path)
    shown = [
        re.escape(group[0])
        if len(group) == 1
        else re.escape(key).replace(r"\#", r"\d+")
        for key, group in groups.items()
    ]
    return f"^{shown[0]}$" if len(shown) == 1 else f"^({'|'.join(shown)})$"
