"""The native policy on CUDA: torch's Philox map, element by element or wave by wave."""
