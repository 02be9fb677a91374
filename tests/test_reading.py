"""Roles, branches and depth are read from the program, not from names and shapes."""

import jax
import pytest
from programs import kit, plain  # noqa: F401

from mupax import optim


@pytest.mark.parametrize("row", kit.ALL, ids=lambda row: row.name)
def test_a_program_says_what_its_parameters_do(row):
    base, target, inputs = row.models()
    with jax.numpy_rank_promotion("allow"):  # as users write
        scales = optim.infer_scales(base, target, inputs=inputs)
    wrong = {}
    for path, scale in scales.items():
        letter = row.letter(path)
        roles = [kit.ROLES[x] for x in letter.rstrip("b").split("|")]
        if scale.role not in roles or scale.in_branch != letter.endswith("b"):
            wrong[path] = (scale.role.value, scale.in_branch, scale.origin)
    assert not wrong
    assert scales.depth == (3.0 if row.deep else 1.0)
