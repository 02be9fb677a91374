"""Recurrent cells of Flax, Haiku, Equinox and torch."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .kit import F, H, I, O, Setup, V

KEY = jax.random.key(0)


def linen_params(module, *inputs):
    return module.init(KEY, *inputs)["params"]


# --- Flax ---


class LinenRNN(nn.Module):
    cell: type
    n: int

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(self.cell(self.n))(x)
        return nn.Dense(5)(x)


def linen_rnn(cell):
    return lambda n: linen_params(LinenRNN(cell, n), jnp.zeros((2, 7, 3)))


LINEN = {
    # ii, if, ig, io take the input of 3 features; hi, hf, hg, ho take the state.
    r".*Cell_0/i\w*/kernel": I(),
    r".*Cell_0/h\w*/kernel": H(),
    r".*Cell_0/\w+/bias": V(),
    r"Dense_0/kernel": O(),
    r"Dense_0/bias": F(),
}


class NnxRNN(nnx.Module):
    def __init__(self, cell, n, rngs):
        self.rnn = nnx.RNN(cell(3, n, rngs=rngs), rngs=rngs)
        self.deep = nnx.RNN(cell(n, n, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(n, 5, rngs=rngs)


def nnx_rnn(cell):
    return lambda n: nnx.state(NnxRNN(cell, n, nnx.Rngs(0)), nnx.Param)


NNX = {
    r"rnn/cell/i\w*/kernel|rnn/cell/dense_i/kernel": I(),
    r"rnn/cell/h\w*/kernel|rnn/cell/dense_h/kernel": H(),
    r"deep/cell/\w+/kernel": H(),
    r"(rnn|deep)/cell/\w+/bias": V(),
    r"head/kernel": O(),
    r"head/bias": F(),
}


class LinenConvLSTM(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        cell = nn.ConvLSTMCell(features=self.n, kernel_size=(3, 3))
        x = nn.RNN(cell)(x)
        return nn.Dense(5)(x.mean((2, 3)))


# --- Haiku ---


def haiku_rnn(core):
    def net(x):
        cell = core()
        y, _ = cell(x, cell.initial_state(2))
        return hk.Linear(5)(y)

    return lambda: hk.transform(net).init(KEY, jnp.zeros((2, 3)))


# --- Equinox ---


class EqxRNN(eqx.Module):
    cell: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, cell, n):
        self.cell = cell(3, n, key=KEY)
        self.head = eqx.nn.Linear(n, 5, key=KEY)


EQX = {
    r"cell/weight_ih": I(),
    r"cell/weight_hh": H(),
    r"cell/bias(_n)?": V(),
    r"head/weight": O(),
    r"head/bias": F(),
}


# --- torch and plain trees ---


def torch_lstm(n):
    return {
        "rnn.weight_ih_l0": I(4 * n, 3),
        "rnn.weight_hh_l0": H(4 * n, n),
        "rnn.bias_ih_l0": V(4 * n),
        "rnn.bias_hh_l0": V(4 * n),
        "rnn.weight_ih_l1": H(4 * n, n),
        "rnn.weight_hh_l1": H(4 * n, n),
        "rnn.bias_ih_l1": V(4 * n),
        "rnn.bias_hh_l1": V(4 * n),
        "fc.weight": O(5, n),
        "fc.bias": F(5),
    }


def torch_bilstm_tagger(n):
    return {
        "embed.weight": I(500, n),
        "lstm.weight_ih_l0": H(4 * n, n),
        "lstm.weight_hh_l0": H(4 * n, n),
        "lstm.bias_ih_l0": V(4 * n),
        "lstm.weight_ih_l0_reverse": H(4 * n, n),
        "lstm.weight_hh_l0_reverse": H(4 * n, n),
        "lstm.bias_ih_l0_reverse": V(4 * n),
        "hidden2tag.weight": O(9, 2 * n),
        "hidden2tag.bias": F(9),
    }


def plain_gru(n):
    """Plain JAX: a tuple of gates, unbiased."""
    tree = {"wx": I(8, 3 * n), "wh": H(n, 3 * n), "b": V(3 * n)}
    return tree | {"out/w": O(n, 2), "out/b": F(2), "h0": V(n)}


def plain_gru_stack(n, L):
    """Recurrent layers stacked on axis 0 and scanned, without residuals."""
    return {
        "embed": I(8, n),
        "cells/wx": H(L, n, 3 * n),
        "cells/wh": H(L, n, 3 * n),
        "cells/b": V(L, 3 * n),
        "out/w": O(n, 2),
        "out/b": F(2),
    }


def gates_apart(n):
    """(3, n, n): a matrix for each gate."""
    return {
        "wx": I(3, 8, n),
        "wh": H(3, n, n),
        "b": V(3, n),
        "out/w": O(n, 2),
        "out/b": F(2),
    }


def rnn_char(n):
    """min-char-rnn: Wxh (hidden, vocabulary), Whh, Why (vocabulary, hidden)."""
    return {
        "Wxh": I(n, 60),
        "Whh": H(n, n),
        "Why": O(60, n),
        "bh": V(n),
        "by": F(60),
    }


def indrnn(n):
    """The recurrence of IndRNN is a vector."""
    return {
        "in/kernel": I(3, n),
        "recurrent": V(n),
        "bias": V(n),
        "mix/kernel": H(n, n),
        "out/kernel": O(n, 5),
    }


def seq2seq(n):
    return {
        "encoder/embed/embedding": I(300, n),
        "decoder/embed/embedding": I(400, n),
        "encoder/lstm/ii/kernel": H(n, n),
        "encoder/lstm/hi/kernel": H(n, n),
        "encoder/lstm/hi/bias": V(n),
        "decoder/lstm/ii/kernel": H(n, n),
        "decoder/lstm/hi/kernel": H(n, n),
        "decoder/lstm/hi/bias": V(n),
        "decoder/projection/kernel": O(n, 400),
        "decoder/projection/bias": F(400),
    }


def dreamer(n):
    """DreamerV3's heads: reward, continuation, pixels, actor and critic."""
    tree = {"enc/conv0/kernel": I(4, 4, 3, n // 8), "enc/conv0/bias": V(n // 8)}
    tree |= {"dyn/img_in/kernel": H(4 * n, n), "dyn/gru/kernel": H(2 * n, 3 * n)}
    tree |= {"dyn/img_in/norm/scale": V(n), "dyn/gru/norm/scale": V(3 * n)}
    for name, size in (("rew", 255), ("cont", 1), ("actor", 6), ("critic", 255)):
        tree |= {f"{name}/h0/kernel": H(n, n), f"{name}/out/kernel": O(n, size)}
        tree |= {f"{name}/out/bias": F(size)}
    return tree


HEADS = {"readout": "(rew|cont|actor|critic)/out/kernel"}
HAIKU_HEAD = {r"linear/w": O(), r"linear/b": F()}

SETUPS = [
    Setup(
        "lstm_linen",
        "flax.linen.OptimizedLSTMCell",
        linen_rnn(nn.OptimizedLSTMCell),
        leaves=LINEN,
    ),
    Setup(
        "lstm_linen_plain", "flax.linen.LSTMCell", linen_rnn(nn.LSTMCell), leaves=LINEN
    ),
    Setup("gru_linen", "flax.linen.GRUCell", linen_rnn(nn.GRUCell), leaves=LINEN),
    Setup("mgu_linen", "flax.linen.MGUCell", linen_rnn(nn.MGUCell), leaves=LINEN),
    Setup(
        "simple_linen", "flax.linen.SimpleCell", linen_rnn(nn.SimpleCell), leaves=LINEN
    ),
    Setup(
        "conv_lstm_linen",
        "flax.linen.ConvLSTMCell: one convolution of the state, one of the input",
        lambda n: linen_params(LinenConvLSTM(n), jnp.zeros((2, 7, 8, 8, 3))),
        leaves={
            r".*Cell_0/ih/kernel": I(),
            r".*Cell_0/hh/kernel": H(),
            r".*Cell_0/\w+/bias": V(),
            r"Dense_0/kernel": O(),
            r"Dense_0/bias": F(),
        },
    ),
    Setup("lstm_nnx", "flax.nnx.LSTMCell", nnx_rnn(nnx.LSTMCell), leaves=NNX),
    Setup(
        "lstm_nnx_optimized",
        "flax.nnx.OptimizedLSTMCell",
        nnx_rnn(nnx.OptimizedLSTMCell),
        leaves=NNX,
    ),
    Setup("gru_nnx", "flax.nnx.GRUCell", nnx_rnn(nnx.GRUCell), leaves=NNX),
    Setup("simple_nnx", "flax.nnx.SimpleCell", nnx_rnn(nnx.SimpleCell), leaves=NNX),
    Setup(
        "lstm_haiku",
        "hk.LSTM: one matrix for input and state, fan-in 3 + n",
        lambda n: haiku_rnn(lambda: hk.LSTM(n))(),
        asks="lstm/linear/w",
        remedies=({"fractional": True, "axes": {"lstm/linear/w$": ((0,), (1,))}},),
        leaves={
            r"lstm/linear/w": H(into=259 / 67),
            r"lstm/linear/b": V(),
            **HAIKU_HEAD,
        },
    ),
    Setup(
        "gru_haiku",
        "hk.GRU",
        lambda n: haiku_rnn(lambda: hk.GRU(n))(),
        leaves={r"gru/w_i": I(), r"gru/w_h": H(), r"gru/b": V(), **HAIKU_HEAD},
    ),
    Setup(
        "vanilla_haiku",
        "hk.VanillaRNN",
        lambda n: haiku_rnn(lambda: hk.VanillaRNN(n))(),
        leaves={
            r"vanilla_rnn/linear/w": I(),  # of the input
            r"vanilla_rnn/linear_1/w": H(),  # of the state
            r"vanilla_rnn/linear(_1)?/b": V(),
            **HAIKU_HEAD,
        },
    ),
    Setup(
        "gru_equinox", "eqx.nn.GRUCell", lambda n: EqxRNN(eqx.nn.GRUCell, n), leaves=EQX
    ),
    Setup(
        "lstm_equinox",
        "eqx.nn.LSTMCell",
        lambda n: EqxRNN(eqx.nn.LSTMCell, n),
        leaves=EQX,
    ),
    Setup(
        "lstm_torch", "torch.nn.LSTM", torch_lstm, {"layout": "out_in"}, style="flat"
    ),
    Setup(
        "lstm_torch_layout_not_said",
        "torch.nn.LSTM: read as (in, out), first and last layer change places",
        torch_lstm,
        style="flat",
        asks="layout",
        either=True,
        remedies=({"layout": "out_in"},),
    ),
    Setup(
        "bilstm_torch",
        "torch BiLSTM tagger",
        torch_bilstm_tagger,
        {"layout": "out_in", "embeddings": "^embed"},
        style="flat",
        asks="hidden2tag|embed",
        either=True,
        remedies=({"readout": "^hidden2tag", "tied": None},),
    ),
    Setup("gru_plain", "a GRU in plain JAX", plain_gru),
    Setup(
        "gru_plain_stack",
        "GRUs stacked on axis 0, without residuals",
        plain_gru_stack,
        {"depth": (2, 2), "branch": None},
        grow={"L": (2, 2)},
    ),
    Setup(
        "gru_plain_stack_deeper_not_said",
        "GRUs stacked on axis 0: the axis grows",
        plain_gru_stack,
        grow={"L": (2, 8)},
        asks="cells/",
        remedies=({"depth": (2, 8), "branch": "^cells/"},),
    ),
    Setup("gru_gates_apart", "three matrices, one for each gate", gates_apart),
    Setup(
        "rnn_char",
        "min-char-rnn in JAX: Why (60, n) could be a table",
        rnn_char,
        {"layout": "out_in"},
        asks="Why",
        either=True,
        remedies=({"readout": "^Why$"},),
    ),
    Setup("indrnn", "IndRNN in Flax", indrnn),
    Setup("seq2seq", "flax examples/seq2seq", seq2seq),
    Setup("dreamer", "danijar/dreamerv3", dreamer, HEADS),
    Setup(
        "dreamer_not_named",
        "danijar/dreamerv3: four heads",
        dreamer,
        asks="(rew|cont|actor|critic)/out/kernel",
        remedies=(HEADS,),
    ),
]
