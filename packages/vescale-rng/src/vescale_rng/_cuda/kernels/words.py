"""Computes the random words of an element from its index, as ATen's kernels do."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def wide(low, high):
    """Join signed 32-bit halves to a 64-bit integer."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def block_at(seed, counter, thread):
    """Return the four words of a counter in the subsequence of a thread."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    thread = thread.to(tl.int64)
    thread_low = (thread & 0xFFFFFFFF).to(tl.uint32)
    thread_high = (thread >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, thread_low, thread_high)


@triton.jit
def pick(words, lane):
    """Return the word of each element's lane."""
    front = tl.where(lane == 0, words[0], words[1])
    back = tl.where(lane == 2, words[2], words[3])
    return tl.where(lane < 2, front, back)


@triton.jit
def grid_stride(index, seed, counter, THREADS: tl.constexpr, UNROLL: tl.constexpr):
    """Return the block and lane of an element of a kernel over all threads of a device.

    A thread draws UNROLL elements that are THREADS apart from each block, then the next block.
    """
    # THREADS elements of one lane lie side by side: neighbours belong to neighbouring threads,
    # which is how a GPU writes memory in one go.
    rest = index % (THREADS * UNROLL)
    turn = (index // (THREADS * UNROLL)).to(tl.int64)
    return block_at(seed, counter + turn, rest % THREADS), rest // THREADS


@triton.jit
def vectors(index, seed, counter, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """Return the block and lane of an element of a kernel that loads VECTOR neighbours at once.

    A thread takes VECTOR neighbours, four from a block, then those THREADS * VECTOR further.
    """
    inside = index % VECTOR
    turn = (index // (THREADS * VECTOR)).to(tl.int64)
    # A block has four words: a vector of 8 or 16 neighbours takes several blocks in a row.
    if VECTOR > 4:
        turn = (VECTOR // 4) * turn + inside // 4
    return block_at(seed, counter + turn, (index // VECTOR) % THREADS), inside % 4


@triton.jit
def quads(index, seed, counter):
    """Return the block and lane of an element of a kernel with a thread per four neighbours."""
    return block_at(seed, counter + tl.zeros_like(index).to(tl.int64), index // 4), index % 4
