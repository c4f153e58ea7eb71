"""CUDA only: places in a CUDA stream, CUDA graphs, and the threads that numbers depend on.

`import vescale_rng.cuda` needs no CUDA.
"""

from vescale_rng._cuda.device import threads_of, use_threads
from vescale_rng._cuda.generator_state import CudaPosition, GraphGenerator

__all__ = ["CudaPosition", "GraphGenerator", "threads_of", "use_threads"]
