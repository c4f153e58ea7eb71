"""The format on the disk, as FORMAT.md describes it.

Reading guide: `manifest` has the manifest and the commit record as values, and writes them; `parse`
and `parse_state` read them and trust nothing; `strict_json` is the JSON of both. `safetensors`
writes the header of a data file, `write_item` is the unit that a data file is made of, `checksums`
computes one string of digits for each stretch of bytes. `pickle_data` and `torch_file` read the
formats of torch, as data.
"""
