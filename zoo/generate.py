"""`generate`: continue token sequences with a decoder of the zoo."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from .decoder import Decoder


def generate(
    model: nnx.Module,
    tokens: Int[Array, "batch time"],
    steps: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "batch longer"]:
    """Continue sequences, token by token, with a cache of keys and values.

    Dropout and drop path are off. The function compiles once per shape of `tokens`,
    `steps` and `top_k`.

    Args:
      model: a GPT or Llama of the zoo.
      tokens: the prompts, at least one token each, all of the same length.
      steps: number of tokens to add.
      temperature: 0 takes the most likely token; otherwise tokens are sampled from
        softmax(logits / temperature).
      top_k: sample from the k most likely tokens only; None for all.
      key: random key; needed if temperature is above 0.

    Returns:
      `tokens`, followed by `steps` more, of shape (batch, time + steps).

    Raises:
      ValueError: the model is not a decoder; the tokens have another shape, or are not
        whole numbers, or lie outside of the vocabulary; prompt and new tokens exceed
        the context; an option is out of range or missing.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("llama", width=16, depth=2, heads=2, rngs=nnx.Rngs(0))
      >>> zoo.generate(model, jnp.array([[1, 2, 3]]), 5).shape
      (1, 8)
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"generate needs a decoder, not a {type(model).__name__}; pass a gpt or "
            "llama"
        )
    tokens = jnp.asarray(tokens)
    model.check_tokens(tokens)
    batch, time = tokens.shape
    if min(batch, time, steps) < 1:
        raise ValueError(
            f"there are {batch} prompts of {time} tokens, and steps={steps}; all three "
            "must be at least 1"
        )
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    vocab = model.embedding.shape[0]
    if not isinstance(tokens, jax.core.Tracer):
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocab:
            raise ValueError(
                f"tokens range from {least} to {most}, but the vocabulary has {vocab} "
                "tokens; use the tokenizer that the model was trained with"
            )
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"top_k={top_k} must lie in [1, {vocab}], the vocabulary")
    if temperature > 0 and key is None:
        raise ValueError(
            f"temperature={temperature} samples tokens: pass key=jax.random.key(seed), "
            "or temperature=0"
        )
    graph, weights = nnx.split(model)
    drawn = jax.random.key(0) if key is None else key
    run = functools.partial(_generate, graph, steps, temperature > 0, top_k)
    return run(weights, tokens, jnp.float32(temperature or 1.0), drawn)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    graph: nnx.GraphDef,
    steps: int,
    draws: bool,
    top_k: int | None,
    weights: nnx.State,
    tokens: Int[Array, "batch time"],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
) -> Int[Array, "batch longer"]:
    model = nnx.merge(graph, weights)
    batch, time = tokens.shape

    def choose(
        logits: Float[Array, "batch vocab"], key: Key[Array, ""]
    ) -> Int[Array, " batch"]:
        if not draws:
            return jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        chosen = jax.random.categorical(key, logits / temperature)
        return chosen.astype(tokens.dtype)

    keys = jax.random.split(key, steps)
    logits, cache = model.decode(tokens, model.cache(batch, time + steps), 0)
    first = choose(logits[:, -1], keys[0])

    def step(carry, xs):
        token, cache = carry
        position, key = xs
        logits, cache = model.decode(token[:, None], cache, position)
        token = choose(logits[:, 0], key)
        return (token, cache), token

    positions = time + jnp.arange(steps - 1)
    _, more = jax.lax.scan(step, (first, cache), (positions, keys[1:]))
    return jnp.concatenate([tokens, first[:, None], more.T], axis=1)
