"""A rank of two: the gradients of a step by DistributedDataParallel and by our buckets must be equal."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from finetune_smoke import ranks
from finetune_smoke.data import batches
from finetune_smoke.model import gradients
from finetune_smoke.settings.config import preset
from finetune_smoke.training import setup, steps
from tests.support.finetune.runs import QUICK


def main() -> None:
    """Raises AssertionError if they differ."""
    with ranks.all_ranks() as members:
        run = setup.prepare(preset("tiny", **QUICK), ranks=members, progress=lambda _step, _fraction: None)
        with torch.no_grad():
            for parameter in run.adapters.values():
                parameter.add_(0.01)  # B is 0 at first, and A without a gradient
        batch = batches.batch(steps.read_rows(run, 0), run.source.pad_id)
        count = run.ranks.sum_(torch.tensor(float(batch.targets.numel())))
        replica = DistributedDataParallel(run.model)
        (replica(batch.ids, batch.positions, batch.targets) * members.world_size / count).backward()
        expected = [parameter.grad.clone() for parameter in run.gradients.parameters if parameter.grad is not None]
        loss = run.model(batch.ids, batch.positions, batch.targets) / count
        mine = torch.autograd.grad(loss, run.gradients.parameters)
        assert not all(torch.allclose(one, other) for one, other in zip(mine, expected, strict=True)), "nothing to average"
        gradients.BUCKET_BYTES = 2048
        run.gradients.bind()
        with gradients.in_buckets(run.gradients, members) as buckets:
            assert buckets is not None
            assert len(buckets.parts) > 1
            for last in (False, True):  # two passes over half of the loss
                if last:
                    buckets.expect()
                loss = run.model(batch.ids, batch.positions, batch.targets) / count / 2
                torch.autograd.backward(loss, inputs=run.gradients.parameters)
            buckets.finish()
        for found, wanted in zip(run.gradients.views, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert dist.is_initialized()


if __name__ == "__main__":
    main()
