"""Memory: the peak of a call, what it keeps, and that it releases the caller's arrays.

Resident memory is read from /proc in a separate interpreter, so that neither pytest nor another test's peak is counted.
Bounds are far above normal use and far below the cost of a mistake.
"""

from __future__ import annotations

import sys

import pytest

from processes import fresh, output_of, start

MEMORY = """
import gc, weakref

def megabytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024

def peak(call):
    "Megabytes a call takes at its worst, its result included."
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # from here on VmHWM, the peak, starts anew
    before = megabytes("VmRSS")
    result = call()
    return megabytes("VmHWM") - before
"""

# ---- at the peak ------------------------------------------------------------

# One head of 16384 tokens: q, k, v and the result are 4 MB each in float32, a matrix of scores
# 1024 MB, of booleans 256 MB.
TOKENS, DENSE = 16384, 256
CALLS = {
    "plain": "lh.attention(q, k, v)",
    "causal": "lh.attention(q, k, v, causal=True)",
    "bool mask of keys": "lh.attention(q, k, v, mask=keys)",
    "bool mask of queries": "lh.attention(q, k, v, mask=keys.T)",
    "float mask": "lh.attention(q, k, v, mask=np.where(keys, np.float32(0), np.float32(-1)))",
    "alibi, softcap, dropout": "lh.attention(q, k, v, alibi=True, softcap=5.0, dropout=0.2)",
    "segments": "lh.attention(q, k, v, segments=np.arange(T) // 500)",
    "observe": "lh.observe(q, k, v, mask=keys)",
    "observe, read": "str(lh.observe(q, k, mask=keys)) and lh.observe(q, k, mask=keys).rows",
    "one thread": "lh.attention(q, k, v, causal=True, threads=1)",
    "many threads": "lh.attention(q, k, v, causal=True, threads=16)",
}


@pytest.mark.parametrize("call", CALLS)
def test_no_matrix_of_scores_is_ever_kept(call: str) -> None:
    code = """
T = int(sys.argv[2])
q, k, v = (numbers(1, T, 64, seed=i) for i in range(3))
keys = numbers(1, T) > 0
print(peak(lambda: eval(sys.argv[1])))
"""
    taken = float(fresh(MEMORY + code, CALLS[call], TOKENS))
    assert taken < DENSE / 4, f"{taken} MB"


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_nor_in_other_types(dtype: str) -> None:
    code = """
T = int(sys.argv[2])
q, k, v = (numbers(1, T, 64, seed=i, dtype=sys.argv[1]) for i in range(3))
print(peak(lambda: lh.attention(q, k, v, causal=True)))
"""
    assert float(fresh(MEMORY + code, dtype, TOKENS)) < DENSE / 4


def test_a_caller_given_mask_is_not_copied() -> None:
    code = """
T = 6144
q = numbers(1, T, 16)
mask = np.ones((T, T), bool)  # 36 MB, all of it touched
print(peak(lambda: lh.attention(q, q, q, mask=mask)))
print(peak(lambda: lh.attention(q, q, q, mask=mask[::-1, ::-1])))
print(peak(lambda: lh.observe(q, q, q, mask=mask.T)))
"""
    assert max(map(float, fresh(MEMORY + code).split())) < 12


def test_memory_grows_with_tokens_not_with_their_square() -> None:
    code = """
for T in (4096, 32768):
    q = numbers(1, T, 16)
    print(peak(lambda: lh.attention(q, q, q, causal=True)))
"""
    short, long = map(float, fresh(MEMORY + code).split())
    assert long < 8 * short + 16, f"{short} MB, then {long} MB for 8 times the tokens"


def test_strided_inputs_are_not_copied_whole() -> None:
    # 600 heads broadcast from one: keys and values would be 600 MB each if they were copied.
    code = """
x = np.broadcast_to(numbers(4096, 1, 64), (4096, 600, 64)).transpose(1, 0, 2)
print(peak(lambda: lh.attention(x[:, :1], x, x)))
"""
    taken = float(fresh(MEMORY + code))
    assert taken < 600, f"{taken} MB"


def test_observing_again_maps_no_new_memory() -> None:
    """Four megabytes a call. A new mapping costs a thousand page faults, a third of the time.

    In an interpreter that has not freed large memory yet: malloc keeps sizes it has freed before (mallopt(3)).
    """
    code = """
import resource
import numpy as np
import levelhead as lh
q = k = v = np.ones((8, 1024, 64), np.float32)
seen = lambda: lh.observe(q, k, v, causal=True)
for _ in range(5): seen()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(10): seen()
print(faults() - before)
"""
    assert int(output_of(start([sys.executable, "-c", code]), timeout=240)) < 1000


# ---- at the peak of a step of training ------------------------------------------

# 10240 tokens: one matrix of scores would be 400 MB per head in float32, of booleans 100 MB.
STEPS = {
    "one head": ("1, 1", "1, 1", "{}"),
    "one head, causal": ("1, 1", "1, 1", "dict(is_causal=True)"),
    "groups": ("1, 4", "1, 1", "dict(enable_gqa=True)"),
    "bool mask of keys": ("1, 2", "1, 2", "dict(attn_mask=keys)"),
    "learned bias of keys": ("1, 2", "1, 2", "dict(attn_mask=keys.float().requires_grad_())"),
    "dropout": ("1, 2", "1, 2", "dict(dropout_p=0.1)"),
}
STEP = """
import torch
from levelhead.torch import scaled_dot_product_attention

def step(T, lead, kv, options):
    q, k, v = (torch.randn(*sizes, T, 64, requires_grad=True) for sizes in (lead, kv, kv))
    keys = torch.rand(1, T) < 0.9
    options = eval(options)
    def run():
        out = scaled_dot_product_attention(q, k, v, **options)
        out.backward(torch.ones_like(out))
        return out
    taken = peak(run)
    assert q.grad.shape == q.shape
    return taken

lead, kv = eval(sys.argv[1]), eval(sys.argv[2])
step(64, lead, kv, sys.argv[3])  # threads and what torch itself keeps
print(*(step(T, lead, kv, sys.argv[3]) for T in (2560, 10240)))
"""


@pytest.mark.parametrize("name", STEPS)
def test_training_keeps_no_matrix_of_scores(name: str) -> None:
    short, long = map(float, fresh(MEMORY + STEP, *STEPS[name], timeout=240).split())
    heads = int(STEPS[name][0].split(",")[1])
    matrix = heads * 10240**2 * 4 / 2**20  # of the call's scores, in MB
    assert long < matrix / 8, f"{long} MB"
    assert long < 4 * short + 24, f"{short} MB, then {long} MB for 4 times the tokens"


def test_training_does_not_copy_the_callers_mask() -> None:
    code = """
import torch
from levelhead.torch import scaled_dot_product_attention
T = 8192
x = torch.randn(1, 1, T, 16, requires_grad=True)
mask = torch.ones(T, T, dtype=torch.bool)  # 64 MB, all of it touched
print(peak(lambda: scaled_dot_product_attention(x, x, x, attn_mask=mask).sum().backward()))
"""
    assert float(fresh(MEMORY + code, timeout=240)) < 32


# ---- between calls ----------------------------------------------------------


def test_what_is_kept_between_calls_is_capped() -> None:
    code = """
before = megabytes("VmRSS")
keys = np.broadcast_to(np.float32(1), (1_500_000, 64))
for threads in (1, 2):
    lh.attention(numbers(8, 64), keys, keys, threads=threads)  # packs 732 MB
    check()
    print(megabytes("VmRSS") - before)
"""
    assert max(map(float, fresh(MEMORY + code, timeout=240).split())) < 128


def test_what_many_callers_at_once_leave_behind_is_capped() -> None:
    code = """
x = np.broadcast_to(np.float32(1), (1, 60_000, 64))  # about 30 MB to work in
lh.attention(x[:, :8], x, x)
before = megabytes("VmRSS")
callers = [threading.Thread(target=lh.attention, args=(x[:, :8], x, x)) for _ in range(24)]
for thread in callers:
    thread.start()
for thread in callers:
    thread.join()
check()
print(megabytes("VmRSS") - before)
"""
    assert float(fresh(MEMORY + code)) < 160


def test_nothing_grows_over_many_calls() -> None:
    code = """
def round_of_calls(i):
    x = numbers(2, 300 + i % 50, 32, seed=i % 50)
    mask = np.ones((1, x.shape[1]), bool)
    lh.attention(x, x, x, mask=mask, causal=True, threads=1 + i % 3)
    seen = lh.observe(x, x, x, window=(5, 5), sinks=[0.0, 1.0])
    str(lh.merge(seen, seen))
    for wrong in (dict(causal=1), dict(mask=mask[:, 1:]), dict(window=(-1, 0)), dict(scale=np.nan)):
        try:
            lh.attention(x, x, x, **wrong)
        except lh.LevelheadError:
            continue
        raise SystemExit(f"accepted {wrong}")

for i in range(100):
    round_of_calls(i)
before = megabytes("VmRSS")
for i in range(200):
    round_of_calls(i)
print(megabytes("VmRSS") - before)
"""
    assert float(fresh(MEMORY + code)) < 4


def test_ctrl_c_leaves_nothing_behind() -> None:
    code = """
x = much
def interrupted(threads):
    count = sys.getrefcount(x)
    timer = threading.Timer(0.06, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()  # on a busy machine the signal may come before this returns
        lh.observe(x, x, x, threads=threads)  # the result alone would be over 2 GB
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit("not interrupted")
    assert sys.getrefcount(x) == count

interrupted(2)
check()
before = megabytes("VmRSS")
for i in range(40):
    interrupted(1 + i % 2)
check()
print(megabytes("VmRSS") - before)
"""
    # Keys and values of one head, the least that a call works in, are 16 MB: 40 of them would be
    # 640 MB. The C library may keep a few of them.
    assert float(fresh(MEMORY + code)) < 160


# ---- the caller's arrays ----------------------------------------------------

ENDINGS = """
def succeed(q, k, v):
    lh.attention(q, k, v)
    lh.observe(q, k, v, causal=True).heads

def refused(q, k, v, **options):
    try:
        lh.attention(q, k, v, **options)
    except lh.LevelheadError:
        return
    raise SystemExit("accepted")

def interrupted(q, k, v):
    def stop(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)  # again: the first may come too early
    try:
        while True:
            lh.attention(q, k, v)
    except TimeoutError:
        signal.setitimer(signal.ITIMER_REAL, 0)

def no_memory(q, k, v):
    keys = np.broadcast_to(np.float32(1), (2**40, q.shape[-1]))  # to pack these takes terabytes
    try:
        lh.attention(q, keys, keys)
    except MemoryError:
        return
    raise SystemExit("there was memory")

ending = {
    "success": succeed,
    "refused shape": lambda q, k, v: refused(q, k[1:], v),
    "refused option": lambda q, k, v: refused(q, k, v, window=(-1, 1)),
    "refused mask": lambda q, k, v: refused(q, k, v, mask=np.ones((3, 3), bool)),
    "interrupted": interrupted,
    "no memory": no_memory,
}[sys.argv[1]]
"""
HOW = ["success", "refused shape", "refused option", "refused mask", "interrupted", "no memory"]


@pytest.mark.parametrize("how", HOW)
def test_arrays_are_free_again(how: str) -> None:
    # An array with an exported buffer cannot be resized, and one with references is not freed.
    fresh(
        MEMORY
        + ENDINGS
        + """
arrays = [numbers(700, 32, seed=i) for i in range(3)]
ending(*arrays)
while arrays:
    array = arrays.pop()
    assert sys.getrefcount(array) == 2, "somebody still refers to the array"
    array.resize((5, 32))
    alive = weakref.ref(array)
    del array
    assert alive() is None
""",
        how,
    )


@pytest.mark.parametrize("how", HOW)
def test_buffers_are_free_again(how: str) -> None:
    fresh(
        MEMORY
        + ENDINGS
        + """
class Owner(bytearray):
    pass
owner = Owner(numbers(700, 32).tobytes())
view = memoryview(owner).cast("f", (700, 32))
alive = weakref.ref(owner)
ending(np.asarray(view), np.asarray(view), np.asarray(view))
gc.collect()
view.release()
owner.append(0)  # BufferError while anybody looks at it
del owner, view
assert alive() is None
""",
        how,
    )


def test_an_observation_does_not_hold_its_inputs() -> None:
    fresh(
        MEMORY
        + """
x, mask = numbers(2, 300, 16), np.ones((300, 300), bool)
seen = lh.observe(x, x, x, mask=mask)
alive = [weakref.ref(x), weakref.ref(mask)]
del x, mask
assert [reference() for reference in alive] == [None, None]
assert seen.output.shape == (2, 300, 16)
"""
    )


def test_out_is_free_again_and_is_what_comes_back() -> None:
    fresh(
        MEMORY
        + """
x = numbers(700, 32)
out = np.empty_like(x)
assert lh.attention(x, x, x, out=out) is out
assert out.tobytes() == lh.attention(x, x, x).tobytes()
assert sys.getrefcount(out) == 2
out.resize((5, 32))
"""
    )
