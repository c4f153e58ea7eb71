"""From a call to a plan: which layouts the operands need, and which the results have. Pure.

`op_call` parses a call into operands, arguments and a key. A rule (a function from a call to data)
returns a `strategy`: which dims may be sharded together, what may be partial. `select` picks, for
each mesh axis, the choice that moves the fewest bytes. `plan` assembles the result, which says what
to redistribute, what to call on the locals, and the layouts of what comes out.

Nothing communicates and nothing is computed here. This is what an author of a rule sees; the public
door is `vescale_dtensor.rules`.
"""
