"""The mutants of `make mutants` can be made: a change of the code must not leave them behind."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, REPOSITORY, Mutant


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_old_text_of_a_mutant_is_in_the_code_once(mutant: Mutant) -> None:
    text = (REPOSITORY / mutant.file).read_text()
    assert [text.count(old) for old, _ in mutant.changes] == [1] * len(mutant.changes)
