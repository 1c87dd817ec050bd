"""levelhead in a host process: Ctrl-C, signals, fork, exit, floating-point modes.

Every test runs in its own interpreter, with a time limit: a hang is a failure. Speed is not tested here; the one
deadline is the promise about Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from processes import PRELUDE, fresh, output_of, start

DEADLINE = 0.2  # seconds from the signal to the exception

LATE = """
def late(delay, call):
    "Seconds from the signal to the exception."
    sent = []
    def press():
        time.sleep(delay)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        call()
        presser.join()
        raise SystemExit("the call ended before the signal was noticed")
    except KeyboardInterrupt:
        seconds = time.monotonic() - sent[0]
    presser.join()
    check()
    return seconds

# Early (keys are being packed) and later (queries are being served). Up to five tries of each,
# since a busy machine may keep any one of them waiting; a call that does not listen fails all.
def show(call, deadline):
    for delay in (0.03, 0.4):
        tries = []
        while len(tries) < 5 and min(tries, default=deadline + 1) > deadline:
            tries.append(late(delay, call))
        print(min(tries))
"""

BIG = "x = much"
LONG_CALLS = {  # the arrays, made beforehand, and the call
    "dense": (BIG, "attention(x, x, x"),
    "causal": (BIG, "attention(x, x, x, causal=True"),
    "options": (
        BIG + "; bias, sinks = np.zeros((1, 32768), np.float32), np.zeros(256)",
        "attention(x, x, x, mask=bias, alibi=True, softcap=9.0, dropout=0.1, sinks=sinks",
    ),
    "all hidden": (BIG + "; mask = np.zeros((1, 32768), bool)", "attention(x, x, x, mask=mask"),
    "observe": (BIG, "observe(x, x, x"),
    "statistics only": (BIG, "observe(x, x"),
    "float64": ("x = repeated(256, 32768, 64, dtype='d')", "attention(x, x, x"),
    "float16": ("x = repeated(256, 32768, 64, dtype='e')", "attention(x, x, x"),
    "wide": ("x = repeated(64, 32768, 576)", "attention(x, x, x"),
    "many short heads": ("x = repeated(400_000, 4, 64, 16); v = x[..., :1]", "attention(x, x, v"),
    "one query, many keys": ("x = np.broadcast_to(np.float32(1), (4_000_000, 64)); q = x[:1]", "attention(q, x, x"),
}


@pytest.mark.parametrize("threads", [None, 1])
@pytest.mark.parametrize("name", LONG_CALLS)
def test_ctrl_c_raises_in_time_and_the_next_call_is_fine(name: str, threads: int | None) -> None:
    arrays, call = LONG_CALLS[name]
    code = f"{LATE}\n{arrays}\nshow(lambda: lh.{call}, threads={threads}), {DEADLINE})"
    delays = [float(line) for line in fresh(code).split()]
    assert max(delays) <= DEADLINE, f"late by {delays} s (early, later)"


def test_ctrl_c_from_another_process() -> None:
    code = """
print("ready", flush=True)
try:
    long_call()
except KeyboardInterrupt:
    print(time.monotonic())
check()
"""
    delays = []
    for _ in range(3):
        process = start([sys.executable, "-c", PRELUDE + code])
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        sent = time.monotonic()  # one clock for all processes of the machine
        process.send_signal(signal.SIGINT)
        delays.append(float(output_of(process, 30)) - sent)
    assert min(delays) <= DEADLINE, delays


def test_ctrl_c_reaches_the_main_thread_while_another_one_computes() -> None:
    code = """
worker = threading.Thread(target=lambda: lh.attention(*[repeated(8, 4096, 64)] * 3))
worker.start()
sent = []
def press():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.05, press).start()
try:
    while True:
        time.sleep(10)
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
worker.join()
check()
"""
    assert float(fresh(code)) <= DEADLINE


# ---- other signals ----------------------------------------------------------


def test_any_exception_of_a_signal_handler_comes_out() -> None:
    fresh("""
class Enough(Exception): pass
def handler(*_):
    raise Enough("of this")
signal.signal(signal.SIGALRM, handler)
for threads in (1, 2):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        long_call(threads=threads)
    except Enough as error:
        assert str(error) == "of this"
    else:
        raise SystemExit("the handler's exception was lost")
    check()
""")


def test_a_handler_that_returns_changes_nothing() -> None:
    # The handler itself computes attention, during the call that it interrupted.
    fresh("""
x = numbers(8, 4096, 64)
whole = lh.attention(x, x, x)
ran = []
def handler(*_):
    ran.append(True)
    check()
signal.signal(signal.SIGALRM, handler)
for threads in (1, 2):
    ran.clear()
    signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
    again = lh.attention(x, x, x, threads=threads)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert again.tobytes() == whole.tobytes()
    assert ran, "the call was too short for the signal"
""")


def test_a_handler_may_fork_in_the_middle_of_a_call() -> None:
    # In the child the call cannot always be finished, since its worker threads exist only in the parent. It may then
    # raise, but neither hang nor die, and the next call must work.
    fresh("""
x = numbers(8, 4096, 64)
whole = lh.attention(x, x, x)
children = []
def handler(*_):
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
for threads in (1, 2):
    children.clear()
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    try:
        again = lh.attention(x, x, x, threads=threads)
        assert again.tobytes() == whole.tobytes()
    except BaseException as error:
        if children != [0]:
            raise
        print(f"child, threads={threads}: {error!r}", file=sys.stderr, flush=True)
    check()
    assert len(children) == 1, "the call was too short for the signal"
    if not children[0]:
        os._exit(0)
    _, status = os.waitpid(children[0], 0)
    assert status == 0, f"threads={threads}: the child ended with status {status}"
""")


# ---- fork -------------------------------------------------------------------

FORK = """
def in_child(work):
    "Runs work in a forked child, which has five seconds."
    child = os.fork()
    if not child:
        signal.alarm(5)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child

def join(child):
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status} (14: hung, the alarm rang)"
"""


def test_fork_after_a_call() -> None:
    fresh(
        FORK
        + """
def work():
    check()
    join(in_child(check))  # and a child of the child
    check()

check()
children = [in_child(work) for _ in range(4)]
check()
for child in children:
    join(child)
check()
"""
    )


def test_fork_while_another_thread_is_in_the_kernel() -> None:
    fresh(
        FORK
        + """
stop = False
def compute():
    x = numbers(4, 700, 32)
    while not stop:
        lh.attention(x, x, x)
        check()
threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(25):
    join(in_child(check))
stop = True
for thread in threads:
    thread.join()
check()
"""
    )


def test_fork_before_the_first_call_and_before_any_import() -> None:
    code = """
import os, signal
import numpy as np
def work():
    import levelhead as lh
    x = np.ones((2, 300, 16), np.float32)
    return (lh.attention(x, x, x) == 1).all()
for _ in range(2):
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if work() else 1)
    assert os.waitpid(child, 0)[1] == 0
assert work()
"""
    output_of(start([sys.executable, "-c", code]), 60)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_pools(method: str, tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(
        PRELUDE
        + f"""
import multiprocessing

def work(seed):
    x = numbers(2, 400, 32, seed=seed)
    return lh.attention(x, x, x, causal=True)

if __name__ == "__main__":
    here = [work(seed) for seed in range(6)]
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        waiting = pool.map_async(work, range(6))
        check()  # meanwhile the parent computes too
        there = waiting.get(timeout=50)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(here, there, strict=True))
"""
    )
    output_of(start([sys.executable, str(script)]), 60)


def test_data_loader_workers() -> None:
    fresh("""
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        check()
        x = torch.from_numpy(numbers(2, 300, 16, seed=i))
        return lh.attention(x, x, x)
rows = Rows()
here = [rows[i] for i in range(6)]
there = list(torch.utils.data.DataLoader(rows, batch_size=None, num_workers=2, timeout=40))
assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
""")


# ---- the end ----------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_leaving_while_a_daemon_thread_computes(threads: int) -> None:
    fresh(f"""
threading.Thread(target=long_call, kwargs=dict(threads={threads}), daemon=True).start()
time.sleep(0.3)
""")


def test_calls_at_exit_work() -> None:
    printed = fresh("""
import atexit
def last():
    check()
    print("checked")
atexit.register(last)
""")
    assert printed == "checked\n"


# ---- the floating-point environment -----------------------------------------

MODES = """
import ctypes, platform, struct
libm = ctypes.CDLL(None)
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]

def modes():
    "Rounding, flushing and trapping, without the flags that any arithmetic raises."
    raw = ctypes.create_string_buffer(64)
    assert libm.fegetenv(raw) == 0
    if platform.machine() == "x86_64":  # x87 control word; MXCSR, whose lowest six bits are flags
        return struct.unpack_from("H", raw, 0)[0], struct.unpack_from("I", raw, 28)[0] & ~0x3F
    return struct.unpack_from("I", raw, 0)  # FPCR

def denormals():
    assert 5e-324 * float(len(sys.argv)) != 0.0  # not a constant: computed here and now
    assert np.float32(1e-40) * np.float32(len(sys.argv)) != 0
    assert (np.full(64, 1e-40, np.float32) * np.float32(1) != 0).all()
"""


def test_modes_are_as_they_were_after_import_and_calls() -> None:
    code = f"""
import sys
import numpy as np
{MODES}
before = modes()
denormals()
import levelhead as lh
assert modes() == before, "importing changed the modes"
denormals()
x = np.random.default_rng(0).standard_normal((4, 600, 32))
for dtype in "fde":
    y = (x * 100).astype(dtype)  # logits far apart: weights down to denormals and beyond
    for threads in (1, 2, 5):
        lh.attention(y, y, y, threads=threads)
        lh.observe(y, y, y, causal=True, threads=threads).heads
        assert modes() == before, (dtype, threads)
        denormals()
try:
    lh.attention(y, y, y[:, 1:])
except lh.LevelheadError:
    assert modes() == before
"""
    output_of(start([sys.executable, "-c", code]), 60)


def test_modes_are_as_they_were_after_ctrl_c() -> None:
    fresh(
        MODES
        + """
before = modes()
for threads in (1, 2):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        long_call(threads=threads)
    except KeyboardInterrupt:
        assert modes() == before
        denormals()
"""
    )


def test_the_callers_rounding_mode_holds_in_all_threads_and_for_no_longer_than_the_call() -> None:
    fresh(
        MODES
        + """
x = numbers(4, 600, 32)
nearest = lh.attention(x, x, x, threads=2).tobytes()
usual = modes()
assert libm.fesetround(UPWARD) == 0
upward = modes()
results = {lh.attention(x, x, x, threads=threads).tobytes() for threads in (1, 2, 5)}
assert modes() == upward != usual
assert libm.fesetround(0) == 0
assert len(results) == 1, "the rounding mode depends on the thread that did the work"
for threads in (1, 2, 5):
    assert lh.attention(x, x, x, threads=threads).tobytes() == nearest, "a worker stayed upward"
"""
    )


# ---- PyTorch's team ---------------------------------------------------------

TEAM = """
import torch
torch.set_num_threads(3)
tensor = torch.from_numpy(numbers(3, 2, 300, 16))
def alike(**options):
    got = lh.attention(tensor, tensor, tensor, causal=True, **options).numpy()
    assert got.tobytes() == right.tobytes(), "other bits than from NumPy"
def threads():
    return len(os.listdir("/proc/self/task"))
"""


def test_tensors_are_served_by_torchs_own_threads() -> None:
    # The prelude's NumPy call may have started a pool of its own: it runs on one thread here.
    printed = fresh(
        TEAM
        + """
torch.ones(1 << 22).sin()  # torch's team is there from now on
before = threads()
alike()
print(before, threads())
alike(threads=2)  # told a number: levelhead's own
print(threads())
""",
        LEVELHEAD_NUM_THREADS="1",
    )
    before, after, own = map(int, printed.split())
    assert before == after, "a second team was started"
    assert own == after + 1


def test_torchs_team_does_not_cross_a_fork() -> None:
    fresh(
        TEAM
        + """
alike()
child = os.fork()
if not child:
    alike(threads=3)
    torch.set_num_threads(1)
    alike()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
alike()
"""
    )


def test_ctrl_c_while_torchs_team_works() -> None:
    code = """
x = torch.from_numpy(numbers(32768, 64)).expand(256, 32768, 64)
show(lambda: lh.attention(x, x, x), deadline)
"""
    printed = fresh(TEAM + LATE + f"deadline = {DEADLINE}\n" + code, timeout=240)
    assert max(map(float, printed.split())) <= DEADLINE
