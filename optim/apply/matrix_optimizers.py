"""Optimizers of hidden matrices, beside a partner for all other parameters.

Hyperparameters are those of the base model, as in `optimizers.py`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from ..rules.multipliers import Family, family_of, is_hidden_matrix
from ..scales.paths import map_with_paths
from ..scales.table import Scales
from .build import Decay, Mask, Optimizer, Transform, adam_moments, build
from .hyperparameters import checked
from .matrices import (
    Maker,
    divide_by,
    frobenius_norm,
    keep_norms,
    orthogonalize,
    scale_by_kronecker,
    scale_by_shape,
    spectral_norm,
)
from .optimizers import adamw
from .segments import by_segment

# Builds an optimizer from a learning rate and scales; None for AdamW.
Partner = Callable[..., Optimizer] | None


def _beside(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    per_head: bool,
    precondition: Maker,
    others: Maker,
    decay: Decay | None = None,
    **options: Any,
) -> Optimizer:
    """Build an optimizer of hidden matrices, beside a partner for all others.

    `precondition` and `others` make the argument of `build` and the partner.
    """
    if per_head and not any(s.head_shape for w in scales.values() for s in w.parts):
        raise ValueError(
            "per_head=True, but no parameter has heads: pass inputs=(x,) to "
            "infer_scales, so that they are read from the program, or declare them: "
            "axes={'query': 'd -> heads size'}"
        )

    def make(scales: Scales) -> Transform:
        matrices = {path for path, s in scales.items() if is_hidden_matrix(s)}
        if not matrices:
            raise ValueError(
                f"no parameter is a hidden matrix, which {name} needs; use "
                "optim.adamw, or make scales from a base that differs in width"
            )
        if family_of(name) is Family.SPHERE:
            options["last"] = keep_norms(scales)
        first = precondition(scales)
        own = build(name, scales, first, learning_rate, decay=decay, **options)

        def label(path: str, _: Any) -> str:
            return "matrices" if path in matrices else "partner"

        transforms = {"matrices": own, "partner": others(scales)}
        return optax.partition(transforms, functools.partial(map_with_paths, label))

    return by_segment(scales, make, per_head=per_head)


def _partner(partner: Partner, learning_rate: Any, **options: Any) -> Maker:
    """What builds the optimizer of all other parameters; `options` are of AdamW."""
    options = {"weight_decay": 0.0, **options}
    if partner is None:
        return functools.partial(adamw, learning_rate, **options)
    if not callable(partner):
        raise ValueError(
            f"partner={partner!r} must be a function of a learning rate and scales "
            "that builds an optimizer, e.g. partner=optim.lion"
        )
    decay = options["weight_decay"]
    known = not isinstance(decay, jax.core.Tracer)
    if known and (callable(decay) or decay != 0):
        raise ValueError(
            "adam_weight_decay is that of AdamW; give the partner one of its own, e.g. "
            "partner=lambda rate, scales: optim.lion(rate, scales, weight_decay=0.1)"
        )
    return functools.partial(partner, learning_rate)


@checked
def muon(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = True,
    preconditioning: Any = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: float | None = None,
    partner: Partner = None,
    per_head: bool = False,
) -> Optimizer:
    """`optax.contrib.muon`, scaled: Muon for hidden matrices, a partner for the rest.

    The scales say which parameters are hidden matrices, and their axes, so there are
    no dimension numbers to pass. Embeddings, readouts and vectors are trained by AdamW
    or another partner. Stacked kernels (layers, d, d) are orthogonalized layer by
    layer, convolutions as (height·width·in, out), and fused kernels segment by segment.
    If base and target have the same widths, only matrices in residual branches count as
    hidden; pass `delta` to `infer_scales` to find the rest.

    Args:
      learning_rate: that of the base model, a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      weight_decay_mask: which hidden matrices decay, as in Optax; or "matrices" for
        all weights that sum over inputs, of Muon and of Adam.
      partner: what trains all other parameters, a function of a learning rate and
        scales, e.g. `optim.lion`, or for a transform of your own `functools.partial(
        optim.build_optimizer, precondition=optax.scale_by_rms(), family="adam")`; by
        default AdamW, whose arguments are `adam_...`. Under `optax.inject_hyperparams`,
        which calls functions as schedules, name it in `static_args`.
      per_head: orthogonalize each head of attention by itself. `infer_scales` reads
        heads from the program, or from an axis that is declared as `heads`. In an axis
        of heads and their entries, one head follows the other.

    Further arguments are those of `optax.contrib.muon`, of the base model; `ns_coeffs`
    are numbers, and `adaptive` is left out.

    Raises:
      ValueError: no parameter is a hidden matrix; a hyperparameter is not finite or out
        of range; see `scale_by_parametrization` for the rest.

    Source: the desired update of Tensor Programs V, Table 3, as a spectral norm,
    Δ (m_in m_out)^½, divided by the shape factor that Optax applies.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"w": jnp.eye(4)}, {"w": jnp.eye(16)}
      >>> scales = optim.infer_scales(base, params, axes={"w": "i -> o"})
      >>> tx = optim.muon(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["w"][0, 0].round(3)
      Array(-0.071, dtype=float32)
    """

    # Trees and functions are those of the matrices alone.
    shared = weight_decay_mask if isinstance(weight_decay_mask, str) else None
    others = _partner(
        partner,
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        mask=shared,
        nesterov=nesterov,
    )
    own = orthogonalize(
        *("muon", ns_coeffs, ns_steps, beta, eps, mu_dtype),
        consistent_rms=consistent_rms,
        nesterov=nesterov,
        preconditioning=preconditioning,
    )
    return _beside(
        *("muon", learning_rate, scales, per_head, own, others),
        decay=(weight_decay, weight_decay_mask),
        consistent_rms=consistent_rms,
    )


@checked
def soap(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-3,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    shampoo_beta: float = 0.95,
    precondition_frequency: int = 10,
    block_size: int | None = None,
    partner: Partner = None,
    per_head: bool = False,
) -> Optimizer:
    """SOAP with spectral normalization, for hidden matrices: Adam in Shampoo's basis.

    Each update is divided by its spectral norm (from twelve power iterations), and
    multiplied by Optax's shape factor of Muon. So its learning rate has the size of
    Muon's. The first gradient only gives the basis, and moves no matrix. Each change of
    the basis is one step of orthogonal iteration, and is not distributed over devices.

    Args:
      learning_rate, scales, partner, per_head: as in `muon`, without AdamW's arguments.
      b1, b2: as in Adam, those of the base model.
      eps: as in Adam, relative to the largest root of an average of squares. Where
        gradients have a low rank, most directions hold only rounding, which Adam's eps
        would let grow to full steps; 1e-3 is Shampoo's 1e-6 before its roots.
      weight_decay, mask: of the hidden matrices, as in `adamw`.
      mu_dtype: dtype of the average of gradients.
      shampoo_beta: memory of G Gᵀ and Gᵀ G.
      precondition_frequency: steps between two changes of the eigenvectors.
      block_size: largest size of the blocks that are preconditioned one by one, as the
        largest divisor of each side; None for whole matrices.

    Raises:
      ValueError: as `muon`.

    Source: Vyas et al. 2024 (arXiv:2409.11321), Algorithm 3; Qiu et al. 2025
    (arXiv:2512.05620) for spectral normalization.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"w": jnp.eye(4)}, {"w": jnp.eye(16)}
      >>> scales = optim.infer_scales(base, params, axes={"w": "i -> o"})
      >>> tx = optim.soap(0.1, scales)
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> tx.update(params, state, params)[0]["w"][0, 0].round(3)
      Array(-0.1, dtype=float32)
    """
    betas = {"b1": b1, "b2": b2, "shampoo_beta": shampoo_beta}
    blocks = precondition_frequency, block_size
    own = _normalized("soap", betas, eps, *blocks, mu_dtype)
    others, decay = _partner(partner, learning_rate), (weight_decay, mask)
    return _beside("soap", learning_rate, scales, per_head, own, others, decay)


@checked
def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.95,
    eps: float = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    shampoo_beta: float = 0.95,
    precondition_frequency: int = 10,
    block_size: int | None = None,
    partner: Partner = None,
    per_head: bool = False,
) -> Optimizer:
    """Shampoo with spectral normalization, for hidden matrices: L^-¼ M R^-¼.

    Arguments are those of `soap`, without `b2`; `eps` is added to L and R, times their
    spectral norms.

    Raises:
      ValueError: as `muon`.

    Source: Gupta et al. 2018 (arXiv:1802.09568), Algorithm 1, with moving averages; Qiu
    et al. 2025 (arXiv:2512.05620) for spectral normalization.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"w": jnp.eye(4)}, {"w": jnp.eye(16)}
      >>> scales = optim.infer_scales(base, params, axes={"w": "i -> o"})
      >>> tx = optim.shampoo(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["w"][0, 0].round(3)
      Array(-0.1, dtype=float32)
    """
    betas = {"b1": b1, "shampoo_beta": shampoo_beta}
    blocks = precondition_frequency, block_size
    own = _normalized("shampoo", betas, eps, *blocks, mu_dtype)
    others, decay = _partner(partner, learning_rate), (weight_decay, mask)
    return _beside("shampoo", learning_rate, scales, per_head, own, others, decay)


def _normalized(name: str, betas: Mapping[str, Any], *options: Any) -> Maker:
    """SOAP or Shampoo with spectral normalization; see `scale_by_kronecker`."""

    def precondition(scales: Scales) -> Transform:
        memories = {key: scales.training.beta(beta) for key, beta in betas.items()}
        return optax.chain(
            scale_by_kronecker(scales, *options, **memories),
            divide_by(spectral_norm, scales),
            scale_by_shape(name, scales),
        )

    return precondition


@checked
def scion(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    mu_dtype: Any | None = None,
    *,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    eps: float = 1e-8,
    per_head: bool = False,
) -> Optimizer:
    """Scion: the steepest step in a norm that the role of each parameter decides.

    The average of gradients becomes (fan_out/fan_in)^½ U Vᵀ for hidden matrices, and
    its sign for all other parameters, times 1/m_in for readouts. In these norms the
    learning rate is the same at every width (with `per_head`: if the number of heads
    stays). The paper's radii are learning rates of groups (`for_modules`);
    constrained Scion has the weight decay 1/radius.

    Args:
      b1: memory of the average of gradients, 1 - α of the paper.
      weight_decay, mask: as in `adamw`.

    Further arguments are as in `muon`.

    Raises:
      ValueError: as `muon`.

    Source: Pethick et al. 2025 (arXiv:2502.07529), Algorithm 1 and Table 2.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"w": jnp.eye(4)}, {"w": jnp.eye(16)}
      >>> scales = optim.infer_scales(base, params, axes={"w": "i -> o"})
      >>> tx = optim.scion(0.1, scales)
      >>> tx.update(params, tx.init(params), params)[0]["w"][0, 0].round(3)
      Array(-0.071, dtype=float32)
    """

    options = ns_coeffs, ns_steps, b1, eps, mu_dtype
    own = orthogonalize("scion", *options, nesterov=False)
    memory = scales.training.beta(b1)
    signs = optax.chain(
        optax.ema(memory, debias=False, accumulator_dtype=mu_dtype),
        optax.scale_by_sign(),
    )
    decay = weight_decay, mask

    def others(scales: Scales) -> Optimizer:
        return build("scion", scales, signs, learning_rate, decay=decay, rule="adam")

    return _beside("scion", learning_rate, scales, per_head, own, others, decay)


@checked
def adam_h(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any | None = None,
    *,
    partner: Partner = None,
    per_head: bool = False,
) -> Optimizer:
    """Adam on a sphere: hidden matrices keep their Frobenius norm (hyperball).

    W ← R·norm(W - η R·norm(u)), with u the update of Adam and R the norm of W, so that
    the learning rate η is the angle of a step. Weight decay would have no effect on
    these matrices. A matrix that starts at zero, e.g. queries of the zoo, grows in
    steps of η R until it has the norm R of entries of size fan_in^-½ at the base, and
    the parametrization's ratio of initial sizes; this is our extension.

    Args:
      learning_rate: angle of a step at the base model, in radians: a number or a
        schedule.
      b1, b2, eps, eps_root, mu_dtype: as in `adam`.
      scales, partner, per_head: as in `muon`; AdamW has the same b1, b2, eps and
        mu_dtype.

    Raises:
      ValueError: as `muon`.

    Source: Wen et al. 2026 (arXiv:2606.16899); Ren et al. (arXiv:2603.28743) for depth.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"w": jnp.eye(4)}, {"w": jnp.eye(16)}
      >>> scales = optim.infer_scales(base, params, axes={"w": "i -> o"})
      >>> tx = optim.adam_h(0.1, scales)
      >>> grads = {"w": jnp.ones((16, 16))}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> jnp.linalg.norm(params["w"] + updates["w"]).round(4)
      Array(4., dtype=float32)
    """

    def own(scales: Scales) -> Transform:
        moments = adam_moments(scales, b1, b2, eps, eps_root, mu_dtype)
        return optax.chain(moments, divide_by(frobenius_norm, scales))

    moments = {"b1": b1, "b2": b2, "eps": eps, "mu_dtype": mu_dtype}
    others = _partner(partner, learning_rate, **moments)
    return _beside("adam_h", learning_rate, scales, per_head, own, others)


@checked
def muon_h(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    beta: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any | None = None,
    *,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    nesterov: bool = True,
    partner: Partner = None,
    per_head: bool = False,
) -> Optimizer:
    """Muon on a sphere: as `adam_h`, with orthogonalized updates.

    They are divided by the norm that they have at full rank, min(fan_in, fan_out)^½.
    So a gradient of lower rank, of a batch smaller than the width, makes a smaller
    angle, and no direction has a larger part in the update than at full rank.

    `learning_rate` is the angle of a step at the base model, in radians. Further
    arguments are as in `muon`; AdamW has its own betas and eps here.

    Raises:
      ValueError: as `muon`.

    Source: Wen et al. 2026 (arXiv:2606.16899).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"w": jnp.eye(4)}, {"w": jnp.eye(16)}
      >>> scales = optim.infer_scales(base, params, axes={"w": "i -> o"})
      >>> tx = optim.muon_h(0.1, scales)
      >>> grads = {"w": jnp.ones((16, 16))}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> jnp.linalg.norm(params["w"] + updates["w"]).round(4)
      Array(4., dtype=float32)
    """

    options = ns_coeffs, ns_steps, beta, eps, mu_dtype
    own = orthogonalize("muon_h", *options, nesterov=nesterov)
    others = _partner(partner, learning_rate)
    return _beside("muon_h", learning_rate, scales, per_head, own, others)
