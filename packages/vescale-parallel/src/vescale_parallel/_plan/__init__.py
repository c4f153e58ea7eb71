"""`Plan`, how a model lies over a mesh as data; and plans that nobody has to write rule by rule.

Top to bottom (imports point down); all but `plan` take and give plain data:

- `plan`: the class. It keeps the text that a user wrote, and asks the others.
- `fields`: its fields that have fields of their own, `Zero`, `Pipeline` and `Invariant`.
- `search`: layouts side by side by the cost model.
- `presets`: what `Plan.from_hf`, `for_decoder`, `for_encoder` and `for_vit` say of a model.
- `declared_layout`: the layout that a Hugging Face configuration declares; `styles`: its words.
- `by_shape`: roles of the layers of models that declare nothing, by their names and shapes.
- `sequence`: where activations change between sharded features and sharded sequences.
- `layers`: modules and parameters as all of these see them, and the roles that they may have.
- `globs`: from layouts of single names to the few rules that a person would have written.
- `data`: data parallelism, and the ZeRO level that memory asks for.
- `picture`, `report_json`: a resolved plan as SVG and as JSON.
- `edit`, `toml`: rules merged with rules; plans as TOML.
"""
