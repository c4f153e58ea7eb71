"""What lies on the disk, as FORMAT.md describes it.

Reading guide: `manifest` holds the manifest and the commit record as values, and writes them;
`parse` and `parse_state` read them again and trust nothing; `strict_json` is the JSON of both.
`safetensors` is the header of a data file, `write_item` what a data file is made of, `checksums`
one string of digits for each stretch of bytes.
"""
