"""The GPUs of sensitivity.py: a process each that measures on request, while spin kernels may take a share of its time."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from sensitivity_analysis import CANDIDATE, Round

from pytest_gpucluster.measurements import gemm, hbm, sustained, timing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

REPLY_S = 90.0
PERIOD_S = 0.0005
CYCLES_SIZE, CYCLES_PRODUCTS = 8192, 20
FLOP_PER_CYCLE_AND_SM = 4096  # dense BF16, Hopper
BLOCK = 1024
SHARED_BYTES = 112 * 1024
"""Of each spin block: two of them fill an SM of Hopper, so that no block of a product can run beside them."""
MOST_SMS = 1024
"""The hardware's numbers of SMs need not be without gaps."""

SPIN = r"""
extern "C" __global__ void __launch_bounds__(1024) spin(int ns, unsigned long long* taken) {
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < (unsigned long long)ns);
        atomicAdd(taken, now - start);
    }
    __syncthreads();  // the other threads of the block wait here: they hold their slots and issue nothing
}
"""
TICK = r"""
extern "C" __global__ void __launch_bounds__(1024) tick(unsigned long long* table) {
    if (threadIdx.x == 0) {
        unsigned int sm;
        unsigned long long now;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        long long cycles = clock64();
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        table[2 * sm] = (unsigned long long)cycles;
        table[2 * sm + 1] = now;
    }
    __syncthreads();
}
"""


class Thief:
    """Takes a share of all SMs' time by spin kernels on a stream of high priority, while its ``with`` block runs."""

    def __init__(self, share: float, kernel: Any) -> None:
        """``kernel`` is :data:`SPIN`, compiled; a share of 0 takes nothing and starts no thread."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK)
        self._device = torch.cuda.current_device()
        self._share = share
        self._kernel = kernel
        self._stream = torch.cuda.Stream(priority=-1)
        self._taken_ns = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thief", daemon=True)

    def __enter__(self) -> Thief:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Start taking."""
        if self._share:
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop, and say so if it had stopped by itself before."""
        self._stop.set()
        if self._share:
            self._thread.join(10)
            self._stream.synchronize()
        if self._error is not None:
            raise RuntimeError("the spin kernels could not be started") from self._error

    def during(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of ``call``, and the share of all SMs' time that the spin kernels really took."""
        before_ns, start_s = int(self._taken_ns.item()), time.monotonic()
        result = call()
        wall_ns = 1e9 * (time.monotonic() - start_s)
        return result, (int(self._taken_ns.item()) - before_ns) / (self._blocks * wall_ns)

    def _run(self) -> None:
        """Start a kernel whenever less was started than the share of the time gone by."""
        try:
            torch.cuda.set_device(self._device)
            self._stream.synchronize()  # this thread has the GPU's context now
            length_ns = round(1e9 * PERIOD_S * self._share)
            start_s, begun = time.perf_counter(), 0
            while not self._stop.is_set():
                owed = int(1e9 * self._share * (time.perf_counter() - start_s) / length_ns) - begun
                for _ in range(owed):
                    self._kernel(
                        grid=(self._blocks, 1, 1),
                        block=(BLOCK, 1, 1),
                        args=[length_ns, self._taken_ns],
                        shared_mem=SHARED_BYTES,
                        stream=self._stream,
                    )
                begun += owed
                time.sleep(PERIOD_S / 5)
        except BaseException as error:  # noqa: BLE001 -- raised where the thread is joined
            self._error = error


def measure(thief: Thief, tick: Any, recipes: Mapping[str, Any], together: Callable[[], object]) -> dict[str, Any]:
    """One round on this GPU; ``together`` waits for the other GPUs before each measurement."""
    together()
    burst, in_burst = thief.during(lambda: gemm.gemm(dtype="bfloat16", **recipes["bf16_tflops"]))
    together()
    plain, in_plain = thief.during(lambda: gemm.gemm(dtype="float32", **recipes["fp32_tflops"]))
    together()
    memory, in_memory = thief.during(lambda: hbm.hbm_bandwidth(**recipes["hbm_bandwidth"]))
    together()
    held, in_held = thief.during(lambda: sustained.sustained(**recipes["bf16_sustained"]))
    together()
    (cycles, counted_mhz), in_cycles = thief.during(lambda: per_cycle(tick))
    rates = {
        "bf16_tflops": burst.tflops,
        "fp32_tflops": plain.tflops,
        "hbm_bandwidth": memory.tb_s,
        "bf16_sustained": held.tflops,
        "bf16_at_clock": held.of_peak_at_clock_ratio,
        CANDIDATE: cycles,
    }
    seen = {"copy_tb_s": memory.copy_tb_s, "triad_tb_s": memory.triad_tb_s, "counted_mhz": counted_mhz}
    shares = {"bf16_tflops": in_burst, "fp32_tflops": in_plain, "hbm_bandwidth": in_memory}
    shares |= {"bf16_sustained": in_held, CANDIDATE: in_cycles}
    return {"rates": rates, "taken_ratio": shares, "seen": {**seen, **held.evidence, "burst": burst.evidence}}


def per_cycle(tick: Any) -> tuple[float, float]:
    """A BF16 product's rate over the peak at the SM clock that the SMs counted in the very window, and that clock in MHz."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sms = properties.multi_processor_count
    grid = (sms * (properties.max_threads_per_multi_processor // BLOCK), 1, 1)
    tables = torch.zeros((2, MOST_SMS, 2), dtype=torch.int64, device="cuda")
    product = gemm.bf16_product(CYCLES_SIZE)
    timing.keep_busy(product, seconds=0.01)
    tick(grid=grid, block=(BLOCK, 1, 1), args=[tables[0]])
    each_s = timing.time_span(product, launches=CYCLES_PRODUCTS)
    tick(grid=grid, block=(BLOCK, 1, 1), args=[tables[1]])
    first, last = tables.tolist()
    clocks_mhz = [
        1e3 * (end[0] - start[0]) / (end[1] - start[1]) for start, end in zip(first, last, strict=True) if start[1] and end[1]
    ]
    clock_mhz = statistics.median(clocks_mhz)
    return 2 * CYCLES_SIZE**3 / each_s / (sms * FLOP_PER_CYCLE_AND_SM * clock_mhz * 1e6), clock_mhz


def work(gpu: int, pipe: Connection, barrier: Barrier, recipes: Mapping[str, Any]) -> None:
    """One GPU's process: compiles, warms up once, then measures for each share it receives; None ends it."""
    torch.cuda.set_device(gpu)
    sys.setswitchinterval(0.0002)  # the thread that takes must not wait 5 ms for the one that measures
    spin, tick = torch.cuda._compile_kernel(SPIN, "spin"), torch.cuda._compile_kernel(TICK, "tick")  # noqa: SLF001
    spin.set_shared_memory_config(SHARED_BYTES)
    try:
        with Thief(0.05, spin) as thief:
            measure(thief, tick, recipes, lambda: barrier.wait(REPLY_S))
        pipe.send({"name": torch.cuda.get_device_name(), "torch": torch.__version__})
        while (share := pipe.recv()) is not None:
            with Thief(share, spin) as thief:
                found = measure(thief, tick, recipes, lambda: barrier.wait(REPLY_S))
            pipe.send(found)
    finally:
        barrier.abort()  # the others must not wait for this one


def run(rounds: Sequence[tuple[int | None, float]], *, gpus: int, recipes: Mapping[str, Any], limit_s: float) -> Any:
    """The rounds on real GPUs, as many as fit; and what the GPUs are.

    Raises:
        RuntimeError: a GPU's process died or did not answer.
    """
    began_s = time.monotonic()
    context = mp.get_context("spawn")
    barrier = context.Barrier(gpus)
    pipes, processes = [], []
    for gpu in range(gpus):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(gpu, theirs, barrier, recipes), daemon=True))
        pipes.append(ours)
        processes[-1].start()
        theirs.close()
    done: list[Round] = []
    slowest_s = 0.0
    try:
        devices = [_reply(pipe) for pipe in pipes]
        for victim, slowdown in rounds:
            start_s = time.monotonic()
            if start_s - began_s + 1.5 * slowest_s > limit_s:
                break
            for gpu, pipe in enumerate(pipes):
                pipe.send(slowdown / 100 if gpu == victim else 0.0)
            replies = [_reply(pipe) for pipe in pipes]
            done.append(_round(victim, slowdown, replies))
            slowest_s = max(slowest_s, time.monotonic() - start_s)
            label = "clean" if victim is None else f"GPU {victim} {slowdown:g} % slow"
            print(f"round {len(done)} of {len(rounds)}: {label}, {slowest_s:.1f} s at most", file=sys.stderr, flush=True)
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return done, devices


def _reply(pipe: Connection) -> Any:
    if not pipe.poll(REPLY_S):
        raise RuntimeError(f"a GPU's process has not answered for {REPLY_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a GPU's process died; its own words stand above") from None


def _round(victim: int | None, slowdown: float, replies: Sequence[Mapping[str, Any]]) -> Round:
    return Round(
        victim=victim,
        slowdown_percent=slowdown,
        rates={name: [reply["rates"][name] for reply in replies] for name in replies[0]["rates"]},
        taken_ratio={} if victim is None else dict(replies[victim]["taken_ratio"]),
        seen=[dict(reply["seen"]) for reply in replies],
    )
