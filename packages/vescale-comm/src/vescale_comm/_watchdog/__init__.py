"""Says what a collective waits for, long before the timeout of its group ends it.

A call costs nothing for this. One thread of each process wakes every few seconds and looks:

1. `places`: is a thread of this process still in the same collective as before?
2. `channel`: a few keys of the world's store. Who has waited too long asks; everybody answers where
   he is; a process that raises says so before it ends.
   `crash`: a process that crashes in C++ leaves its Python line in a file, for its host.
3. `report`: the answers as text, the same on every rank.
4. `watcher`: the thread, which puts these together. `current_watcher` starts one for each world.

Ranks that execute different things need not wait for each other, so that is noticed apart:

1. `execution_log`: what this rank executes together with others, as a digest and the last events.
2. `comparison`: compares logs over the store, beside the program.
3. `last_comparison`: the same once more, as the world or the program ends.
4. `drift_report`: the first difference as text. `log_store`: the keys of all this.

`store_reads`: what other ranks have left there; what is malformed is passed over.
"""
