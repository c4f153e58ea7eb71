"""The native policy on CUDA: the numbers of torch on one GPU, for any shard of a tensor.

On CUDA each number is a function of (seed, offset, threads, index): CUDA.md states it. A Triton
kernel computes each element by itself; where there is no Triton, or a kernel was found to differ,
torch draws complete waves from a shifted offset, and the shard's elements are copied out.

Reading guide:
    fill: `fill_cuda`, which chooses between kernel and waves. Start here.
    thread_map, recipes: the map of ATen's kernels in integers, and the arithmetic on the words.
    spans: a layout as few strided spans, each of which one launch fills.
    waves: any range of an op's elements, drawn by ATen itself.
    map_check: before its first use on a device, a map is compared with what torch draws there.
    device, generator_state: what is asked of a device and of its generators.
    dropout, dropout_map, dropout_check, dropout_draw: the same for ATen's fused dropout kernel.
    bernoulli: the same for `bernoulli_` with a tensor of probabilities.
    philox: Philox4x32-10 in numpy, for the checks.
    kernels: the Triton kernels.
"""
