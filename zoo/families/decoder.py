"""What GPT and Llama share: token embedding, causal blocks, readout, decoding."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ..family import Count
from ..layers.attention import (
    BlockOptions,
    Cache,
    Places,
    Transformer,
    TransformerOptions,
    applied,
    branch_factor,
)
from ..layers.basic import Dense, single, times
from ..plan import Plan
from ..sharding import weight
from ..weights.configs import Config
from ..weights.sources import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions(TransformerOptions):
    """Options of every decoder.

    Attributes:
      vocab_size: number of tokens.
      context: maximum length of a sequence.
      tied: use the token embedding as the readout. It is trained as an embedding, and
        the logits are multiplied by 1/m (under SP, by 1).
      head: whether the model computes logits; False: only features, as transformers'
        base models, e.g. `LlamaModel`.
      eos: token or tokens that end a text, where `zoo.generate` stops; None for none.
      zero_readout: initialize the readout with zeros; not if it is tied.
    """

    vocab_size: Count = 256
    context: Count = 256
    tied: bool = True
    head: bool = True
    eos: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        end_tokens(self.eos, self.vocab_size)
        if self.tied and self.zero_readout:
            raise ValueError(
                "zero_readout=True needs tied=False: a tied readout is the embedding, "
                "which must not start at zero"
            )


class Decoder(Transformer):
    """Base class of language models: each token attends to itself and earlier ones."""

    def build_decoder(
        self, options: DecoderOptions, block: BlockOptions, rngs: nnx.Rngs
    ) -> None:
        """Create the embedding, the position table, the blocks and the readout.

        Args:
          options: of the family.
          block: of each block. Without rotary positions the model has a position table.
        """
        self.context = options.context
        self.eos = end_tokens(options.eos, options.vocab_size)
        # The same size as other weights of the base, 1/√N.
        gain = self.plan["embed"].base ** -0.5
        self.embedding, self.multiplier = self.plan.param(
            rngs.params, ("vocab", "embed"), inputs=1, init="normal", gain=gain
        )
        # Assigned once: NNX does not accept a variable for an attribute that was None.
        table: nnx.Variable[Any] | None = None
        self.position_multiplier = 1.0
        if block.rotary is None:
            table, self.position_multiplier = self.plan.param(
                rngs.params, ("positions", "embed"), inputs=0, init="normal", gain=gain
            )
        self.position = table
        self.build_blocks(block, options.depth, rngs)
        self.tied_multiplier = tied_multiplier(self.plan)
        self.head = options.head
        self.readout = (
            None
            if options.tied or not options.head
            else Dense(
                self.plan,
                ("embed", "vocab"),
                init="zeros" if options.zero_readout else "fan_in",
                rngs=rngs,
            )
        )
        self.build_noise(rngs)

    def __call__(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the token that follows each token.

        Args:
          tokens: in [0, vocab_size); other values give NaN.
          rngs: random state of this call, instead of the model's own.

        Raises:
          ValueError: the sequence is longer than the context; the tokens have another
            shape, or are not whole numbers; or the model has no head.
        """
        return self.logits(self.features(tokens, rngs=rngs))

    def features(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time embed"]:
        """Features before the readout: the normalized output of the last block.

        Args:
          tokens: as in a call.
          rngs: random state of this call, instead of the model's own.

        Returns:
          Features of every token, of shape (batch, time, width).
        """
        self.check_tokens(tokens)
        return applied(self.norm, self.run_blocks(self._embed(tokens), rngs))

    def cache(self, batch: int, length: int) -> Cache:
        """An empty cache of keys and values, for `decode`.

        Args:
          batch: number of sequences.
          length: maximal number of tokens per sequence.

        Raises:
          ValueError: the length is above the context.
        """
        self._check(length)
        heads = self.plan["kv_heads" if self.plan.has("kv_heads") else "heads"].size
        shape = (self.depth, batch, length, heads, self.plan["head_dim"].size)
        return Cache(*(jnp.zeros(shape, self.plan.dtype) for _ in range(2)))

    def decode(
        self,
        tokens: Int[Array, "batch time"],
        cache: Cache,
        position: int | Int[Array, ""],
        start: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time vocab"], Cache]:
        """Logits of the token that follows each new token, without noise.

        Args:
          tokens: new tokens, which follow those of the cache.
          cache: from `cache`, or from the previous call.
          position: number of tokens in the cache.
          start: for sequences that are padded on the left, the number of padding tokens
            of each; the same in every call. Logits of padding have no meaning.

        Returns:
          (logits, cache with the new tokens). Under `jax.jit`, where `position` is not
          known in advance, both have NaN if the new tokens do not fit into the cache.

        Raises:
          ValueError: the new tokens do not fit into the cache, or the cache is of
            another batch.

        Examples:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from mupax import zoo
          >>> model = zoo.create("gpt", width=16, depth=2, heads=2, rngs=nnx.Rngs(0))
          >>> tokens = jnp.array([[0, 5, 6], [7, 8, 9]])  # the first 0 is padding
          >>> start = jnp.array([1, 0])
          >>> logits, cache = model.decode(tokens, model.cache(2, 8), 0, start)
          >>> logits, cache = model.decode(tokens[:, :1], cache, 3, start)
          >>> logits.shape
          (2, 1, 256)
        """
        self.check_tokens(tokens)
        (batch, time), (_, known, length, *_) = tokens.shape, cache.key.shape
        self._check(length)
        if batch != known:
            raise ValueError(
                f"the cache holds {known} sequences, and tokens holds {batch}; use "
                f"model.cache({batch}, length)"
            )
        known_position = not isinstance(position, jax.core.Tracer)
        if known_position and not 0 <= int(position) <= length - time:
            raise ValueError(
                f"{time} tokens at position={int(position)} do not fit into a cache of "
                f"{length} tokens; create a longer one by model.cache(batch, length)"
            )
        position = jnp.asarray(position, jnp.int32)
        if start is not None:
            start = jnp.asarray(start)
            if start.shape != (batch,):
                raise ValueError(
                    f"start has shape {start.shape}; expected ({batch},), the number "
                    "of padding tokens of each sequence"
                )
        places = Places.of(position, time, length, start)
        x = self._embed(tokens, places.positions)
        # JAX would move the tokens to the cache's end, where they overwrite others.
        fits = (position >= 0) & (position <= length - time)
        x = jnp.where(fits, x, jnp.full_like(x, jnp.nan))
        x, cache = self.decode_blocks(x, cache, places)
        return self.logits(applied(self.norm, x)), cache

    def check_tokens(self, tokens: Int[Array, "batch time"]) -> None:
        """Raise a `ValueError` for tokens of another shape or dtype, or too many."""
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens are {tokens.dtype} of shape {tokens.shape}; expected whole "
                "numbers of shape (batch, time)"
            )
        self._check(tokens.shape[1])

    def _check(self, time: int) -> None:
        if time > self.context:
            raise ValueError(
                f"a sequence of {time} tokens does not fit into "
                f"context={self.context}; shorten it, or create the model with a "
                "larger context"
            )

    def _table(self) -> Float[Array, "vocab embed"]:
        return times(weight(self.embedding, self.plan.dtype), self.multiplier)

    def _embed(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
    ) -> Float[Array, "batch time embed"]:
        """Embed tokens at these positions, by default 0, 1, ..."""
        table = self._table()
        # Negative numbers would count from the end; past it, NaN is returned.
        tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
        x = jnp.take(table, jnp.where(tokens < 0, len(table), tokens), axis=0)
        if self.position is None:
            return x
        table = weight(self.position, self.plan.dtype)
        if positions is None:
            rows = table[None, : tokens.shape[1]]
        else:
            rows = jnp.take(table, positions, axis=0, mode="clip")
        return x + times(rows, self.position_multiplier)

    def logits(
        self, features: Float[Array, "batch time embed"]
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the token that follows each token, float32 at least.

        Args:
          features: from `features`, of all tokens or of some.

        Raises:
          ValueError: the model has no head.
        """
        if not self.head:
            raise ValueError(
                f"this {type(self).__name__} has no head, so it computes no logits; "
                "call model.features(tokens) instead"
            )
        if self.readout is None:
            logits = times(features @ self._table().T, self.tied_multiplier)
        else:
            logits = self.readout(features)
        logits = logits * self.plan.output
        return logits.astype(single(logits.dtype))


def end_tokens(eos: int | Sequence[int] | None, vocab: int) -> tuple[int, ...]:
    """The tokens that end a sequence, as a tuple.

    Args:
      eos: a token, several, or None for none.
      vocab: number of tokens.

    Raises:
      ValueError: one is not a whole number in [0, vocab).

    Examples:
      >>> end_tokens(2, 10), end_tokens([1, 2], 10), end_tokens(None, 10)
      ((2,), (1, 2), ())
    """
    given: Any = eos
    several = isinstance(given, Sequence) or np.ndim(given) > 0
    tokens: Any = () if eos is None else eos if several else (eos,)
    for token in tokens:
        whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab:
            raise ValueError(
                f"eos={eos!r} must be tokens in [0, {vocab - 1}], the vocabulary"
            )
    return tuple(map(int, tokens))


def tied_multiplier(plan: Plan) -> float:
    """The factor of the logits of a tied readout.

    It is the ratio of a readout's initial size to an embedding's: 1/m under μP, m^-½
    under NTK, 1 under SP.

    Source: Tensor Programs V, App. B.1.
    """
    return plan.readout_size(plan.width) if plan.parametrization.scaled else 1.0


# --- Files of transformers ---


def readout_options(config: Config, *, tied: bool) -> dict[str, Any]:
    """The options of the readout; `tied` is the default of transformers."""
    tied, name = bool(config.get("tie_word_embeddings", tied)), config.written_by
    is_base = name.endswith("Model") and not name.endswith("LMHeadModel")
    return {"tied": tied, **({"head": False} if is_base and not tied else {})}


def decoder_layout(
    model: Decoder, names: Mapping[str, str], prefix: str, kernel: str
) -> Layout:
    """The layout of a decoder.

    Args:
      model: the model, possibly abstract (from `nnx.eval_shape`).
      names: `Layout.modules`.
      prefix: of the keys of a model with a head.
      kernel: `Layout.kernel`.
    """
    vocab, n = model.embedding.shape
    return Layout(
        {**names, "readout/kernel": "lm_head.weight"},
        kernel=kernel,
        special={
            "embedding": ((vocab, n), (0, 1)),
            "position": ((model.context, n), (0, 1)),
            "readout/kernel": ((vocab, n), (1, 0)),
        },
        prefix=prefix if model.head else "",
    )


def unused_heads(model: Decoder, layout: str) -> re.Pattern[str]:
    """Keys of heads, of a model that has none."""
    heads = r"(?!)" if model.head else r"^(lm_head|score|classifier|qa_outputs)\."
    return re.compile(heads)


def decoder_factor(model: Decoder, path: str) -> float:
    """The product of the multipliers outside of a parameter's own layer.

    Raises:
      ValueError: the logits of a tied readout have a factor, and no norm takes it.
    """
    if model.readout is None and model.head:
        after = model.tied_multiplier * model.plan.output
        if model.norm is None and after != 1:
            raise ValueError(
                f"the logits of this tied readout are multiplied by {after:g}, which "
                "without layer_norm no network of transformers has; such a model can "
                "only be saved by zoo.save"
            )
        if path.startswith("norm/"):
            return after
    return branch_factor(model, path)
