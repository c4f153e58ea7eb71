"""The functions and methods that users call: methods of DTensor, factories, `local_map`, interop.

`methods.install` puts on the class what its own module cannot import.
"""
