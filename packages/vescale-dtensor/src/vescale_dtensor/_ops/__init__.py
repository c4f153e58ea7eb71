"""Defines rules and handlers of torch functions, by family of operators.

Three kinds of entries have three names:

- a *strategy* (`RULES`): a function from a call to data, which says which dims may be sharded.
  Nine in ten are letters and nothing else (`Signature`);
- a *decomposition*: a function written as other torch functions, each of which has a rule;
- a *handler* (`HANDLERS`): runs in place of the call, where that is no operation on data or has to
  look at its tensors first.

One folder a family; `common` holds what several of them share. `families.install` fills the
registry. "How to add an operator" in the package's docs/ tells how to write one.
"""
