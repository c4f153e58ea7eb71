"""The native policy on CPU: torch draws every number, from its own stream moved into place.

torch's CPU generator is one serial stream (mt19937). A shard of a tensor gets the numbers of one
device if the stream is where that device's would be when it draws those elements. So each fill
moves the stream, lets torch draw, and moves on to the end of the global op.

Reading guide:
    fill: `fill_cpu`, three ways to fill a shard (at once, in place, by windows). Start here.
    draw_order: how many words an op takes for each element, found by asking the installed torch.
    samplers: any ranges of one op's elements, drawn into scratch, one class for each draw order.
    stream: moves a generator, by drawing or by jumping.
    generator_state: torch's state bytes, read and written. The one module that knows their form.
    mt19937_jump: jump-ahead of the generator by polynomials over GF(2).
    rejection: draws that are repeated until no element is refused (`trunc_normal_`).
    stream_ops: ops that fill no tensor in place (`randperm`, `multinomial`): their words.
"""
