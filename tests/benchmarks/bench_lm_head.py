"""The LM head (hidden states to log-probabilities and back), compared with its matrix products alone.

    uv run python tests/benchmarks/bench_lm_head.py [--tokens 4096] [--vocab 49152] [--hidden 576] [--dtype bfloat16]
        [--device cuda]

The four products alone (logits, logits again, d_hidden, d_weight) are computed by torch.mm on whole, preallocated
matrices: with oneDNN for bfloat16, with MKL for float32. `memory` is the peak growth of the process, or on a GPU the
memory allocated there."""

import ctypes
import sys
import threading
from pathlib import Path

import torch
from harness import Report, alternate, begin, tune_malloc
from nemo_rl_cpp._native import C
from sides import choices


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class PeakMemory:
    """The largest growth of the resident set while the block runs, sampled every millisecond."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)  # freed blocks must not hide new allocations
        self.before, self.peak, self.done = resident_bytes(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.done.wait(0.001):
            self.peak = max(self.peak, resident_bytes() - self.before)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


class PeakGpuMemory:
    """The largest growth of the memory allocated on the GPU while the block runs."""

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_):
        self.peak = torch.cuda.max_memory_allocated() - self.before


def products(x, w, chunk):
    """Return a function that computes the four products on chunks of rows, into preallocated buffers."""
    logits, d_x, d_w = x.new_empty(chunk, len(w)), x.new_empty(chunk, x.shape[1]), torch.empty_like(w)
    logits.normal_()

    def run():
        for start in range(0, len(x), chunk):
            rows = x[start : start + chunk]
            torch.mm(rows, w.t(), out=logits)
            torch.mm(rows, w.t(), out=logits)
            torch.mm(logits, w, out=d_x)
            torch.mm(logits.t(), rows, out=d_w)

    return run


def measure(report: Report, tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    on = {"device": report.args.device}
    x, w = torch.randn(tokens, hidden, **on).to(dtype), (torch.randn(vocab, hidden, **on) * hidden**-0.5).to(dtype)
    targets, g = torch.randint(0, vocab, (tokens,)), torch.randn(tokens, **on)  # targets stay on the CPU
    d_x, d_w = torch.zeros(tokens, hidden, **on), torch.zeros(vocab, hidden, **on)
    logprobs, entropy = torch.empty(tokens, **on), torch.empty(tokens, **on)
    head = C.VocabularyHead()

    def forward():
        return head.forward(x, w, targets, 1.0, logprobs, entropy)

    def both():
        forward()
        head.backward(x, w, targets, g, 1.0, d_x, d_w)

    with PeakGpuMemory() if report.on_gpu else PeakMemory() as memory:
        both()
    what = f"{tokens} x {vocab}, D {hidden}, {str(dtype).removeprefix('torch.')}"
    times = alternate(
        {"ours forward": forward, "ours": both, "products": products(x, w, 1024)}, report.args.repeats, warmup=1
    )
    flops = 2 * tokens * vocab * hidden
    limit = times["products"].median
    report.add(what, "four products, torch.mm", times["products"], gflops=4 * flops / limit / 1e9)
    report.add(what, "forward", times["ours forward"], gflops=flops / times["ours forward"].median / 1e9)
    report.add(what, "forward + backward", times["ours"], gflops=4 * flops / times["ours"].median / 1e9,
               of_products=times["ours"].median / limit, memory_mb=memory.peak / 1e6)  # fmt: skip


def main():
    report = begin(
        __doc__, 5, tokens=4096, vocab=[49152, 151936], hidden=[576, 896], dtype=choices(("bfloat16", "float32"))
    )  # fmt: skip
    tune_malloc()
    for vocab in report.args.vocab:
        for hidden in report.args.hidden:
            for dtype in report.args.dtype:
                measure(report, report.args.tokens, vocab, hidden, getattr(torch, dtype))
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
