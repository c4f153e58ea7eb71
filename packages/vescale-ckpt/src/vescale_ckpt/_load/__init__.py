"""Loading: open, match, plan the reads, fetch and verify.

Reading guide: `load` is the sequence. `open` finds the committed generation and verifies its
manifest; `match` compares the saved tree with the state to load into and notes everything that does
not fit, which `mismatch` describes, and `overlap` what would be filled twice; `reads` finds
the blocks of bytes that are needed; `fetch` reads and verifies them, and copies the elements where
they belong. `shared_reads` lets the ranks of one machine read together what several of them need.
"""
