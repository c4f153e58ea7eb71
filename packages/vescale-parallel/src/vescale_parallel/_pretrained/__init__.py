"""Weights in Hugging Face's layout: safetensors files, and an index where there are several.

No rank reads or holds more than it stores, and one parameter while it saves.

- `weight_file`: one safetensors file: its header, parts of its tensors, a new file in order.
- `folder`: the files of a folder, and which of them holds what.
- `name_match`: names, shapes and dtypes of a model against those of a folder.
- `load`, `save`: the two public functions.
"""
