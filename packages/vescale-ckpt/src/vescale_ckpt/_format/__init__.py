"""What is on the disk: manifest, commit record, checksums and safetensors files."""
