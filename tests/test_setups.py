"""`infer_scales` on set-ups of real code bases: right, or a question that helps.

Three outcomes exist: right; an error that names the path, with a remedy that works;
silently wrong. The last is what the library is there to prevent.
"""

import pytest
from setups import SETUPS
from setups.kit import inconsistencies, judge


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_setup_is_right_or_asks_with_a_remedy_that_works(setup):
    assert judge(setup) is None


def test_names_are_unique():
    names = [setup.name for setup in SETUPS]
    assert len(names) == len(set(names))


def test_shapes_of_the_table_grow_as_it_says():
    wrong = {setup.name: inconsistencies(setup) for setup in SETUPS}
    assert not {name: lines for name, lines in wrong.items() if lines}


def test_questions_have_remedies():
    assert not [s.name for s in SETUPS if s.asks is not None and not s.remedies]


def test_most_setups_need_no_question():
    asked = [setup for setup in SETUPS if setup.asks is not None and not setup.either]
    assert len(asked) <= 0.4 * len(SETUPS)
