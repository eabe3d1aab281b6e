"""The whole of preset tiny: what a rehearsal on a CPU shows."""

from __future__ import annotations

import pytest

from finetune_smoke.settings.config import preset
from finetune_smoke.training.loop import finetune


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1234, 1, 2])
def test_tiny_learns_to_call_functions(seed: int) -> None:
    """Loss below 0.5 with margin, at least 90 % of held-out calls exact, and real decoding agrees."""
    outcome = finetune(preset("tiny", seed=seed))
    assert outcome.loss < 0.25
    assert outcome.heldout_loss < 0.25
    assert outcome.exact_match is not None
    assert outcome.exact_match >= 0.9
    assert outcome.greedy_exact_match is not None
    assert outcome.greedy_exact_match >= 0.9
    assert outcome.step_below_limit is not None
    assert outcome.step_below_limit < 80
    assert outcome.problems() == []
