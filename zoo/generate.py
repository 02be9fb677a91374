"""`generate`: continue token sequences with a decoder of the zoo."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from .families.decoder import Decoder, end_tokens


def generate(
    model: nnx.Module,
    tokens: Int[Array, "batch time"] | Sequence[Sequence[int]],
    steps: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Sequence[int] | None = None,
    key: Key[Array, ""] | Key[Array, " batch"] | None = None,
) -> Int[Array, "batch longer"]:
    """Continue sequences, token by token, with a cache of keys and values.

    Dropout and drop path are off. The function compiles once per shape of `tokens`,
    `steps`, `top_k` and number of end tokens. A sequence gets the same continuation
    alone and in a batch, up to rounding.

    Args:
      model: a GPT or Llama of the zoo.
      tokens: the prompts, at least one token each. Prompts of different lengths are a
        list of lists.
      steps: number of tokens to add.
      temperature: 0 takes the most likely token; otherwise tokens are sampled from
        softmax(logits / temperature).
      top_k: sample from the k most likely tokens only; None for all.
      top_p: sample from the most likely tokens whose probabilities sum to at least
        top_p, after temperature and `top_k`; None for all.
      eos: token or tokens that end a sequence; `()` for none. None for the model's
        option `eos`, which `zoo.load_pretrained` reads from files of transformers.
      key: random key, or one for each sequence; needed if temperature is above 0.

    Returns:
      `tokens`, followed by `steps` more, of shape (batch, time + steps), where `time`
      is the length of the longest prompt. Shorter prompts are padded on the left with
      0. After its end token, a sequence repeats it.

    Raises:
      ValueError: the model is not a decoder; the tokens have another shape, or are not
        whole numbers, or lie outside of the vocabulary; prompt and new tokens exceed
        the context; an option is out of range or missing.

    Source of top_p: Holtzman et al. 2019, arXiv:1904.09751, section 3.1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("llama", width=16, depth=2, heads=2, rngs=nnx.Rngs(0))
      >>> zoo.generate(model, jnp.array([[1, 2, 3]]), 5).shape
      (1, 8)
      >>> zoo.generate(model, [[1, 2, 3], [4]], 5)[:, :3].tolist()
      [[1, 2, 3], [0, 0, 4]]
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"generate needs a decoder, not a {type(model).__name__}; pass a gpt or "
            "llama"
        )
    prompts, start = _padded(tokens)
    model.check_tokens(prompts)
    batch, time = prompts.shape
    shortest = time if start is None else time - int(start.max())
    if min(batch, shortest, steps) < 1:
        raise ValueError(
            f"there are {batch} prompts of {shortest} tokens, and steps={steps}; all "
            "three must be at least 1"
        )
    vocab = model.embedding.shape[0]
    if not isinstance(prompts, jax.core.Tracer):
        least, most = int(prompts.min()), int(prompts.max())
        if least < 0 or most >= vocab:
            raise ValueError(
                f"tokens range from {least} to {most}, but the vocabulary has {vocab} "
                "tokens; use the tokenizer that the model was trained with"
            )
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"top_k={top_k} must lie in [1, {vocab}], the vocabulary")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]")
    ends = model.eos if eos is None else end_tokens(eos, vocab)
    if temperature > 0 and key is None:
        raise ValueError(
            f"temperature={temperature} samples tokens: pass key=jax.random.key(seed), "
            "or temperature=0"
        )
    keys = jax.random.key(0) if key is None else key
    if keys.ndim == 0:
        keys = jax.vmap(functools.partial(jax.random.fold_in, keys))(jnp.arange(batch))
    elif keys.shape != (batch,):
        raise ValueError(
            f"key has shape {keys.shape}; expected one key, or {batch}, one for each "
            "sequence"
        )
    graph, weights = nnx.split(model)
    run = functools.partial(_generate, graph, steps, temperature > 0, top_k)
    generated: Array = run(
        weights,
        jnp.asarray(prompts),
        start,
        jnp.float32(temperature or 1.0),
        None if top_p in (None, 1) else jnp.float32(top_p),
        jnp.asarray(ends, jnp.int32),
        keys,
    )
    return generated


def _padded(tokens: Any) -> tuple[Any, Int[np.ndarray, " batch"] | None]:
    """Prompts as one array, and the number of padding tokens before each, if any.

    Raises:
      ValueError: neither an array nor a list of prompts.
    """
    if isinstance(tokens, jax.Array):
        return tokens, None
    try:
        if isinstance(tokens, list | tuple):
            lengths = [len(row) for row in tokens if np.ndim(row) == 1]
            if len(lengths) == len(tokens) and len(set(lengths)) > 1:
                padding = max(lengths) - np.array(lengths, np.int32)
                pairs = zip(tokens, padding.tolist(), strict=True)
                rows = [np.pad(np.asarray(row, _int(row)), (n, 0)) for row, n in pairs]
                return np.stack(rows), padding
        return np.asarray(tokens), None
    except jax.errors.TracerArrayConversionError:
        return jnp.asarray(tokens), None
    except (TypeError, ValueError):
        raise ValueError(
            "tokens must be whole numbers of shape (batch, time), or a list of "
            "prompts, each a list of whole numbers"
        ) from None


def _int(row: Any) -> type | None:
    """The dtype of an empty prompt, which NumPy would take for floats."""
    return None if len(row) else int


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    graph: nnx.GraphDef[Any],
    steps: int,
    draws: bool,
    top_k: int | None,
    weights: nnx.State[Any, Any],
    tokens: Int[Array, "batch time"],
    start: Int[Array, " batch"] | None,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""] | None,
    eos: Int[Array, " ends"],
    keys: Key[Array, " batch"],
) -> Int[Array, "batch longer"]:
    model = nnx.merge(graph, weights)
    assert isinstance(model, Decoder)
    batch, time = tokens.shape

    def choose(
        logits: Float[Array, "batch vocab"], step: int | Int[Array, ""]
    ) -> Int[Array, " batch"]:
        if not draws:
            return jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        now = jax.vmap(lambda key: jax.random.fold_in(key, step))(keys)
        chosen = sample(now, logits / temperature, top_k, top_p)
        return chosen.astype(tokens.dtype)

    def is_end(token: Int[Array, " batch"]) -> Bool[Array, " batch"]:
        return (token[:, None] == eos[None]).any(axis=1)

    def goes_on(state: tuple[Any, ...]) -> Bool[Array, ""]:
        step, _, ended, *_ = state
        more: Array = (step < steps) & ~ended.all()
        return more

    def add(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, token, ended, cache, out = state
        logits, cache = model.decode(token[:, None], cache, time + step - 1, start)
        token = jnp.where(ended, token, choose(logits[:, 0], step))
        out = jax.lax.dynamic_update_slice(out, token[:, None], (0, step))
        return step + 1, token, ended | is_end(token), cache, out

    logits, cache = model.decode(tokens, model.cache(batch, time + steps), 0, start)
    first = choose(logits[:, -1], 0)
    out = jnp.zeros((batch, steps), tokens.dtype).at[:, 0].set(first)
    state = (jnp.asarray(1), first, is_end(first), cache, out)
    step, last, _, _, out = jax.lax.while_loop(goes_on, add, state)
    # Once every sequence has ended, each repeats its end token.
    out = jnp.where(jnp.arange(steps)[None] < step, out, last[:, None])
    return jnp.concatenate([tokens, out], axis=1)


def sample(
    keys: Key[Array, " batch"],
    logits: Float[Array, "batch vocab"],
    top_k: int | None,
    top_p: Float[Array, ""] | None,
) -> Int[Array, " batch"]:
    """Draw a token for each row from its likeliest tokens; see `generate`."""
    draw = jax.vmap(jax.random.categorical)
    if top_k is None and top_p is None:
        return draw(keys, logits)
    # From the likeliest token on; of equal ones, the first.
    ranked, ids = jax.lax.top_k(logits, top_k or logits.shape[-1])
    if top_p is not None:
        likely = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(likely, axis=-1) - likely
        # The first token has nothing before it, so that one always remains.
        ranked = jnp.where(before < top_p, ranked, -jnp.inf)
    return jnp.take_along_axis(ids, draw(keys, ranked)[:, None], axis=-1)[:, 0]
