"""Steps: passes, rows ahead, one flat gradient, what falls back and says so, and what does not fit into memory."""

from __future__ import annotations

import functools
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from finetune_smoke.checks.faults import Fault
from finetune_smoke.data import batches
from finetune_smoke.data.calls import Tokenizer
from finetune_smoke.model import build
from finetune_smoke.model.gradients import flat_gradients
from finetune_smoke.parallel import cuda_graphs, strategy
from finetune_smoke.ranks import Ranks
from finetune_smoke.settings.config import OwnInputError, preset
from finetune_smoke.training import steps
from finetune_smoke.training.loop import Outcome, finetune
from tests.support.finetune import graph_stand_in
from tests.support.finetune.runs import CHEAP, QUICK

PACKED = {"packed": True, "row_tokens": 128, "rows": 2}
"""All rows of one length, as where layers are compiled; others are compiled once more, for any length."""


def run(**settings: Any) -> Outcome:
    """A quick run of a single rank."""
    return finetune(preset("tiny", **{**CHEAP, **settings}))


@pytest.fixture(scope="module")
def plain() -> Outcome:
    """The quick run as it is."""
    return run()


def test_a_slower_rank_computes_on_a_cpu() -> None:
    """The work of the forward counts, its waits do not: a sleep would be no slowness of a rank."""
    begin_s = time.thread_time()
    Fault("straggler").slow_down([], torch.device("cpu"))
    assert time.thread_time() - begin_s >= 0.1


def test_two_passes_of_half_the_rows_are_one_of_all(plain: Outcome) -> None:
    """The same rows a step give the same losses; RESULT has the effective batch."""
    halves = run(rows=4, accumulation=2)
    assert halves.losses == pytest.approx(plain.losses, rel=1e-5)
    assert (halves.step_rows, plain.step_rows) == (8, 8)
    assert run(accumulation=2, steps=2).losses != pytest.approx(plain.losses[:2], rel=1e-4)


def test_rows_made_ahead_are_the_same_rows(plain: Outcome) -> None:
    """Rows made by threads give the same bits."""
    ahead = run(loader_workers=3, prefetch=2)
    assert (ahead.losses, ahead.adapter_digest) == (plain.losses, plain.adapter_digest)


def test_steps_see_few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, here below 56, are filled to one width."""
    made: list[batches.Batch] = []
    make = batches.batch
    monkeypatch.setattr(batches, "batch", lambda *given: made.append(make(*given)) or made[-1])
    run(steps=4, row_tokens=256, audit_every=0)
    assert [batch.ids.shape[1] for batch in made[:4]] == [64] * 4


def test_pefts_forward_and_gradient_checkpointing_change_no_loss(plain: Outcome) -> None:
    """The switch for comparisons, to rounding; checkpointing computes activations twice, with the same result."""
    assert run(own_lora=False, gradient_checkpointing=True).losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.long
def test_compiled_layers_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced once, evaluated and audited eagerly; compile_s has the time."""
    monkeypatch.setattr(strategy, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, traced = (run(**PACKED, layers=3, compile=kind, audit_every=3) for kind in ("off", "layers"))
    assert traced.losses == pytest.approx(eager.losses, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # a decoder layer, and a chunk of the loss
    assert eager.compile_s is None
    assert traced.compile_s is not None
    assert traced.notes == ["steps run compiled decoder layers; lock-step audits and evaluation run them eagerly"]
    assert traced.problems() == []


def test_a_finished_training_frees_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled layer names itself. Left to Python's collector, the 13 GiB of one training lay beside the next one."""
    layers: list[weakref.ref[torch.nn.Module]] = []

    def name_themselves(model: build.SummedLoss) -> None:
        for layer in strategy.layers_of(model):
            layer.forward = functools.partial(layer.forward)
            layers.append(weakref.ref(layer))

    monkeypatch.setattr(strategy, "compile_layers", name_themselves)
    monkeypatch.setattr(strategy, "start_compilers", lambda: None)
    run(**PACKED, compile="layers")
    assert [layer() for layer in layers] == [None]


def test_kernels_are_compiled_by_processes_that_start_before_the_base_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself would start them with the first compiling. A run without compiled layers starts none."""
    from torch._inductor import async_compile  # noqa: PLC0415 -- a second

    seen: list[str] = []
    made = build.base_of
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: seen.append("compilers"))
    monkeypatch.setattr(build, "base_of", lambda *given: seen.append("base") or made(*given))
    monkeypatch.setattr(strategy, "compile_layers", lambda _model: None)
    for kind in ("layers", "off"):
        run(**PACKED, compile=kind, steps=1)
    assert seen == ["compilers", "base", "base"]
    monkeypatch.delattr(async_compile, "maybe_warm_pool")
    strategy.start_compilers()  # an older release: the import is all


@pytest.mark.slow
def test_inductor_makes_the_same_of_it() -> None:
    """What training on a GPU uses, with its C++ backend; minutes on a busy machine."""
    torch._dynamo.reset()
    eager = run(**PACKED)
    assert run(**PACKED, compile="layers").losses == pytest.approx(eager.losses, rel=1e-5)


def test_graphs_that_cannot_be_are_left_out_with_a_note() -> None:
    """There is no CUDA graph on a CPU; the run continues eagerly."""
    heard: list[str] = []
    outcome = finetune(preset("tiny", **CHEAP, cuda_graph=True), progress=lambda text, _: heard.append(text))
    assert outcome.notes == ["no CUDA graph: there is no GPU; steps run eagerly"]
    assert outcome.notes[0] in heard
    assert "8 rows a step: 1 ranks of 8 rows in 1 passes" in " ".join(heard)
    assert outcome.left_out["graph_lock_step"] == "no CUDA graphs here: there is no GPU"
    assert "graph_lock_step" not in outcome.checks


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fault": "post-scale"}, "a planted fault"),
        ({"strategy": "fsdp"}, "strategy fsdp has collectives"),
        ({"gradient_checkpointing": True}, "random state"),
    ],
)
def test_what_a_graph_cannot_hold_is_named(settings: dict[str, Any], why: str) -> None:
    """Each of these is an obstacle on a GPU; without them there is none."""
    gpu = Ranks(rank=0, world_size=2, device=torch.device("cuda", 0))
    assert why in str(cuda_graphs.obstacle(preset("tiny", **settings), gpu))
    assert cuda_graphs.obstacle(preset("tiny"), gpu) is None
    assert cuda_graphs.obstacle(preset("tiny", fault="graph-bitflip:1"), gpu) is None


def test_filled_batch_has_the_same_loss() -> None:
    """Predictions added to reach a graph's size count nothing, in value and gradient; its rows are as wide as any."""
    config = preset("tiny", **QUICK)
    base = build.random_base(config, torch.device("cpu"))
    network = build.SummedLoss(build.add_adapters(base, config))
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    source = batches.synthetic(config, batches.own_codec(Tokenizer()))
    rows = [source.row(index) for index in range(4)]
    short, wide = batches.batch(rows, source.pad_id), batches.batch(rows, source.pad_id, config.row_tokens)
    room = cuda_graphs.capacity([short], rows=4)
    assert room % cuda_graphs.ROUND_TO == 0
    assert room >= 4 * max(len(row.predicted) for row in rows) > len(short.targets)
    full = cuda_graphs.padded(wide, room)
    assert full.ids.shape == (4, config.row_tokens)
    assert len(full.positions) == len(full.targets) == room
    assert (full.targets == build.IGNORED).sum() == room - len(short.targets)
    expected, found = (network(each.ids, each.positions, each.targets) for each in (short, full))
    torch.testing.assert_close(found, expected)
    for mine, other in zip(torch.autograd.grad(found, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=5e-5)


def test_flat_gradients_clip_as_torch_does() -> None:
    """Norm and clipped values, above the limit and below; the optimiser sees the same memory."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in ((3, 4), (5,), (2, 2))]
    parameters[1].requires_grad = False
    values = [torch.randn(each.shape, generator=generator) for each in parameters]
    flat = flat_gradients(parameters)
    flat.bind()
    assert parameters[1].grad is None
    for limit in (0.5, 100.0):
        flat.zero()
        for _ in range(2):
            flat.add([values[0] / 2, values[2] / 2])
        theirs = [torch.nn.Parameter(torch.zeros_like(values[index])) for index in (0, 2)]
        for parameter, value in zip(theirs, (values[0], values[2]), strict=True):
            parameter.grad = value.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
        torch.testing.assert_close(flat.clip(limit), expected)
        for mine, other in zip((parameters[0], parameters[2]), theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def test_loader_works_ahead_and_in_order() -> None:
    """While a step is taken, rows of the next steps are made; never more than ``ahead``, never past the last."""
    made: list[int] = []

    def make(step: int) -> list[batches.Row]:
        made.append(step)
        return [batches.Row([step], [])]

    with batches.loading(make, workers=2, ahead=3, last=6) as rows:
        assert rows.take(0)[0].ids == [0]
        deadline = time.monotonic() + 60
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(made) == [0, 1, 2, 3]
        assert [rows.take(step)[0].ids for step in range(1, 6)] == [[1], [2], [3], [4], [5]]
    assert sorted(made) == list(range(6))


def test_error_in_a_row_made_ahead_reaches_the_step() -> None:
    """An error of a thread is raised by take()."""

    def make(step: int) -> list[batches.Row]:
        raise KeyError(step)

    with batches.loading(make, workers=1, ahead=1, last=3) as rows, pytest.raises(KeyError, match="0"):
        rows.take(0)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}])
def test_out_of_memory_names_what_to_change(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names no setting that is changed already."""

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(steps, "window", full)
    with pytest.raises(OwnInputError, match=r"rank 0: out of memory \(CUDA out of memory\); try fewer --rows than 8") as said:
        run(**settings)
    assert ("--gradient-checkpointing" in str(said.value)) == (not settings)
    assert "--strategy fsdp" in str(said.value)


def test_replayed_steps_are_audited(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first window, between windows and at the end, beside the eager ones; they move nothing."""
    graph_stand_in.install(monkeypatch.setattr)
    outcome = run(cuda_graph=True, audit_every=3, steps=6)
    assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
    assert outcome.checks["lock_step"]["detail"] == "3 of 3 looks"
    assert outcome.checks["graph_lock_step"] == {"passed": True, "detail": "2 of 2 looks", "ranks": []}
    assert "graph_lock_step" not in outcome.left_out


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"steps": 6, "audit_every": 0}, {"graph_lock_step": "--audit-every is 0", "lock_step": "--audit-every is 0"}),
        ({"steps": 1, "audit_every": 1}, {"graph_lock_step": "no step was replayed before an audit"}),
    ],
)
def test_audits_that_never_looked_are_left_out(
    settings: dict[str, Any], left_out: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason; neither passed nor forgotten. That steps are replayed is noted only where they were."""
    graph_stand_in.install(monkeypatch.setattr)
    outcome = run(cuda_graph=True, **settings)
    assert {name: why for name, why in outcome.left_out.items() if name.endswith("lock_step")} == left_out
    assert any("steps run as CUDA graphs" in note for note in outcome.notes) == (settings["steps"] > 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains, and its stand-in takes the place of a GPU")
def test_model_that_cannot_be_captured_trains_eagerly(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example its forward reads a number from the device, which only a capture shows."""

    def refuse(*_: object) -> None:
        with cuda_graphs.capturing(cast("Any", None)):
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be reported later")

    graph_stand_in.install(monkeypatch.setattr)
    graph_stand_in.refuse_to_end(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "capture", refuse)
    outcome = run(cuda_graph=True, audit_every=3, steps=6)
    assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
    why = "rank 0 could not capture a step: operation not permitted when stream is capturing"
    assert outcome.left_out["graph_lock_step"] == f"no CUDA graphs here: {why}"
    assert f"no CUDA graph: {why}; steps run eagerly" in outcome.notes


PUT_BACK = ["capture", "stream", "numbers", "end (1, 'pool')", "release (1, 'pool')"]


def test_capture_that_fails_puts_back_what_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch does not, where the end of the capture fails too. Too little memory stays what it is."""
    left = graph_stand_in.refuse_to_end(monkeypatch)
    with pytest.raises(cuda_graphs.CaptureError, match=r"^it asks its device$"), cuda_graphs.capturing(cast("Any", None)):
        raise RuntimeError("it asks its device\nmore words")
    assert left == PUT_BACK
    with pytest.raises(torch.cuda.OutOfMemoryError, match="20 GiB"), cuda_graphs.capturing(cast("Any", None)):
        raise torch.cuda.OutOfMemoryError("Tried to allocate 20 GiB")
    assert left == 2 * PUT_BACK


def test_pool_that_torch_has_ended_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As newer versions do: to end it twice is an error, and to release it twice would free what is used."""

    def ended(*_: object) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    left = graph_stand_in.refuse_to_end(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended)
    with pytest.raises(cuda_graphs.CaptureError, match=r"^it asks its device$"), cuda_graphs.capturing(cast("Any", None)):
        raise RuntimeError("it asks its device")
    assert left == ["capture", "stream", "numbers"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_failed_capture_on_a_gpu_leaves_nothing_behind() -> None:
    """No memory is kept, and the generator works."""
    number = torch.ones((), device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def ask() -> None:
        with cuda_graphs.capturing(torch.cuda.CUDAGraph()):
            torch.empty(2**30, dtype=torch.uint8, device="cuda").fill_(1)
            number.item()

    with pytest.raises(cuda_graphs.CaptureError, match="not permitted when stream is capturing"):
        ask()
    assert torch.rand((), device="cuda").item() < 1
    beside = torch.cuda.Stream()
    used = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    used.record_stream(beside)
    del used
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 2**26


def test_capture_that_another_rank_refuses_is_dropped() -> None:
    """All ranks replay, or none does."""
    run = SimpleNamespace(ranks=SimpleNamespace(where=lambda _: [1], world_size=2))
    patch = pytest.MonkeyPatch()
    with patch.context() as within:
        within.setattr(cuda_graphs, "capture", lambda *_: "captured")
        assert cuda_graphs.try_capture(cast("Any", run), cast("Any", None)) == (None, "rank 1 could not capture a step")


def test_batch_with_too_many_predictions_is_cut_to_the_room() -> None:
    """The rows of an audit may have more of them than a graph has room for."""
    rows = [batches.Row([5, 6, 7, 8], [1, 2, 3]), batches.Row([5, 6, 7, 8], [2, 3])]
    full = cuda_graphs.padded(batches.batch(rows, 0), 3)
    assert full.positions.tolist() == [0, 1, 2]
    assert full.targets.tolist() == [6, 7, 8]


def test_fault_of_the_last_step_is_seen() -> None:
    """The last step is no multiple of --audit-every and --digest-every."""
    late = run(fault="bitflip-late", audit_every=50, digest_every=50)
    assert [name for name, check in late.checks.items() if not check["passed"]] == ["lock_step"]
    assert "at step 6" in late.checks["lock_step"]["detail"]


def test_weights_that_the_last_step_spoiled_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss and every norm is fine: nothing is computed with these weights any more."""
    usual = steps.learning_rate
    monkeypatch.setattr(steps, "learning_rate", lambda run, step: float("nan") if step == 5 else usual(run, step))
    found = run().checks["finite"]
    assert not found["passed"]
    assert "adapter weights that are not finite" in found["detail"]
