"""The two small languages of rules, and what is written in them: no mesh, no rank, no value.

- `glob`: which names a rule means: `*`, `?`, `[ab]` and `{q,k,v}`.
- `layout`: what it says of them: `"tp:0"`, `"dp:0, tp:1"`, `"tp:full -> tp:1"`.
- `segments`: which coordinates hold which elements of a dim under a layout.
- `arguments`: which arguments and results of a module an activation rule means.
- `rows`: what rules come to: a parameter, a module boundary; the rows of a report.
"""
