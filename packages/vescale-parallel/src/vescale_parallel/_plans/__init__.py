"""Plans that nobody has to write rule by rule: presets, edits, and plans as text.

Plain data in, plain data out; `Plan` puts its class around it. Top to bottom (imports point down):

- `search`: layouts side by side by the cost model.
- `presets`: what `Plan.from_hf`, `for_decoder`, `for_encoder` and `for_vit` say of a model.
- `declared`: the layout that a Hugging Face configuration declares; `styles`: its vocabulary.
- `by_shape`: roles of the layers of models that declare nothing, by their names and shapes.
- `sequence`: where activations change between sharded features and sharded sequences.
- `layers`: modules and parameters as all of these see them, and the roles that they may have.
- `globs`: from layouts of single names to the few rules that a person would have written.
- `data`: data parallelism, and the ZeRO level that memory asks for.
- `picture`: a resolved plan as JSON and as SVG.
- `edit`, `toml`: rules merged with rules; plans as TOML.
"""
