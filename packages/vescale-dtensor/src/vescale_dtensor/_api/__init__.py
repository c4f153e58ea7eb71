"""What users call: DTensor's methods, factories, `local_map`, `distribute_module`, interop.

`methods.install` puts on the class what its own module cannot import.
"""
